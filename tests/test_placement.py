"""Placements: the rows of the mode table, and an error with a reason for each illegal one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from compile_fsdp.runtime.placement import (
    BlockAtomic,
    Flat,
    Placements,
    RowAtomic,
    ShardAxes,
    TensorAtomic,
    strictest_shard,
)

R, S, A = Replicate(), Shard(0), Partial("avg")


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    """Eight ranks that do not exist: meshes need a process group, placements no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))


@pytest.fixture(scope="module")
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))


@pytest.mark.parametrize(
    ("mode", "parameter", "gradient", "optimizer"),
    [
        ("ddp", (R,), (A,), (R,)),
        ("zero1", (R,), (A,), (S,)),
        ("zero2", (R,), (S,), (S,)),
        ("zero3", (S,), (S,), (S,)),
        ("hsdp", (R, S), (A, S), (R, S)),
        ("hfsdp", (R, S), (A, S), (S, S)),
    ],
)
def test_mode_table(
    mode: str,
    parameter: tuple[Placement, ...],
    gradient: tuple[Placement, ...],
    optimizer: tuple[Placement, ...],
    line: DeviceMesh,
    square: DeviceMesh,
) -> None:
    mesh, other = (line, square) if len(parameter) == 1 else (square, line)
    placements = getattr(Placements, mode)(mesh)
    assert placements == Placements(mesh.mesh_dim_names, parameter, gradient, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"Placements.{mode}\(mesh\): expected a .-D mesh"):
        getattr(Placements, mode)(other)


def test_meshes_without_names(square: DeviceMesh) -> None:
    unnamed = init_device_mesh("cpu", (2, 4))
    assert Placements.hsdp(unnamed).dp_axes == (0, 1)
    assert Placements.hsdp(square).dp_axes == ("outer", "inner")


@pytest.mark.parametrize("axes", [("outer", "inner"), (0, 1), (-2, -1), ("outer", -1)])
def test_axes_resolve_to_numbers(axes: tuple[str | int, ...], square: DeviceMesh) -> None:
    resolved = Placements(axes, (R, S), (A, S), (R, S)).resolve(square)
    assert resolved == Placements((0, 1), (R, S), (A, S), (R, S))


def test_one_axis_of_a_larger_mesh(square: DeviceMesh) -> None:
    assert Placements(("inner",), (S,), (S,), (S,)).resolve(square).dp_axes == (1,)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        (
            ("inner", "outer"),
            r"expected mesh order \(outer=2, inner=4\), found axis numbers \(1, 0",
        ),
        (("outer", 0), "name one mesh axis twice"),
        (("outer", "tp"), "has no axis named 'tp'"),
        ((0, 2), "axis 2 is out of range for the 2-D mesh"),
        ((-3, 1), "axis -3 is out of range"),
    ],
)
def test_axes_that_the_mesh_does_not_have(
    axes: tuple[str | int, ...], reason: str, square: DeviceMesh
) -> None:
    with pytest.raises(ValueError, match=reason):
        Placements(axes, (R, S), (A, S), (R, S)).resolve(square)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((("x", "x"), (R, S), (A, S), (R, S)), "expected distinct axes"),
        (((), (), (), ()), "at least one mesh axis"),
        ((("x",), (R, S), (A,), (R,)), r"parameter placements: expected one for each of the axes"),
        ((("x",), (R,), (A, S), (R,)), r"gradient placements: expected one for each of the axes"),
        ((("x",), (R,), (A,), ()), r"optimizer placements: expected one for each of the axes"),
        ((("x",), (S,), (S,), (R,)), "optimizer must not be less sharded than the parameter"),
        ((("x",), (R,), (S,), (R,)), "optimizer must not be less sharded than the gradient"),
        ((("x", "y"), (S, R), (A, A), (S, S)), r"axis 'x' is sharded but an axis inside it is not"),
        ((("x", "y"), (R, R), (S, A), (S, S)), r"gradient placements .* must be a suffix"),
        ((("x",), (Shard(1),), (S,), (S,)), r"parameter placement of axis 'x': expected Shard\(0"),
        ((("x",), (S,), (Partial("sum"),), (S,)), r"expected Replicate\(\), Shard\(0\) or Partial"),
        ((("x",), (A,), (A,), (R,)), "only gradients are partial"),
        ((("x",), (R,), (R,), (R,)), r'expected Partial\("avg"\) or Shard\(0\)'),
        ((("x", "y"), (R, TensorAtomic()), (A, S), (R, S)), "exactly one data-parallel axis"),
    ],
)
def test_illegal_placements(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Placements(*arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("x", (R,), (A,), (R,)), "dp_axes: expected a sequence"),
        (((1.0,), (R,), (A,), (R,)), "expected axis names or numbers"),
        ((("x",), ("shard",), (A,), (R,)), "expected a torch.distributed.tensor Placement"),
        ((("x",), R, (A,), (R,)), "parameter: expected a sequence"),
    ],
)
def test_arguments_of_the_wrong_type(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        Placements(*arguments)


def test_lists_become_tuples() -> None:
    placements = Placements(["x"], [S], [S], [S])  # type: ignore[arg-type]
    assert placements.parameter == (S,)
    assert hash(placements) == hash(Placements(("x",), (S,), (S,), (S,)))


@pytest.mark.parametrize("promise", [Flat(), RowAtomic(), BlockAtomic(32), TensorAtomic()])
def test_promises_are_shards(promise: Shard) -> None:
    assert promise == S
    assert S == promise
    assert hash(promise) == hash(S)
    assert promise.dim == 0
    assert not promise.is_replicate()
    for copied in (copy.deepcopy(promise), pickle.loads(pickle.dumps(promise))):
        assert type(copied) is type(promise)
        assert repr(copied) == repr(promise)


def test_the_strictest_promise_wins() -> None:
    assert strictest_shard([R, A]) is None
    assert type(strictest_shard([Flat(), R])) is Flat
    assert type(strictest_shard([Flat(), S])) is RowAtomic
    blocks = strictest_shard([BlockAtomic(4), RowAtomic(), BlockAtomic(6)])
    assert isinstance(blocks, BlockAtomic)
    assert blocks.rows == 12
    assert type(strictest_shard([BlockAtomic(4), TensorAtomic()])) is TensorAtomic
    with pytest.raises(ValueError, match="at least 1 row a block, got 0"):
        BlockAtomic(0)


def test_innermost_axis_is_most_significant(square: DeviceMesh) -> None:
    # Rank 5 is at outer 1, inner 1.
    axes = ShardAxes.of(square, (S, S))
    assert (axes.axes, axes.sizes, axes.coordinate) == ((0, 1), (2, 4), (1, 1))
    assert axes.num_shards == 8
    assert axes.segment == 3
    assert axes.segments_along(0) == [2, 3]
    assert axes.segments_along(1) == [1, 3, 5, 7]
    inner = ShardAxes.of(square, (R, S))
    assert (inner.segment, inner.num_shards) == (1, 4)
    assert ShardAxes.of(square, (R, R)).num_shards == 1
    assert torch.Size(axes.sizes).numel() == axes.num_shards
