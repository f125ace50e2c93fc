"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils import _pytree

_F = TypeVar("_F", bound=Callable[..., object])


def inlined_or_skipped(function: _F) -> _F:
    """Let Dynamo inline ``function`` into a trace, but never start a trace at it.

    A hook begins with ``if torch.compiler.is_compiling(): return``, which is right when it is
    traced as a part of a module's call. After a graph break the module is called by the
    interpreter, and Dynamo would take the hook for a program of its own: ``is_compiling()``
    would be true and the hook would do nothing. ``torch.compiler.disable`` could not be inlined.
    """
    return _skip(function, eval_frame._FrameAction.DEFAULT)


def never_compiled_alone(function: _F) -> _F:
    """As `inlined_or_skipped`, and whatever ``function`` calls is not compiled either."""
    return _skip(function, eval_frame._FrameAction.SKIP)


def _skip(function: _F, callees: Any) -> _F:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    eval_frame.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function


@inlined_or_skipped
def is_dynamo_active() -> bool:
    """Whether Dynamo compiles the frames that are about to run (the answer holds for a caller
    that is `inlined_or_skipped`). ``torch.compiler.is_compiling`` is about tracing only."""
    return eval_frame.get_eval_frame_callback() not in (None, False)


def flatten(tree: object) -> tuple[list[Any], Any]:
    """The leaves of a nest of containers, and what `unflatten` needs to build it again.

    The inputs and outputs of a forward may be any nest, and users register containers of their own
    with this module; torch has no public spelling for it.
    """
    return _pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    return _pytree.tree_unflatten(leaves, structure)


def without_compile_wrapper(module: nn.Module) -> nn.Module:
    """The module inside the wrapper that ``torch.compile(module)`` returns, or ``module``.

    The wrapper forwards attribute reads to the module it wraps, which it holds under this private
    name; its own class must stay what it is.
    """
    wrapped = module._modules.get("_orig_mod")
    return module if wrapped is None else wrapped


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` or a view of it was written in place; autograd's own count."""
    return tensor._version
