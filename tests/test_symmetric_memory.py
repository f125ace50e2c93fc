"""Symmetric memory: who gets it, why not, and that what is staged is registered before it is sent.

It needs NVLink and NCCL. What can be checked without is checked with a stand-in for torch's calls:
which allocations come from the pool, which buffers are registered when, and that ranks agree.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import ShardLayout, fully_shard
from compile_fsdp.runtime import collectives, symmetric_memory
from compile_fsdp.runtime.memory import anywhere
from compile_fsdp.runtime.symmetric_memory import explain_unsupported
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.quantized import MXFP8
from tests.training import adamw, assert_same, cpu_mesh, drive, shard_blocks, train

pytestmark = pytest.mark.compat

CUDA = torch.device("cuda", 0)


class StandIn:
    """Takes all memory for symmetric and writes down what is asked of it."""

    entered = 0
    registered: list[tuple[int, str]]
    failing_rank: int | None = None

    @contextmanager
    def allocating(self, device: torch.device) -> Iterator[None]:
        type(self).entered += 1
        yield

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return True

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        if dist.get_rank() == type(self).failing_rank:
            raise RuntimeError("no multicast\non this machine")
        self.registered.append((tensor.numel(), group.group_desc))


@contextmanager
def supported(**attributes: Any) -> Iterator[type[StandIn]]:
    """As if devices, NCCL and torch had symmetric memory."""
    stand_in = type("StandIn", (StandIn,), {"registered": [], **attributes})
    with (
        mock.patch.object(symmetric_memory, "explain_unsupported", lambda *_: None),
        mock.patch.object(symmetric_memory, "SymmetricMemoryOfTorch", stand_in),
        mock.patch.object(symmetric_memory, "_pools", {}),
    ):
        yield stand_in


def context_of(model: nn.Module) -> Any:
    return model._fsdp_unit.context


@distributed(2)
def test_true_is_an_error_where_it_cannot_be_had() -> None:
    model = LanguageModel()
    before = dict(model.named_parameters())
    reason = (
        "use_symm_mem=True: it is memory of CUDA devices, and the mesh is for 'cpu'; pass "
        "use_symm_mem=False, or use_symm_mem='if_available' for the plain path"
    )
    with pytest.raises(ValueError) as error:
        fully_shard(model, cpu_mesh(), use_symm_mem=True)
    assert str(error.value) == reason
    assert type(model) is LanguageModel
    assert all(each is before[name] for name, each in model.named_parameters())


@distributed(2)
def test_if_available_says_why_not_and_is_the_plain_path() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("compile_fsdp.runtime.symmetric_memory")
    log.addHandler(handler)
    runs = []
    for choice in (False, "if_available"):
        torch.manual_seed(0)
        model = shard_blocks(LanguageModel(), use_symm_mem=choice)
        runs.append(train(model, language_batches(2, 4)))
    log.removeHandler(handler)
    assert_same(*runs)
    assert lines == [
        "no symmetric memory, plain buffers instead: it is memory of CUDA devices, and the mesh is "
        "for 'cpu'"
    ]


@distributed(1)
def test_reasons() -> None:
    group = dist.group.WORLD
    real = SimpleNamespace(is_there=lambda: True)
    patch = mock.patch.object

    def reason(backend: str | None, version: tuple[int, ...], torch_has_it: Any) -> str | None:
        with (
            patch(symmetric_memory, "backend_of", lambda *_: backend),
            patch(symmetric_memory, "nccl_version", lambda: version),
            patch(symmetric_memory, "SymmetricMemoryOfTorch", torch_has_it),
        ):
            return explain_unsupported(CUDA, group)

    assert reason("nccl", (2, 27, 3), real) is None
    assert reason("nccl", (2, 26, 5), real) == "NCCL 2.26.5 is too old; 2.27 has symmetric windows"
    assert reason("gloo", (2, 27), real) == (
        "it belongs to NCCL, and the process group's backend is 'gloo'"
    )
    old = SimpleNamespace(is_there=lambda: False)
    assert "has no memory pool of NCCL's; 2.13 has" in str(reason("nccl", (2, 27), old))


@distributed(2)
def test_what_torch_has() -> None:
    """The names are there, or `is_there` says that they are not."""
    from compile_fsdp.runtime.torch_internals import SymmetricMemoryOfTorch, nccl_version

    old = torch.__version__ < "2.13"
    assert SymmetricMemoryOfTorch.is_there() != old
    assert nccl_version() >= ((2, 27) if dist.is_nccl_available() else (0,))
    if dist.is_nccl_available() and not old:
        memory = SymmetricMemoryOfTorch()
        assert not memory.is_symmetric(torch.zeros(1))
    else:
        if not old:
            with pytest.raises(RuntimeError, match="NCCL"):
                SymmetricMemoryOfTorch()


def steps(model: nn.Module, driver: str) -> list[torch.Tensor]:
    """Two steps; no communication but the model's."""
    optimizer, call = adamw(model), drive(model, driver)
    for batch in language_batches(2, 2):
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_what_is_allocated_and_what_is_registered(driver: str) -> None:
    torch.manual_seed(0)
    plain = steps(shard_blocks(LanguageModel()), driver)
    with supported() as stand_in:
        torch.manual_seed(0)
        model = shard_blocks(LanguageModel(), use_symm_mem=True)
        groups = list(context_of(model).groups())
        assert stand_in.entered == 1 + len(groups), "to try out, and for each group's shards"
        assert len(stand_in.registered) == 1
        stand_in.entered, memory = 0, context_of(model).memory
        allocated = memory.allocations
        with collectives.recorded() as records:
            staged = steps(model, driver)
        assert stand_in.entered >= memory.allocations - allocated > 0
        registered = stand_in.registered[1:]
    assert all(map(torch.equal, staged, plain))
    # On gloo only gathers have buffers that NCCL would see: the full one, then the shard.
    gathers = [record for record in records if record.kind == "all_gather"]
    sizes = [(record.bytes // 4, record.bytes // 8) for record in gathers]
    assert [numel for numel, _ in registered] == [size for pair in sizes for size in pair]
    seen: list[Any] = [None, None]
    dist.all_gather_object(seen, registered)
    assert seen[0] == seen[1], "the same registrations in the same order on every rank"


@distributed(2)
def test_a_nest_uses_the_pool_where_all_its_units_do() -> None:
    with supported():
        mixed = LanguageModel()
        for number, block in enumerate(mixed.blocks):
            fully_shard(block, cpu_mesh(), use_symm_mem=number > 0)
        fully_shard(mixed, cpu_mesh(), use_symm_mem=True)
        assert context_of(mixed).memory.source is anywhere
        staged = shard_blocks(LanguageModel(), use_symm_mem=True)
        twin = copy.deepcopy(staged)
        for model in (staged, twin):
            assert context_of(model).memory.source is not anywhere


@distributed(2)
def test_planes_of_quantised_weights_are_in_the_pool() -> None:
    with supported() as stand_in:
        fully_shard(nn.Linear(32, 64, bias=False), cpu_mesh(), None, MXFP8, use_symm_mem=True)
        assert stand_in.entered == 3, "to try out, for the group's shards, and for its planes"


@distributed(2)
def test_segments_that_differ_take_the_plain_path() -> None:
    with supported():
        model, mesh = nn.Linear(4, 5), cpu_mesh()
        with pytest.raises(ValueError, match=r"segments are of different sizes \(\d+ to \d+ elem"):
            fully_shard(model, mesh, use_symm_mem=True, shard_layout=ShardLayout.PACKED)
        fully_shard(model, mesh, use_symm_mem="if_available", shard_layout=ShardLayout.PACKED)
        assert model.fsdp_parameter_groups[0].staging is None


@distributed(2)
def test_one_rank_that_cannot_keeps_all_from_it() -> None:
    with supported(failing_rank=1):
        model = LanguageModel()
        reason = (r"another rank of \[0, 1\] cannot", "cpu cannot: no multicast;")[dist.get_rank()]
        with pytest.raises(ValueError, match=reason):
            fully_shard(model, cpu_mesh(), use_symm_mem=True)
        fully_shard(model, cpu_mesh(), use_symm_mem="if_available")
        optimizer = adamw(model)
        model(*language_batches(1, 2)[0]).backward()
        optimizer.step()


@distributed(2)
def test_nothing_is_asked_where_it_is_off() -> None:
    with supported() as stand_in:
        model = shard_blocks(LanguageModel())
        model(*language_batches(1, 2)[0]).backward()
        assert stand_in.entered == 0
        assert not symmetric_memory._pools
