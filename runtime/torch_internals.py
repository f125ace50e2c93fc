"""Every private torch name that the runtime leans on, with the reason.

Nothing else in ``compile_fsdp.runtime`` may spell a name of torch that starts with an
underscore. Each function below says what upstream behaviour it needs, so that the day a name
goes away there is one place to look.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._ops import OpOverload as OpOverload
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def in_backward() -> bool:
    """True on a thread that autograd's engine is running a backward on.

    There is no public question for "is a backward running here". The engine gives each backward
    a graph task id and keeps it in thread-local state; -1 means none.
    """
    return torch._C._current_graph_task_id() != -1


_RECORDS_GRAPHS = torch._C.DispatchKey.AutogradFunctionality


def is_below_autograd() -> bool:
    """Whether the caller is a kernel of an operator, a mode that sees operators, or in inference
    mode: where the dispatcher has been told to leave autograd out, in a kernel with its count of
    writes, in the body of a higher-order operator (`torch.cond`) without. It has no public
    question."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_RECORDS_GRAPHS)


def accumulation_into(leaf: torch.Tensor) -> Node:
    """The node of every graph that adds to the ``.grad`` of ``leaf``: the same one for as long as
    somebody keeps it."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def will_be_executed(node: Node) -> bool:
    """Whether the running backward was asked for what ``node`` does.

    ``torch.autograd.grad(loss, inputs)`` executes a compiled backward as a whole, parameter
    gradients included; only the engine knows that nobody asked for them. Must be called inside
    a backward.
    """
    return torch._C._will_engine_execute_node(node)


DISPATCHES_SUBCLASSES_AS_DTENSOR = torch.__version__ < "2.13"
"""Whether subclasses of DTensor have no operators of their own: torch 2.11 takes its own fast path
for them, whatever their ``__torch_dispatch__`` is; 2.13 asks them. (2.12 was not looked at.)"""


_version_of = operator.attrgetter("_version")


def writes_of(tensors: Sequence[torch.Tensor]) -> int:
    """How often ``tensors`` or views of them were written in place, as far as autograd counts.

    A DTensor has a count of its own besides its local tensor's, which is equal on all ranks, also
    on one that has no rows of it. What is written through ``.data`` does not count, nor what
    operators on lists write into torch's own DTensors (ours see to it themselves). Autograd's count
    has no public name. Inference tensors have none.
    """
    try:
        return sum(map(_version_of, tensors))
    except RuntimeError:
        return sum(0 if tensor.is_inference() else _version_of(tensor) for tensor in tensors)


def is_profiling() -> bool:
    """Whether ``torch.profiler`` (or ``emit_nvtx``) records on this thread.

    Opening a range takes a microsecond or two even when nobody records; asking takes none. The
    public modules have no such question.
    """
    return torch._C._autograd._profiler_enabled()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has executed all its nodes.

    The engine's callback queue has no public name, although DDP and FSDP2 both depend on it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def process_group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of ``group`` may take, as ``init_process_group`` was told.

    There is a public way to set it and none to read it; a group's backend keeps its options.
    """
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def hashed_group_name(group: dist.ProcessGroup) -> str:
    """The name that torch would give a new group of the members of ``group`` now.

    Members who make a group without the rest of the world meet under this name. It depends on how
    many groups this rank is in (up to torch 2.13), or has made (2.14): no public number.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.distributed_c10d._hash_ranks_to_str(ranks)


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many collectives ``group`` has started: the number that NCCL's watchdog prints and its
    flight recorder stores, which has no public name."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return number


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that is loaded; (0,) where torch was built without.

    ``torch.cuda.nccl.version`` exists in every build and fails in one without NCCL.
    """
    version: tuple[int, ...] = torch.cuda.nccl.version() if dist.is_nccl_available() else (0,)
    return version


