"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a shape and no values: the class has no public name."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def compilation_in_progress() -> tuple[str, str | None]:
    """Dynamo's name for the compilation that runs now ("0/1"), and which guard of the code that
    was compiled before failed (None when there was none).

    Backends get neither as an argument. The guard is what ``TORCH_LOGS=recompiles`` prints.
    """
    from torch._dynamo.utils import get_metrics_context

    compile_id = torch._guards.CompileContext.current_compile_id()
    failed = get_metrics_context()._metrics.get("recompile_reason")
    return ("" if compile_id is None else str(compile_id)), failed


def graph_break_of(gm: torch.fx.GraphModule) -> tuple[str, traceback.FrameSummary | None] | None:
    """Why Dynamo ended this graph, and the user's line; None where the program ended there.

    Dynamo leaves it on the module for backends; ``torch._dynamo.explain`` reads it as well.
    """
    return _break(getattr(gm, "compile_subgraph_reason", None))


def graph_breaks() -> list[tuple[str, traceback.FrameSummary | None]]:
    """All graph breaks since Dynamo was last reset, also those before which there was no graph to
    compile and of which no backend hears."""
    from torch._dynamo.utils import graph_break_reasons

    return [found for found in map(_break, graph_break_reasons) if found is not None]


def _break(reason: Any) -> tuple[str, traceback.FrameSummary | None] | None:
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), reason.user_stack[-1] if reason.user_stack else None


def backend_of(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The backend of what ``torch.compile(module, ...)`` returned and the keyword arguments of
    ``torch.compile`` that it was given; None for a module that is not compiled.

    ``explain`` compiles anew with the same settings, which only the wrapper remembers.
    """
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    if not isinstance(module, OptimizedModule):
        return None
    context: Any = module.dynamo_ctx
    wrapper: Any = innermost_backend(context.callback)
    settings = {
        "fullgraph": context.fullgraph,
        "dynamic": getattr(wrapper, "dynamic", None),
        **getattr(wrapper, "kwargs", {}),
    }
    return getattr(wrapper, "compiler_fn", wrapper), settings


def compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: only this private attribute tells."""
    return module._compiled_call_impl is not None


@contextmanager
def compiling_aside() -> Iterator[dict[str, Any]]:
    """Compile without leaving traces, backward graphs at once; yields arguments for
    ``torch.compile``.

    - What was compiled gets a cache of its own (torch 2.13 and later), so that it counts for no
      recompile limit. A backend that nothing else uses is never found by other calls anyway.
    - Backward graphs are compiled with their forward graphs; usually that waits for the first
      backward, which an explanation does not run.
    - The record of sizes by which Dynamo guesses what is dynamic is put back: a model that was
      explained at one size is compiled at the next as if it had not been.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    from torch._dynamo import pgo

    sizes = pgo.get_code_state()
    before = {code: copy.deepcopy(state) for code, state in sizes.items()}
    isolated = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    with ExitStack() as stack:
        stack.enter_context(dynamo_config.patch("automatic_dynamic_local_pgo", False))
        stack.enter_context(dynamo_config.patch("automatic_dynamic_remote_pgo", False))
        stack.enter_context(functorch_config.patch("force_non_lazy_backward_lowering", True))
        try:
            yield {"isolate_recompiles": True} if isolated else {}
        finally:
            sizes.clear()
            sizes.update(before)


def init_fake_process_group(ranks: int) -> None:
    """A process group of ``ranks`` in which this process is rank 0 and collectives do nothing.

    The backend "fake" is registered, and its store is found, by this import only.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def init_own_process_group() -> None:
    """A gloo process group of this process alone; the store in memory has no exported name."""
    from torch._C._distributed_c10d import HashStore

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have shapes and no memory; Dynamo takes them as they are.

    Public modules have no fake tensors, and meta tensors would be another device, for which
    attention picks another kernel.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What ``torch.compile(fullgraph=True)`` raises where the model breaks its graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError, exc.TorchRuntimeError)


def place_of(error: BaseException) -> traceback.FrameSummary | None:
    """The user's line at which Dynamo gave up; only its own errors know it."""
    stack = getattr(error, "real_stack", None)
    return stack[-1] if stack else None
