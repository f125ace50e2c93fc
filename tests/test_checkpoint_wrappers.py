"""Names under torch.compile and activation checkpointing (case 34): those of the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from compile_fsdp import load_checkpoint, save_checkpoint
from tests.checkpointing import adamw, assert_equal, shard, take_steps, values_of, zoo
from tests.distributed import distributed

BACKEND = {"backend": "compile_fsdp", "options": {"inner": "aot_eager"}}


def wrapped(how: str, *, seed: int) -> tuple[nn.Module, nn.Module]:
    """A sharded model and what to call to train it."""
    model = zoo(seed=seed)
    if how in ("checkpointed", "both"):
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
    sharded = shard(model)
    if how == "layers":
        for layer in model.layers:
            layer.compile(**BACKEND)
    if how == "in place":
        sharded.compile(**BACKEND)
    if how == "both":
        return sharded, torch.compile(sharded, **BACKEND)
    return sharded, sharded


@pytest.mark.compat
@pytest.mark.parametrize("how", ["both", "in place", "layers", "checkpointed"])
@distributed(2)
def test_names_are_those_of_the_plain_model(how: str, tmp_path: Path) -> None:
    names = list(zoo().state_dict())
    model, call = wrapped(how, seed=0)
    optimizer = adamw(call)
    take_steps(call, optimizer, 0, 1)
    assert list(model.state_dict()) == names
    assert list(get_model_state_dict(call)) == names
    assert list(get_model_state_dict(call, options=StateDictOptions(full_state_dict=True))) == names

    expected = values_of(model, optimizer)
    save_checkpoint(call, optimizer, tmp_path / "c")
    dcp_save(get_model_state_dict(call), checkpoint_id=tmp_path / "dcp")

    plain = shard(zoo(seed=1))
    into = adamw(plain)
    load_checkpoint(plain, into, tmp_path / "c")
    assert_equal(values_of(plain, into), expected)
    alone = zoo(seed=1)
    load_checkpoint(alone, None, tmp_path / "c")
    assert_equal(values_of(alone), {name: expected[name] for name in names})
    other = shard(zoo(seed=2))
    state = other.state_dict()
    dcp_load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(other, state)
    assert_equal(values_of(other), {name: expected[name] for name in names})

    # And back: what the plain model saves, the wrapped one loads.
    back, back_call = wrapped(how, seed=3)
    into = adamw(back_call)
    load_checkpoint(back_call, into, tmp_path / "c")
    assert_equal(values_of(back, into), expected)
