"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils import _pytree

_F = TypeVar("_F", bound=Callable[..., object])


def never_compiled_alone(function: _F) -> _F:
    """Let Dynamo inline ``function`` into a trace, but never start a trace at it.

    A hook begins with ``if torch.compiler.is_compiling(): return``, which is right when it is
    traced as a part of a module's call. After a graph break the module is called by the
    interpreter, and Dynamo would take the hook for a program of its own: ``is_compiling()``
    would be true and the hook would do nothing. Skipping its code object, and whatever it calls,
    is what ``torch.compiler.disable`` does at run time, but that cannot be inlined.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function


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
