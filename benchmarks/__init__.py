"""What compile_fsdp costs, measured side by side with its peers.

python -m benchmarks                         # everything, against the targets (make bench)
python -m benchmarks --only step --quick     # one part, small; --help lists the parts
python -m benchmarks.plan_against_truth      # plans beside what two ranks really do
python -m benchmarks.padding_waste           # padding of buffers of well-known models
"""
