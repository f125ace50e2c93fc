"""The command line: ``python -m compile_fsdp plan TARGET`` and ``... explain TARGET``."""
