"""Small models that others reported: each trains as one process does, or says why not."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

from compile_fsdp import Placements, fully_shard, microbatch
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    assert_close,
    assert_gradients_close,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)

EAGER_AND_COMPILED = pytest.mark.parametrize("driver", ["eager", "aot_eager"])


def check_parity(model: nn.Module, batches: list[Any], driver: str) -> nn.Module:
    """Three steps of the sharded model agree with one process; returns the sharded model."""
    sharded = shard_blocks(copy.deepcopy(model))
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())
    return sharded


def pairs(width: int, out: int, count: int = 3, rows: int = 8) -> list[Any]:
    return [(torch.randn(rows, width), torch.randn(rows, out)) for _ in range(count)]


class Shared(nn.Module):
    """Both blocks contain the same projection."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"own": nn.Linear(4, 4), "shared": shared}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block["shared"](block["own"](x)))
        return F.mse_loss(x, y)


@EAGER_AND_COMPILED
@distributed(2)
def test_one_submodule_below_two_units(driver: str) -> None:
    """Case 3: the second unit is refused by name; a common parent owns it."""
    model = Shared()
    sharded = copy.deepcopy(model)
    fully_shard(sharded.blocks[0], cpu_mesh())
    with pytest.raises(ValueError, match=r"'shared\.weight' is already owned .*common parent"):
        fully_shard(sharded.blocks[1], cpu_mesh())
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    batches = pairs(4, 4)
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))


class TwoEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor, which: int) -> torch.Tensor:
        return F.mse_loss(torch.tanh(self.blocks[which](x)), y)


@EAGER_AND_COMPILED
@distributed(2)
def test_two_encoders_in_alternation_and_an_unused_parameter(driver: str) -> None:
    """Case 8: what was not used has no gradient, and weight decay does not touch it."""
    model = TwoEncoders()
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)
        for each in (sharded, model)
    ]
    for number, batch in enumerate(pairs(4, 4, count=4)):
        call(*local_batch(batch), number % 2).backward()
        model(*batch, number % 2).backward()
        assert_gradients_close(sharded, model)  # None where the reference has None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(left), right.detach(), rtol=1e-4, atol=2e-6)


@EAGER_AND_COMPILED
@distributed(2)
def test_double_backward_is_an_error_and_not_a_wrong_number(driver: str) -> None:
    """Case 13: eager refuses it by name, compiled graphs with PyTorch's own error."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fully_shard(model, cpu_mesh())
    x = torch.randn(2, 4, requires_grad=True)
    expected = "create_graph=True through" if driver == "eager" else "double backward|create_graph"
    loss = drive(model, driver)(x).sum()
    with pytest.raises(RuntimeError, match=expected):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@EAGER_AND_COMPILED
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@distributed(2)
def test_microbatches_on_meshes_with_an_axis_of_one(shape: tuple[int, int], driver: str) -> None:
    """Case 14: the sum of all four; the outer reduction runs once (and not where it is alone)."""
    check_microbatches(shape, driver)


@distributed(4)
def test_microbatches_on_a_square_mesh() -> None:
    """Case 14, (2, 2)."""
    check_microbatches((2, 2), "eager")


def check_microbatches(shape: tuple[int, int], driver: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp_inner"))
    model = LanguageModel(blocks=1)
    sharded = shard_blocks(copy.deepcopy(model), mesh, placements=Placements.hsdp(mesh))
    call = drive(sharded, driver)
    batches = language_batches(4, shape[0] * shape[1])
    with collectives.recorded() as records:
        for number, batch in enumerate(batches):
            with microbatch(sharded, is_last=number == 3):
                call(*local_batch(batch)).backward()
            model(*batch).backward()
    assert_gradients_close(sharded, model)
    outer = [record for record in records if record.kind == "all_reduce"]
    assert len(outer) == (2 if shape[0] > 1 else 0), outer  # the root's group and the block's


class WithTables(LanguageModel):
    """Tied, with a buffer that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) * self.scale


@EAGER_AND_COMPILED
@distributed(2)
def test_meta_tied_then_loaded(driver: str) -> None:
    """Case 26: right values after loading, still tied; the caller fills non-persistent buffers."""
    model = WithTables()
    with torch.device("meta"):
        sharded = WithTables()
    shard_blocks(sharded)
    sharded.scale = torch.full((1,), 0.5)
    sharded.load_state_dict(model.state_dict())
    assert sharded.head._parameters["weight"] is sharded.embedding._parameters["weight"]
    batches = language_batches(3, 2)
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))
    assert sharded.head._parameters["weight"] is sharded.embedding._parameters["weight"]


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(weight)