class SymmetricMemoryOfTorch:
    """torch's symmetric memory on NCCL: prototype, so without public names.

    The module is imported when first used, for it imports kernels. FSDP2 uses the same functions
    (``set_symm_mem_for_comm``) from torch 2.13 on, where NCCL's memory can be pooled.

    Raises:
        RuntimeError: this torch was built without NCCL's symmetric memory, or another backend of it
            is in use in this process.
    """

    def __init__(self) -> None:
        from torch.distributed import _symmetric_memory

        self._module = _symmetric_memory
        # For the whole process, once. torch refuses when memory of another kind is in use.
        _symmetric_memory.set_backend("NCCL")

    @staticmethod
    def is_there() -> bool:
        """Whether this torch has a memory pool of NCCL's: 2.11 cannot tell its tensors either."""
        memory = torch._C._distributed_c10d._SymmetricMemory
        return hasattr(memory, "is_symm_mem_tensor")

    def allocating(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this thread allocates from torch's pool for ``device``."""
        return torch.cuda.use_mem_pool(self._module.get_mem_pool(device), device)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was allocated in it."""
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        found: bool = memory.is_symm_mem_tensor(tensor)
        return found

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make a window of ``group`` of what ``tensor`` is in. torch keeps it with the memory."""
        self._module.rendezvous(tensor, group.group_name)


def is_fake_tensor_class(kind: type) -> bool:
    """Whether ``kind`` is that of tensors without values, with which DTensor and Dynamo ask for
    shapes. The class has no public name."""
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(kind, FakeTensor)


def is_fake_group(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` communicates with nobody: torch's fake backend, for planning."""
    return dist.get_backend(group) == "fake"


def dtensor_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """What a DTensor knows about itself, made once for all DTensors over one piece of a buffer.

    ``DTensor.from_local`` makes a spec each time, inside of an autograd function, which takes
    longer than everything else about binding a gradient; and it ignores the shape of a 0-D
    tensor. FSDP2 depends on specs too.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of ``mesh``, dp_inner fastest, also while tensors are fake and have no values.

    ``DeviceMesh.mesh`` is computed when asked for; only this private context leaves the modes
    that a caller is in.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return tuple(mesh.mesh.flatten().tolist())


_D = TypeVar("_D", bound=DTensor)


def dtensor_over(local: torch.Tensor, spec: DTensorSpec, kind: type[_D] = DTensor) -> _D:  # type: ignore[assignment]
    """A DTensor, of class ``kind``, over ``local``, which it aliases.

    Made without ``DTensor.__init__``: it sets nothing, but costs some twenty calls to keep Dynamo
    out, and a step makes one for each gradient.
    """
    made: Any = kind.__new__(kind, local, spec, requires_grad=False)
    return made  # type: ignore[no-any-return]  # a cast would be one more call


def dtensors_over(
    locals_: Sequence[torch.Tensor], specs: Sequence[DTensorSpec], kind: type[DTensor]
) -> list[DTensor]:
    """`dtensor_over` of each of ``locals_``."""
    new = kind.__new__
    return [
        new(kind, local, spec, requires_grad=False)
        for local, spec in zip(locals_, specs, strict=True)
    ]


def spec_of(dtensor: DTensor) -> DTensorSpec:
    """What ``dtensor`` knows about itself; its public properties show parts of it."""
    return dtensor._spec


def local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself: ``to_local()`` gives a view that autograd follows."""
    return dtensor._local_tensor


def norm_placement(order: float) -> Placement:
    """The placement of a vector norm whose ranks' parts have not been put together yet.

    DTensor has one for norms other than maxima and counts, without a public name.
    """
    if math.isinf(order):
        return Partial("max" if order > 0 else "min")
    return Partial("sum") if order == 0 else _NormPartial(order)


@functools.cache
def operator_name(func: OpOverload) -> str:
    """An operator's name, without namespace and overload."""
    name: str = func.name()
    return name.partition("::")[2].partition(".")[0]


@functools.cache
def argument_names(func: OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, positional ones first; schemas are not public."""
    return tuple(argument.name for argument in func._schema.arguments)


@functools.cache
def written_arguments(func: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operator writes into."""
    return tuple(
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def number_of_results(func: OpOverload) -> int:
    """How many values an operator returns; a list counts as one."""
    return len(func._schema.returns)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in one call.

    torch's optimizers and its gradient clipping use the foreach operators; none has a public name.
    """
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def zero_each(tensors: Sequence[torch.Tensor]) -> None:
    """``tensor.zero_()`` for each, in one call (see `copy_each`)."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of 1-D ``flat``, one after the other, shaped like each of ``like``.

    All of these have elements. torch's own data parallelism takes its buckets to pieces by this
    one call.
    """
    return cast("Sequence[torch.Tensor]", torch._utils._unflatten_dense_tensors(flat, like))


def hook_tables(tensors: Sequence[torch.Tensor]) -> list[Mapping[int, Any] | None]:
    """Of each tensor what `gradient_hooks` looks into, which only grows and shrinks; None: no hook
    was ever registered."""
    return [tensor._backward_hooks for tensor in tensors]


def post_accumulate_hook_tables(
    tensors: Sequence[torch.Tensor],
) -> list[Mapping[int, Any] | None]:
    """As `hook_tables`, of `post_accumulate_hooks`."""
    return [tensor._post_accumulate_grad_hooks for tensor in tensors]


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """What ``tensor.register_hook`` has registered; autograd's own list has no public name."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` has registered; FSDP2 reads it too."""
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list((hooks or {}).values())


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give the hooks of ``source`` to ``target``; the handles that users hold still remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name, None)
        if hooks:
            hooks.update(getattr(target, name, None) or {})
            setattr(target, name, hooks)
            setattr(source, name, None)
