"""Checkpoints of a model with MXFP8 compute weights hold its main weights and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from compile_fsdp import MixedPrecisionPolicy, load_checkpoint, save_checkpoint
from tests.checkpointing import Values, assert_equal, values_of
from tests.distributed import run
from tests.quantized import MXFP8, Model, Pair, adamw, batches, reference_of, shard

POLICIES = {"mxfp8": MXFP8, "plain": MixedPrecisionPolicy()}


def save_after_steps(folder: Path, kind: str, mode: str, dtype: torch.dtype) -> Values:
    torch.manual_seed(0)
    model = shard(Model().to(dtype), POLICIES[kind], mode)
    optimizer = adamw(model)
    for tokens in batches(2):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


def load(folder: Path, kind: str, mode: str, dtype: torch.dtype) -> Values:
    torch.manual_seed(1)
    model = shard(Model().to(dtype), POLICIES[kind], mode)
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("saved", "loaded"), [("mxfp8", "plain"), ("plain", "mxfp8")])
def test_quantised_and_plain_runs_load_one_another(
    saved: str, loaded: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Main weights and the optimizer's state, bit for bit, in another mode as well."""
    folder = tmp_path / "checkpoint"
    values = run(2, save_after_steps, folder, saved, "zero3", dtype)[0]
    for mode in ("zero3", "zero1"):
        for found in run(2, load, folder, loaded, mode, dtype):
            assert_equal(found, values)


def test_nothing_quantised_is_saved(tmp_path: Path) -> None:
    contents = {}
    for kind in POLICIES:
        run(2, save_after_steps, tmp_path / kind, kind, "zero3", torch.bfloat16)
        metadata = FileSystemReader(tmp_path / kind).read_metadata().state_dict_metadata
        contents[kind] = {
            name: (tuple(each.size), each.properties.dtype)
            for name, each in metadata.items()
            if hasattr(each, "properties")
        }
    assert contents["mxfp8"] == contents["plain"]
    dtypes = {dtype for shape, dtype in contents["mxfp8"].values() if shape}
    assert dtypes == {torch.float32}


def continue_from(folder: Path, mode: str) -> None:
    """A model of other values computes with what it loads, as one in this process does."""
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(1)
    model = shard(Model(), MXFP8, mode)
    optimizer = adamw(model)
    model(batches(1)[0])  # has gathered planes of what it had before
    load_checkpoint(model, optimizer, folder)
    pair = Pair(model, model, reference_of(plain))
    pair.train(batches(2))


@pytest.mark.parametrize("mode", ["zero3", "zero1"])
def test_compute_sees_what_was_loaded(mode: str, tmp_path: Path) -> None:
    run(2, save_untrained, tmp_path / "checkpoint")
    run(2, continue_from, tmp_path / "checkpoint", mode)


def save_untrained(folder: Path) -> None:
    torch.manual_seed(0)
    model = shard(Model(), None)
    save_checkpoint(model, adamw(model), folder)


def load_state_dict_anew() -> None:
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(1)
    model = shard(Model())
    model(batches(1)[0]).backward()
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    Pair(model, model, reference_of(plain)).train(batches(2))


def test_planes_follow_a_state_dict() -> None:
    run(2, load_state_dict_anew)