class Containers(nn.Module):
    """ParameterList, ParameterDict and a parametrized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module(), nn.Linear(4, 4)])
        first = self.blocks[0]
        first.factors = nn.ParameterList(torch.randn(4, 4) for _ in range(2))
        first.shifts = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})
        parametrize.register_parametrization(self.blocks[1], "weight", Doubled())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0]
        for factor in first.factors:
            x = torch.tanh(x @ factor)
        x = x + first.shifts["a"] * first.shifts["b"]
        return F.mse_loss(self.blocks[1](x), y)


@EAGER_AND_COMPILED
@distributed(2)
def test_parameter_containers_and_parametrizations(driver: str) -> None:
    """Case 27."""
    model = Containers()
    batches = pairs(4, 4)
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))


class Convolutions(nn.Module):
    """Channels last, running statistics, a complex table."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)])
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x.to(memory_format=torch.channels_last))
        x = self.norm(x) * self.phase.real[:, None, None]
        return self.blocks[1](F.relu(x)).square().mean()


@EAGER_AND_COMPILED
@distributed(2)
def test_channels_last_convolutions_with_batch_norm(driver: str) -> None:
    """Case 28: every rank sees the same batch, so statistics are those of one process."""
    model = Convolutions().to(memory_format=torch.channels_last)
    half = torch.randn(2, 3, 8, 8)
    batches = [(torch.cat([half, half]),)] * 3
    sharded = check_parity(model, batches, driver)
    reference = copy.deepcopy(model)
    train(reference, batches, distributed=False)
    torch.testing.assert_close(sharded.norm.running_mean, reference.norm.running_mean)
    torch.testing.assert_close(sharded.phase, model.phase, rtol=0, atol=0)


@EAGER_AND_COMPILED
@distributed(2)
def test_fp32_tables_under_bf16(driver: str) -> None:
    """Case 28: a rotary table that was kept in fp32 stays there, and is used in fp32."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.register_buffer("table", torch.arange(4.0) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.blocks[0](x).float() * self.table).sum()

    model = Rotary()
    model.blocks.to(torch.bfloat16)
    sharded = shard_blocks(copy.deepcopy(model))
    x = torch.randn(3, 4).to(torch.bfloat16)
    loss = drive(sharded, driver)(x)
    torch.testing.assert_close(loss, model(x), rtol=0, atol=0)
    loss.backward()
    assert sharded.table.dtype is torch.float32
    torch.testing.assert_close(sharded.table, model.table, rtol=0, atol=0)


@dataclass
class Output:
    loss: torch.Tensor
    extras: dict[str, Any]
    nothing: None = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Nested(), Nested()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        inner = self.blocks[0](value={"x": x}, scale=2.0)
        outer = self.blocks[1](value={"x": inner["nested"][0]}, scale=None)
        return Output(F.mse_loss(outer["nested"][0], y), {"aux": [outer["nested"][1].mean(), None]})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, value: dict[str, torch.Tensor], scale: float | None) -> dict[str, Any]:
        out = self.linear(value["x"]) * (scale or 1.0)
        return {"nested": (torch.tanh(out), out.square()), "none": None}


@EAGER_AND_COMPILED
@distributed(2)
def test_structured_outputs_and_keyword_arguments(driver: str) -> None:
    """Case 30: dataclasses, dicts, nested tuples, keyword arguments, None."""
    model = Structured()
    batches = pairs(4, 4)
    sharded = shard_blocks(copy.deepcopy(model))

    def total(output: Output) -> torch.Tensor:
        assert output.nothing is None and output.extras["aux"][1] is None
        return output.loss + output.extras["aux"][0]

    run = train(sharded, batches, call=drive(sharded, driver), loss_of=total)
    assert_close(run, train_reference(model, batches, loss_of=total))


class Padded(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0, sparse=sparse)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.blocks[0](self.embedding(tokens)), y)


@EAGER_AND_COMPILED
@distributed(2)
def test_an_embedding_with_padding(driver: str) -> None:
    """Case 40: the padding row gets no gradient."""
    batches = [(torch.randint(0, 7, (8,)), torch.randn(8, 4)) for _ in range(3)]
    batches[0][0][:4] = 0
    sharded = check_parity(Padded(), batches, driver)
    sharded(*local_batch(batches[0])).backward()
    assert not full(sharded.embedding._parameters["weight"].grad)[0].any()


@EAGER_AND_COMPILED
@distributed(2)
def test_a_sparse_embedding_is_an_error_by_name(driver: str) -> None:
    """Case 40: sharded gradients are dense."""
    sharded = shard_blocks(Padded(sparse=True))
    batch = [torch.randint(0, 7, (4,)), torch.randn(4, 4)]
    with pytest.raises(Exception, match=r"(?i)sparse"):
        drive(sharded, driver)(*batch).backward()
