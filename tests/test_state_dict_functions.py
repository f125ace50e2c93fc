"""torch.distributed.checkpoint.state_dict's functions on a sharded model (case 35)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from compile_fsdp import fully_shard_optimizer
from tests.distributed import run
from tests.sharded_models import WAYS, Odd, batches, pair, shard_as
from tests.training import full, local_batch

some_ways = pytest.mark.parametrize("way", ["packed", "tensors", "hsdp", "hfsdp"])


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    if hasattr(model, "fsdp_parameter_groups"):
        fully_shard_optimizer(optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    sharded = hasattr(model, "fsdp_parameter_groups")
    for batch in batches(count):
        model(*(local_batch(batch) if sharded else batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return full(value) if isinstance(value, torch.Tensor) else value


def assert_state(found: Any, expected: Any, what: str = "") -> None:
    """The same values, within what the order of additions over ranks changes."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_state(found[key], value, f"{what}.{key}")
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_state(one, other, what)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(whole(found), expected, msg=lambda text: f"{what}: {text}")
    else:
        assert found == expected, what


def trained(way: str) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    model, sharded = pair(way)
    optimizer, ours = optimizer_of(model), optimizer_of(sharded)
    step(model, optimizer)
    step(sharded, ours)
    return model, optimizer, sharded, ours


def check_reading(way: str) -> None:
    model, optimizer, sharded, ours = trained(way)
    expected = get_state_dict(model, optimizer)
    assert_state(get_state_dict(sharded, ours), expected)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found = (
            get_model_state_dict(sharded, options=options),
            get_optimizer_state_dict(sharded, ours, options=options),
        )
        if offload and dist.get_rank():
            assert found == ({}, {})
        else:
            for value in (*found[0].values(), *found[1]["state"]["up.weight"].values()):
                assert not isinstance(value, DTensor)
            assert_state(found, expected)
    sharded_offload = StateDictOptions(cpu_offload=True)
    assert_state(get_model_state_dict(sharded, options=sharded_offload), expected[0])
    assert_state(get_optimizer_state_dict(sharded, ours, options=sharded_offload), expected[1])
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    assert_state(
        get_optimizer_state_dict(sharded, ours, options=flat),
        get_optimizer_state_dict(model, optimizer, options=flat),
    )


@some_ways
def test_reading(way: str) -> None:
    run(WAYS[way][0], check_reading, way)


def check_writing(way: str) -> None:
    model, optimizer, sharded, ours = trained(way)
    full_state = copy.deepcopy(get_state_dict(model, optimizer))
    rank_zero = full_state if dist.get_rank() == 0 else ({}, {})
    step(model, optimizer)
    for options, (values, state) in (
        (StateDictOptions(full_state_dict=True), full_state),
        (StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), rank_zero),
        (StateDictOptions(), copy.deepcopy(get_state_dict(sharded, ours))),
    ):
        target = shard_as(way, Odd())
        fresh = optimizer_of(target)
        # torch replaces values in what it is given.
        values, state = copy.deepcopy((values, state))
        set_model_state_dict(target, values, options=options)
        set_optimizer_state_dict(target, fresh, state, options=options)
        assert_state(get_state_dict(target, fresh), full_state)
        for parameter in target.parameters():
            for value in fresh.state[parameter].values():
                if isinstance(value, DTensor) and value.ndim:
                    assert type(value) is type(parameter)
                    assert value.to_local().shape == parameter.to_local().shape
        # Training goes on from there.
        step(target, fresh)
        assert_state(get_state_dict(target, fresh), get_state_dict(model, optimizer))
    both = shard_as(way, Odd())
    fresh = optimizer_of(both)
    values, state = copy.deepcopy(full_state)
    set_state_dict(
        both,
        fresh,
        model_state_dict=values,
        optim_state_dict=state,
        options=StateDictOptions(full_state_dict=True),
    )
    assert_state(get_state_dict(both, fresh), full_state)


@some_ways
def test_writing(way: str) -> None:
    run(WAYS[way][0], check_writing, way)
