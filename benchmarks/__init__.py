"""What compile_fsdp costs, measured side by side with its peers.

python -m benchmarks                         # everything, against the targets (make bench)
python -m benchmarks --only step --quick     # one part, small; --help lists the parts
python -m benchmarks.plan_against_truth      # plans beside what two ranks really do
python benchmarks/gpu_step.py                # a step on a GPU; torchrun, any number of ranks
python -m benchmarks.padding_waste           # padding of buffers of well-known models
"""
