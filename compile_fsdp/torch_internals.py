"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""

from __future__ import annotations

from torch import nn


def without_compile_wrapper(module: nn.Module) -> nn.Module:
    """The module inside the wrapper that ``torch.compile(module)`` returns, or ``module``.

    The wrapper forwards attribute reads to the module it wraps, which it holds under this private
    name; its own class must stay what it is.
    """
    wrapped = module._modules.get("_orig_mod")
    return module if wrapped is None else wrapped
