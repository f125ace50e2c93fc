"""Every private torch name that the user-facing layer touches, with the reason.

The runtime's are in ``compile_fsdp.runtime.torch_internals``; each layer keeps its own, since
imports point downwards only.
"""
