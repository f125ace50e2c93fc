"""Train a model in one process, sharded in each driver, or under PyTorch's FSDP2, and compare.

The reference is one process on the concatenated batch. Ranks average their gradients over equal
parts of it, so the two differ by rounding only: fp32 sums in another order. `TOLERANCE` is for
that; where the arithmetic is the same, tests compare bitwise with `assert_same`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from compile_fsdp import fully_shard

DRIVERS = ("eager", "aot_eager", "inductor")

# Sums of some hundred fp32 products in another order, through a few optimizer steps.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}

Batch = Sequence[torch.Tensor]


@dataclass
class Run:
    """What a training run produced, as full tensors.

    Attributes:
        losses: the mean loss over ranks of every step.
        gradients: for every step the gradient of each parameter by name (None where it has none).
        parameters: the final parameters.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def cpu_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard_blocks(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """``fully_shard`` every child of ``model.blocks``, then ``model``."""
    mesh = mesh or cpu_mesh()
    for block in model.blocks.children():
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    return model


def drive(model: nn.Module, driver: str, **options: Any) -> Callable[..., Any]:
    """What to call to run ``model``: itself, or compiled with the graphs verified."""
    if driver == "eager":
        return model
    options = {"inner": driver, "verify": True, **options}
    compiled: Callable[..., Any] = torch.compile(model, backend="compile_fsdp", options=options)
    return compiled


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose large eps keeps a gradient that is zero up to rounding (an attention key's
    bias) from being blown up to a full step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy of the whole value of ``tensor``, sharded or not."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def local_batch(batch: Batch) -> list[torch.Tensor]:
    """This rank's part of a global batch."""
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch]


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    call: Callable[..., Any] | None = None,
    distributed: bool = True,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    loss_of: Callable[[Any], torch.Tensor] = lambda output: output,
    prepare: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> Run:
    """One optimizer step for each batch; the model maps a batch to its loss."""
    run = Run()
    optimizer = make_optimizer(model)
    prepare(optimizer)
    call = model if call is None else call  # torch.compile's wrapper has a len()
    for batch in batches:
        loss = loss_of(call(*(local_batch(batch) if distributed else batch)))
        loss.backward()
        run.losses.append(mean_over_ranks(loss) if distributed else loss.detach().clone())
        run.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: full(each) for name, each in model.named_parameters()}
    return run


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The mean of the ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Full gradients by parameter name."""
    return {
        name: None if each.grad is None else full(each.grad)
        for name, each in model.named_parameters()
    }


def train_reference(model: nn.Module, batches: Sequence[Batch], **options: Any) -> Run:
    """Train a copy of the unsharded ``model`` in this process on the whole batches."""
    return train(copy.deepcopy(model), batches, distributed=False, **options)


def train_fsdp2(model: nn.Module, batches: Sequence[Batch], **options: Any) -> Run:
    """Train a copy of ``model`` sharded by PyTorch's FSDP2, blocks first."""
    from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

    sharded = copy.deepcopy(model)
    mesh = cpu_mesh()
    for block in sharded.blocks.children():
        fsdp2_fully_shard(block, mesh=mesh)
    fsdp2_fully_shard(sharded, mesh=mesh)
    return train(sharded, batches, **options)


def assert_gradients_close(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """The gradients of two models agree within rounding, None where the other has none."""
    wanted = gradients_of(expected)
    for name, gradient in gradients_of(found).items():
        _close(f"gradient of {name}", gradient, wanted[name], **{**TOLERANCE, **tolerance})


def assert_close(found: Run, expected: Run, **tolerance: float) -> None:
    """Losses, gradients of every step and final parameters agree within rounding."""
    _compare(found, expected, **{**TOLERANCE, **tolerance})


def assert_same(found: Run, expected: Run) -> None:
    """Losses, gradients of every step and final parameters agree bit for bit."""
    _compare(found, expected, rtol=0, atol=0)


def _compare(found: Run, expected: Run, rtol: float, atol: float) -> None:
    for step, (left, right) in enumerate(zip(found.losses, expected.losses, strict=True)):
        _close(f"loss of step {step}", left, right, rtol, atol)
    for step, (lefts, rights) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert lefts.keys() == rights.keys()
        for name, wanted in rights.items():
            _close(f"gradient of {name} in step {step}", lefts[name], wanted, rtol, atol)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, wanted in expected.parameters.items():
        _close(f"parameter {name}", found.parameters[name], wanted, rtol, atol)


def _close(
    what: str, found: torch.Tensor | None, wanted: torch.Tensor | None, rtol: float, atol: float
) -> None:
    if found is None or wanted is None:
        assert found is wanted, f"{what}: found {found}, expected {wanted}"
        return
    torch.testing.assert_close(
        found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )
