"""Process groups of lanes: who gets one, that they are found again, and that they go away.

NCCL needs them and no GPU is here, so they are asked for on gloo (`separate(..., own=True)`),
which takes the same path but for the call that makes a group.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from compile_fsdp import Placements, fully_shard, fully_shard_optimizer, microbatch
from compile_fsdp.runtime import collectives, process_groups
from compile_fsdp.runtime.agreement import agreement_of
from compile_fsdp.runtime.process_groups import (
    GATHER,
    REDUCE_INNER,
    REDUCE_OUTER,
    UNIFIED,
    backend_of,
    connect,
    group_of_lane,
    lanes_over,
    own_groups_pay,
    separate,
)
from tests.distributed import distributed, run
from tests.models import LanguageModel, language_batches
from tests.modes import mesh_of
from tests.training import adamw, assert_same, cpu_mesh, drive, shard_blocks, train

R, S, A = Replicate(), Shard(0), Partial("avg")
ALL_LANES = (GATHER, REDUCE_INNER, REDUCE_OUTER)

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("mode", "uses"),
    [
        ("zero3", {GATHER: [0], REDUCE_INNER: [0]}),
        ("zero2", {GATHER: [0], REDUCE_INNER: [0]}),
        ("zero1", {GATHER: [0], REDUCE_OUTER: [0]}),
        ("ddp", {REDUCE_OUTER: [0]}),
    ],
)
@distributed(2)
def test_which_lane_communicates_over_one_axis(mode: str, uses: dict[str, list[int]]) -> None:
    mesh = cpu_mesh()
    placements = getattr(Placements, mode)(mesh)
    found = lanes_over(mesh, placements.parameter, placements.gradient, placements.optimizer)
    assert found == tuple((lane, axis) for lane, axes in uses.items() for axis in axes)


@distributed(4)
def test_which_lane_communicates_over_which_axis() -> None:
    mesh, flat = mesh_of((2, 2)), mesh_of((1, 4))
    hsdp, hfsdp = ((R, S), (A, S), (R, S)), ((R, S), (A, S), (S, S))
    inner = ((GATHER, 1), (REDUCE_INNER, 1))
    assert lanes_over(mesh, *hsdp) == (*inner, (REDUCE_OUTER, 0))
    assert lanes_over(mesh, *hfsdp) == ((GATHER, 0), *inner, (REDUCE_OUTER, 0))
    assert lanes_over(flat, *hfsdp) == inner, "nothing is sent over an axis of one rank"


@distributed(2)
def test_gloo_needs_none() -> None:
    before = dist.get_pg_count()
    mesh = cpu_mesh()
    made_by_the_mesh = dist.get_pg_count()
    shard_blocks(LanguageModel(), mesh)
    assert dist.get_pg_count() == made_by_the_mesh <= before + 1
    assert backend_of(mesh.get_group(), "cpu") == "gloo"
    assert [own_groups_pay(name) for name in ("gloo", "nccl", "fake", None)] == [
        False,
        True,
        False,
        False,
    ]


@distributed(2)
def test_the_first_lane_takes_the_mesh_and_the_others_get_their_own() -> None:
    mesh = cpu_mesh()
    axis = mesh.get_group()
    uses = tuple((lane, 0) for lane in ALL_LANES)
    separate(mesh, uses, own=True)
    groups = [group_of_lane(mesh, 0, lane) for lane in ALL_LANES]
    assert groups[0] is axis
    assert len(set(groups)) == 3
    assert [group.group_desc for group in groups[1:]] == [
        "compile_fsdp reduce_inner dp",
        "compile_fsdp reduce_outer dp",
    ]
    for group in groups[1:]:
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(axis)
        assert agreement_of(group) is agreement_of(axis), "one program, one order"
    assert group_of_lane(mesh, 0, UNIFIED) is group_of_lane(mesh, 0, "any other") is axis
    # What is there is used again, also by a mesh that was made anew over the same ranks.
    count = dist.get_pg_count()
    separate(cpu_mesh(), uses[::-1], own=True)
    assert [group_of_lane(cpu_mesh(), 0, lane) for lane in ALL_LANES] == groups
    assert dist.get_pg_count() == count


@distributed(4)
def test_groups_of_two_axes() -> None:
    mesh = mesh_of((2, 2))
    separate(mesh, lanes_over(mesh, (R, S), (A, S), (S, S)), own=True)
    groups = {
        (lane, axis): group_of_lane(mesh, axis, lane) for lane in ALL_LANES for axis in (0, 1)
    }
    assert groups[GATHER, 0] is mesh.get_group(0)
    assert groups[GATHER, 1] is mesh.get_group(1)
    assert groups[REDUCE_INNER, 1].group_desc == "compile_fsdp reduce_inner dp_inner"
    assert groups[REDUCE_OUTER, 0].group_desc == "compile_fsdp reduce_outer dp_outer"
    # Each works over the ranks of its axis.
    inner, outer = torch.ones(1), torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(inner, group=groups[REDUCE_INNER, 1])
    dist.all_reduce(outer, group=groups[REDUCE_OUTER, 0])
    assert inner.item() == 2.0
    assert outer.item() == 2.0 * (dist.get_rank() % 2) + 2.0


def train_in(driver: str, shape: tuple[int, ...], *, own: bool, **options: Any) -> Any:
    """A model trained on a mesh, with process groups of their own for lanes or without."""
    torch.manual_seed(0)
    model, mesh = LanguageModel(), mesh_of(shape)
    placements = Placements.hfsdp(mesh) if len(shape) == 2 else None
    if own:
        separate(
            mesh, tuple((lane, axis) for lane in ALL_LANES for axis in range(mesh.ndim)), own=True
        )
    shard_blocks(model, mesh, placements=placements, **options)
    return train(
        model, language_batches(3, 4), call=drive(model, driver), prepare=fully_shard_optimizer
    )


def groups_that_reductions_used(driver: str, shape: tuple[int, ...]) -> set[str]:
    """Train with and without groups of their own, compare, and say where reductions went."""
    plain = train_in(driver, shape, own=False)
    used: list[tuple[str, str]] = []
    original = collectives.all_gather, collectives.reduce_scatter

    def note(call: Any) -> Any:
        def noting(*arguments: Any, **rest: Any) -> None:
            used.append((arguments[0].name, arguments[3].group_desc))
            call(*arguments, **rest)

        return noting

    collectives.all_gather, collectives.reduce_scatter = map(note, original)
    try:
        separated = train_in(driver, shape, own=True)
    finally:
        collectives.all_gather, collectives.reduce_scatter = original
    assert_same(separated, plain)
    assert all("compile_fsdp" not in group for lane, group in used if lane == GATHER)
    return {group for lane, group in used if lane != GATHER}


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_group_of_its_own_changes_no_bit(driver: str) -> None:
    assert groups_that_reductions_used(driver, (2,)) == {"compile_fsdp reduce_inner dp_inner"}


@distributed(4)
def test_groups_of_their_own_on_two_axes_change_no_bit() -> None:
    assert groups_that_reductions_used("eager", (2, 2)) == {
        "compile_fsdp reduce_inner dp_inner",
        "compile_fsdp reduce_outer dp_outer",
    }


@pytest.mark.parametrize(
    ("driver", "shape"), [("eager", (2,)), ("eager", (2, 1)), ("aot_eager", (2,))], ids=str
)
@distributed(2)
def test_one_lane_for_all_gives_the_same_bits(driver: str, shape: tuple[int, ...]) -> None:
    plain = train_in(driver, shape, own=False)
    unified = train_in(driver, shape, own=False, unify_communication_stream=True)
    assert_same(unified, plain)


@distributed(2)
def test_the_root_says_whether_there_is_one_lane() -> None:
    mesh = cpu_mesh()
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh, unify_communication_stream=True)
    lanes = model._fsdp_unit.context.lanes
    assert lanes.gather is lanes.reduce_inner is lanes.reduce_outer
    assert lanes.gather.name == UNIFIED
    assert {unit.context for unit in (block._fsdp_unit for block in model.blocks)} == {
        model._fsdp_unit.context
    }
    assert copy.deepcopy(model)._fsdp_unit.context.unified
    # The other way round: a root that wants lanes of their own has them.
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh, unify_communication_stream=True)
    fully_shard(model, mesh)
    lanes = model._fsdp_unit.context.lanes
    assert len({lanes.gather, lanes.reduce_inner, lanes.reduce_outer}) == 3


@distributed(2)
def test_one_lane_and_microbatches() -> None:
    mesh = mesh_of((2, 1))

    def run(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = LanguageModel()
        shard_blocks(model, mesh, placements=Placements.hsdp(mesh), **options)
        optimizer = adamw(model)
        for _ in range(2):
            for number, batch in enumerate(language_batches(2, 2)):
                with microbatch(model, number == 1):
                    model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.full_tensor() for parameter in model.parameters()]

    for found, wanted in zip(run(unify_communication_stream=True), run(), strict=True):
        assert torch.equal(found, wanted)


@distributed(2)
def test_deep_copies_and_other_models_share_the_groups() -> None:
    mesh = cpu_mesh()
    separate(mesh, ((GATHER, 0), (REDUCE_INNER, 0)), own=True)
    count = dist.get_pg_count()
    models = [shard_blocks(LanguageModel(), mesh) for _ in range(2)]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        model(*language_batches(1, 2)[0]).backward()
    assert dist.get_pg_count() == count


@distributed(2)
def test_nothing_keeps_a_destroyed_group_alive() -> None:
    mesh = cpu_mesh()
    separate(mesh, tuple((lane, 0) for lane in ALL_LANES), own=True)
    model = shard_blocks(LanguageModel(), mesh)
    model(*language_batches(1, 2)[0]).backward()
    own = group_of_lane(mesh, 0, REDUCE_INNER)
    dist.destroy_process_group(own)
    reference = weakref.ref(own)
    del own
    gc.collect()
    assert reference() is None
    with pytest.raises(
        RuntimeError, match="reduce_inner lane over mesh axis 'dp' has been destroy"
    ):
        group_of_lane(mesh, 0, REDUCE_INNER)
    references = [weakref.ref(group_of_lane(mesh, 0, lane)) for lane in (GATHER, REDUCE_OUTER)]
    del model, mesh
    dist.destroy_process_group()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@distributed(2)
def test_ranks_that_have_made_other_groups_do_not_wait_for_each_other() -> None:
    """Up to torch 2.13 the name under which members meet has the number of groups in it."""
    mesh = cpu_mesh()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other rank is first, and nothing but its waiting holds it back
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(RuntimeError, match=r"differ .*\n.*0: compile_fsdp reduce_inner dp"):
        separate(mesh, ((GATHER, 0), (REDUCE_INNER, 0)), own=True)


@distributed(2)
def test_communicators_are_made_once_and_a_failure_says_what_to_do() -> None:
    mesh = cpu_mesh()
    group = mesh.get_group()
    calls: list[torch.Tensor] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        calls.append(tensor)
        original(tensor, **options)

    dist.all_reduce = all_reduce
    try:
        for _ in range(2):
            connect([group], torch.device("cpu"))
        assert len(calls) == 1

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("Duplicate GPU detected")

        dist.all_reduce = fail
        own = dist.new_group([0, 1], group_desc="compile_fsdp reduce_inner dp")
        reason = r"ranks \[0, 1\] of .*reduce_inner dp' cannot .* on cpu: Duplicate.*set_device"
        with pytest.raises(RuntimeError, match=reason):
            connect([own], torch.device("cpu"))
    finally:
        dist.all_reduce = original


@distributed(1)
def test_a_group_that_knows_no_device_is_warned_of() -> None:
    group = cpu_mesh().get_group()
    device = torch.device("cuda", 0)
    process_groups.check_bound_device([group], device)  # gloo has no use for one

    class Bound:
        bound_device_id = torch.device("cuda", 1)

    bound: Any = Bound()
    with mock.patch.object(process_groups, "backend_of", lambda *_: "nccl"):
        with pytest.warns(UserWarning, match=r"pass device_id=torch\.device\('cuda', local_rank\)"):
            process_groups.check_bound_device([group], device)
        with pytest.raises(ValueError, match=r"to cuda:1 .* is cuda:0; call .*set_device\(1"):
            process_groups.check_bound_device([bound], device)


def go_another_way() -> str:
    """One rank ends its forward by a backward, the other by another forward: on communicators of
    their own, with nothing in common but what the ranks agree on, both would wait for ever."""
    mesh = cpu_mesh()
    separate(mesh, ((GATHER, 0), (REDUCE_INNER, 0)), own=True)
    model = shard_blocks(LanguageModel(), mesh)
    batch = language_batches(1, 2)[0]
    for _ in range(3):
        model(*batch).backward()
    loss = model(*batch)
    with pytest.raises(RuntimeError) as raised:
        if dist.get_rank() == 0:
            loss.backward()
        else:
            model(*batch)
            model(*batch).backward()
    return str(raised.value)


def test_ranks_that_differ_are_told_across_communicators() -> None:
    for text in run(2, go_another_way, timeout=60):
        assert "ranks 0 and 1 differ" in text


@pytest.mark.parametrize("bound", [True, False], ids=["device bound", "no device"])
@distributed(2)
def test_how_a_group_is_made(bound: bool) -> None:
    """With a device NCCL's communicator of the axis is split, by its members alone; without one a
    group is made by its members alone."""
    calls: list[tuple[str, Any]] = []
    device = torch.device("cuda", 0)
    real = process_groups.dist.new_group

    class Axis:
        """The parts of an NCCL group that are asked for."""

        bound_device_id = device if bound else None
        size = staticmethod(lambda: 2)

    def split_group(group: Any, ranks: Any, **options: Any) -> Any:
        calls.append(("split", (group, ranks, options["group_desc"])))
        return real([0, 1])

    def new_group(ranks: Any, **options: Any) -> Any:
        calls.append(("new", (ranks, options)))
        return real([0, 1])

    axis: Any = Axis()
    patch = mock.patch.multiple
    with (
        patch(process_groups.dist, split_group=split_group, new_group=new_group),
        patch(process_groups.dist, get_process_group_ranks=lambda _: [0, 1]),
        patch(
            process_groups,
            agreement_of=lambda _: None,
            share_agreement=lambda *_: None,
            process_group_timeout=lambda _: timedelta(seconds=60),
            connect=lambda groups, on: calls.append(("connect", (list(groups), on))),
        ),
    ):
        process_groups._new_group(axis, "nccl", REDUCE_INNER, "dp")
    if bound:
        split = (axis, [[0, 1]], "compile_fsdp reduce_inner dp")
        assert calls == [("connect", ([axis], device)), ("split", split)]
    else:
        ((kind, (ranks, options)),) = calls
        assert (kind, ranks) == ("new", [0, 1])
        assert options == {
            "timeout": timedelta(seconds=60),
            "backend": "nccl",
            "use_local_synchronization": True,
            "group_desc": "compile_fsdp reduce_inner dp",
        }
