"""Planes of quantised groups as groups of their own: compiled graphs gather each where it is read.

What is compared with is the same model on one rank: full fp32 weights, quantised along rows in
forward and along columns in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement
from torch.utils.checkpoint import checkpoint

from compile_fsdp import BlockAtomic, MixedPrecisionPolicy, Placements, ShardLayout, fully_shard
from compile_fsdp.passes.pipeline import compile_with_aot_eager
from compile_fsdp.passes.policy import Policy
from compile_fsdp.runtime.collectives import CollectiveRecord, recorded
from compile_fsdp.runtime.context import GroupContext
from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.happens_before import races
from compile_fsdp.runtime.mxfp8 import dequantize, quantize
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup, Phase
from compile_fsdp.runtime.placement import is_sharded
from compile_fsdp.runtime.planes import PlaneUnit
from compile_fsdp.runtime.quantized_linear import linear_in_graph
from compile_fsdp.runtime.recording import recorded_groups
from tests.distributed import distributed
from tests.quantized import MXFP8, RECOMPUTES_IN_GRAPHS

WIDTH, HIDDEN, BLOCKS, STEPS = 32, 96, 2, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)


class ShardedBlock:
    """A block's two matrices as a quantised group, read as compiled graphs read them."""

    def __init__(self, block: Block, label: str, placements: Placements, mesh: Any) -> None:
        self.block = block
        self.group = FsdpParameterGroup(
            block,
            dict(block.named_parameters()),
            mesh,
            *(
                in_blocks(each)
                for each in (placements.parameter, placements.gradient, placements.optimizer)
            ),
            MixedPrecisionPolicy(compute_weights="mxfp8"),
        )
        self.group.rename(f"0/{label}/0", label)
        self.planes = self.group.planes

    @property
    def units(self) -> list[FsdpParameterGroup | PlaneUnit]:
        return [self.group, *self.planes]

    def __call__(self, x: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
        name = self.group.name
        up = linear_in_graph(x, None, *leaves, name, 0, 2)
        return x + linear_in_graph(F.gelu(up), None, *leaves, name, 1, 2)


class Reference(torch.autograd.Function):
    """A linear layer with the quantised full weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, dequantize(*quantize(weight.detach())))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        columnwise = dequantize(*quantize(weight, columnwise=True), columnwise=True)
        return grad @ columnwise, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def reference(weights: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + Reference.apply(F.gelu(Reference.apply(x, up)), down)
    return x.pow(2).mean()


def in_blocks(placements: tuple[Placement, ...]) -> list[Placement]:
    return [BlockAtomic(32) if is_sharded(each) else each for each in placements]


def compiled(
    blocks: list[ShardedBlock], recompute: bool
) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, GroupInfo]]:
    """The loss of ``blocks``, scheduled by the passes; and what these know about the groups."""
    infos = {unit.name: unit.info for block in blocks for unit in block.units}
    leaves = [[unit.flat_leaf for unit in block.units] for block in blocks]

    def loss(x: torch.Tensor) -> torch.Tensor:
        for block, its_leaves in zip(blocks, leaves, strict=True):
            x = (
                checkpoint(block, x, its_leaves, use_reentrant=False)
                if recompute
                else block(x, its_leaves)
            )
        return x.pow(2).mean()

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_with_aot_eager(
            gm, inputs, groups=infos, policy=Policy(), verify=True, whole_model=True
        )

    return torch.compile(loss, backend=backend, fullgraph=True), infos


def gathers(records: list[CollectiveRecord]) -> list[str]:
    """Which planes were gathered, one entry for data and scales together."""
    kinds = [each.label.rpartition(":")[2] for each in records if each.kind == "all_gather"]
    assert kinds[::2] == kinds[1::2]
    return kinds[::2]


CASES = [
    pytest.param(
        mode,
        recompute,
        id=f"{mode} recompute" if recompute else mode,
        marks=() if (mode, recompute) in (("zero1", False), ("zero3", True)) else pytest.mark.slow,
    )
    for mode in ("zero1", "zero2", "zero3", "hsdp", "hfsdp")
    for recompute in (False, True)
]


@pytest.mark.parametrize(("mode", "recompute"), CASES)
@distributed(2)
def test_three_steps_bitwise_as_on_one_rank(mode: str, recompute: bool) -> None:
    shape = (2,) if mode.startswith("zero") else (2, 1) if recompute else (1, 2)
    check(mode, shape, recompute)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hsdp", "hfsdp"])
@distributed(4)
def test_three_steps_on_two_axes(mode: str) -> None:
    check(mode, (2, 2), recompute=False)


def check(mode: str, shape: tuple[int, ...], recompute: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    plain = [Block() for _ in range(BLOCKS)]
    full = [nn.Parameter(p.detach().clone()) for block in plain for p in block.parameters()]
    placements: Placements = getattr(Placements, mode)(mesh)
    blocks = [ShardedBlock(block, f"blocks.{n}", placements, mesh) for n, block in enumerate(plain)]
    context = GroupContext(torch.device("cpu"))
    for block in blocks:
        context.add_group(block.group)
    sharded = [each.sharded for block in blocks for each in block.group.parameters]
    loss_of, _ = compiled(blocks, recompute)
    optimizers = [torch.optim.SGD(each, lr=0.5) for each in (sharded, full)]
    for x in inputs():
        with recorded() as forward:
            loss = loss_of(x)
        with recorded() as backward:
            loss.backward()
        found, x.grad = x.grad, None
        expected = reference(full, x)
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(found, x.grad)
        for mine, theirs in zip(sharded, full, strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad)
        if mode == "zero3":
            assert gathers(forward) == ["rowwise"] * BLOCKS
            again = BLOCKS if recompute and RECOMPUTES_IN_GRAPHS else 0
            assert sorted(gathers(backward)) == ["columnwise"] * BLOCKS + ["rowwise"] * again
            assert not any(unit.is_unsharded for block in blocks for unit in block.units)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for block in blocks:
            for planes in block.planes:
                planes.sync_model_weight_from_main_weight()


def inputs() -> Iterator[torch.Tensor]:
    """The same on every rank: an average of equal gradients is exact for powers of two."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        yield torch.randn(4, 8, WIDTH, generator=generator).requires_grad_()


@distributed(2)
def test_a_forward_gathers_half_the_bytes_of_bf16() -> None:
    mesh = init_device_mesh("cpu", (2,))
    block = ShardedBlock(Block(), "block", Placements.zero3(mesh), mesh)
    GroupContext(torch.device("cpu")).add_group(block.group)
    for planes in block.planes:
        with recorded() as records:
            planes.acquire()
            planes.wait_for_unshard()
        planes.drop()
        sent = sum(record.bytes for record in records)
        assert sent <= 0.53 * 2 * 2 * WIDTH * HIDDEN
        assert planes.info.full_bytes == sent
    assert dist.get_world_size() == 2


@distributed(2)
def test_a_group_by_itself_gathers_what_a_phase_reads() -> None:
    mesh = init_device_mesh("cpu", (2,))
    group = ShardedBlock(Block(), "block", Placements.zero3(mesh), mesh).group
    rowwise, columnwise = group.planes
    assert memory_of(group) == (0, 0), "nothing has been gathered"
    with recorded() as records:
        group.unshard_parameters(Phase.FORWARD)
        group.wait_for_unshard(Phase.FORWARD)
    assert gathers(records) == ["rowwise"]
    assert group.is_rowwise_unsharded and not columnwise.is_unsharded and not group.is_unsharded
    with recorded() as records:
        group.unshard_parameters(Phase.BACKWARD)
        group.unshard_parameters(Phase.BACKWARD)
        group.wait_for_unshard(Phase.BACKWARD)
    assert gathers(records) == ["columnwise"]
    group.release_unsharded_storage(rowwise_only=True)
    assert not group.is_rowwise_unsharded and columnwise.is_unsharded
    with pytest.raises(RuntimeError, match="wait_for_unshard was called while"):
        group.wait_for_unshard(Phase.FORWARD)
    group.unshard_parameters()
    group.wait_for_unshard()
    assert group.is_unsharded and not rowwise.is_unsharded
    group.reshard_parameters()
    assert not any(each.is_unsharded for each in (group, *group.planes))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        group.unshard_parameters(phase)
    group.release_unsharded_storage()
    assert memory_of(group) == (0, 0)


def memory_of(group: FsdpParameterGroup) -> tuple[int, ...]:
    """Bytes of the gathered planes."""
    return tuple(planes.full_local_tensor.untyped_storage().nbytes() for planes in group.planes)


@distributed(2)
def test_who_reads_planes_without_waiting_races() -> None:
    mesh = init_device_mesh("cpu", (2,))
    group = ShardedBlock(Block(), "block", Placements.zero3(mesh), mesh).group
    for waits in (True, False):
        with recorded_groups(lambda: [group]) as recorder:
            for phase, planes in zip((Phase.FORWARD, Phase.BACKWARD), group.planes, strict=True):
                group.unshard_parameters(phase)
                if waits:
                    group.wait_for_unshard(phase)
                planes.full_local_tensor.clone()
            group.reshard_parameters()
        assert len(races(recorder.log)) == (0 if waits else 2)


@distributed(2)
def test_planes_that_are_older_than_a_step_are_gathered_anew() -> None:
    mesh = init_device_mesh("cpu", (2,))
    group = ShardedBlock(Block(), "block", Placements.zero3(mesh), mesh).group
    for phase, planes in zip((Phase.FORWARD, Phase.BACKWARD), group.planes, strict=True):
        group.unshard_parameters(phase)
        group.wait_for_unshard(phase)
        before = planes.full_planes(1)[1].clone()
        with torch.no_grad():
            group.main_weight.local.mul_(2.0)
        group.sync_model_weight_from_main_weight()
        group.unshard_parameters(phase)
        group.wait_for_unshard(phase)
        assert torch.equal(planes.full_planes(1)[1], before + 1), "exponents"


@distributed(2)
def test_a_step_writes_the_weight_itself_only_for_who_reads_it() -> None:
    mesh = init_device_mesh("cpu", (2,))
    block = Block().to(torch.bfloat16)
    group = ShardedBlock(block, "block", Placements.zero3(mesh), mesh).group
    group.unshard_parameters()
    group.reshard_parameters()
    before = group.model_weight.local.clone()
    with torch.no_grad():
        group.main_weight.local.mul_(2.0)
    group.sync_model_weight_from_main_weight()
    assert torch.equal(group.model_weight.local, before)
    group.unshard_parameters()
    assert torch.equal(group.model_weight.local, group.main_weight.local.to(torch.bfloat16))


@pytest.mark.parametrize("layout", list(ShardLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(3)
def test_data_and_scales_are_aligned(dtype: torch.dtype, layout: ShardLayout) -> None:
    """Every tensor and every rank's segment, for NCCL's fast path and vector loads."""
    mesh = init_device_mesh("cpu", (3,))
    sizes = ((32, 32), (32, 96), (96, 32))
    model = nn.Sequential(*(nn.Linear(*each, bias=False) for each in sizes)).to(dtype)
    fully_shard(model, mesh, None, MXFP8, shard_layout=layout)
    (group,) = model.fsdp_parameter_groups
    for planes in group.planes:
        assert all(offset % 16 == 0 for offset in planes.info.offsets)
    assert all(start % (32 * 16) == 0 for start in group.layout.rank_to_offset)
