"""Every private torch name that the runtime leans on, with the reason.

Nothing else in ``compile_fsdp.runtime`` may spell a name of torch that starts with an
underscore. Each function below says what upstream behaviour it needs, so that the day a name
goes away there is one place to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta


def in_backward() -> bool:
    """True on a thread that autograd's engine is running a backward on.

    There is no public question for "is a backward running here". The engine gives each backward
    a graph task id and keeps it in thread-local state; -1 means none.
    """
    return torch._C._current_graph_task_id() != -1


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the running backward was asked for the gradient of ``leaf``.

    ``torch.autograd.grad(loss, inputs)`` executes a compiled backward as a whole, parameter
    gradients included; only the engine knows that nobody asked for them. Must be called inside
    a backward. Outside of one (gradients computed by a forward graph) the answer is True.
    """
    if not in_backward():
        return True
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has executed all its nodes.

    The engine's callback queue has no public name, although DDP and FSDP2 both depend on it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


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


def dtensor_over(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over ``local``, which it aliases."""
    return DTensor(local, spec, requires_grad=False)


def dtensor_parameter(dtensor: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """A Parameter that is ``dtensor``, placements included.

    ``nn.Parameter`` detaches, and on torch 2.14 a detached DTensor has plain placements: the rows
    of each rank would be forgotten, and ``full_tensor()`` would be wrong without an error.
    """
    parameter = nn.Parameter(dtensor, requires_grad=requires_grad)
    parameter._spec = dtensor._spec  # type: ignore[attr-defined]
    return parameter


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
