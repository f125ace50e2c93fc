"""The parts of train_lm.py: a byte-level language model, its data and what a run needs."""
