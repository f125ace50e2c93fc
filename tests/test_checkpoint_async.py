"""async_save_checkpoint: what is saved are the values at the call, whatever training does next."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save as dcp_async_save
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from compile_fsdp import async_save_checkpoint, load_checkpoint, save_checkpoint
from compile_fsdp.checkpoint_planner import SaveEntries
from compile_fsdp.checkpoint_save import Save
from tests.checkpointing import (
    Values,
    adamw,
    assert_equal,
    shard,
    take_steps,
    values_of,
    zoo,
)
from tests.distributed import distributed, run
from tests.dying import die_before_event, join_pair, run_pair

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def held_writes() -> Iterator[Callable[[], None]]:
    """Threads do not begin to write before the function that this gives is called."""
    gate = threading.Event()
    real = Save._write

    def write(self: Save) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        return real(self)

    Save._write = write  # type: ignore[method-assign]
    try:
        yield gate.set
    finally:
        gate.set()
        Save._write = real  # type: ignore[method-assign]


def loaded(folder: Path, mode: str = "zero3") -> Values:
    """What a fresh model and optimizer get from ``folder``."""
    model = shard(zoo(seed=1), mode)
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


# Values -----------------------------------------------------------------------------------------


def save_and_go_on(folder: Path, mode: str) -> tuple[Values, bool]:
    """The values at the call; training goes on before anything is written."""
    model = shard(zoo(), mode)
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 2)
    expected = values_of(model, optimizer)
    with held_writes() as release:
        pending = async_save_checkpoint(model, optimizer, folder)
        take_steps(model, optimizer, 2, 2)
        optimizer.param_groups[0]["lr"] = 123.0
        early = pending.done() or folder.exists()
        # Ranks get to their writes in another order than to their training steps.
        time.sleep(0.1 * dist.get_rank())
        release()
        take_steps(model, optimizer, 4, 1)
        pending.result(timeout=60)
    assert pending.done() and folder.is_dir()
    return expected, early


@pytest.mark.compat
@pytest.mark.parametrize("mode", ["zero3", "ddp", "hfsdp"])
def test_what_is_saved_are_the_values_at_the_call(mode: str, tmp_path: Path) -> None:
    saved = run(2, save_and_go_on, tmp_path / "c", mode)
    assert not any(early for _, early in saved), "published before it was written"
    for values in run(3, loaded, tmp_path / "c"):
        assert_equal(values, saved[0][0])
    model = zoo()
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, tmp_path / "c")
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.compat
@distributed(2)
def test_training_beside_saves_computes_the_same(tmp_path: Path) -> None:
    """Neither's collectives meet the other's, though ranks interleave them differently."""
    plain, saving = shard(zoo()), shard(zoo())
    optimizers = adamw(plain), adamw(saving)
    for step in range(12):
        take_steps(plain, optimizers[0], step, 1)
        if step % 3 == dist.get_rank():
            time.sleep(0.02)
        if step % 2 == 0:
            pending = async_save_checkpoint(saving, optimizers[1], tmp_path / "c")
        take_steps(saving, optimizers[1], step, 1)
    pending.result()
    assert_equal(values_of(saving, optimizers[1]), values_of(plain, optimizers[0]))


@distributed(2)
def test_ranks_that_hold_the_same_share_the_copying(tmp_path: Path) -> None:
    model = shard(zoo(), "ddp")
    with held_writes():
        pending = async_save_checkpoint(model, None, tmp_path / "c")
        copies: list[int] = []
        for holder in gc.get_objects():
            if isinstance(holder, SaveEntries):
                tensors = [each for each in holder._snapshot.values() if torch.is_tensor(each)]
                copies.append(sum(each.numel() for each in tensors))
    pending.result()
    total = torch.tensor(copies[-1])
    dist.all_reduce(total)
    assert total == sum(each.numel() for each in model.state_dict().values())


# One at a time ----------------------------------------------------------------------------------


@distributed(2)
def test_other_saves_and_loads_wait_for_the_one_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    models = [shard(zoo(seed=seed)) for seed in (0, 1, 2)]
    target = shard(zoo(seed=3))
    expected = [values_of(model) for model in models]
    following: list[Callable[[], object]] = [
        lambda: async_save_checkpoint(models[1], None, folder).result(),
        lambda: save_checkpoint(models[2], None, folder),
        lambda: load_checkpoint(target, None, folder),
    ]
    for wanted, follow in zip((expected[1], expected[2], expected[0]), following, strict=True):
        with held_writes() as release:
            pending = async_save_checkpoint(models[0], None, folder)
            timer = threading.Timer(0.1 + 0.1 * dist.get_rank(), release)
            timer.start()
            follow()
            assert pending.done()
            pending.result()
            timer.join()
        load_checkpoint(target, None, folder)
        assert_equal(values_of(target), wanted)


def test_without_a_process_group(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    expected = values_of(model, optimizer)
    with held_writes() as release, warnings.catch_warnings():
        warnings.simplefilter("error")
        pending = async_save_checkpoint(model, optimizer, tmp_path / "c")
        take_steps(model, optimizer, 1, 1)
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)
        release()
        assert pending.exception() is None
    other = zoo(seed=1)
    into = adamw(other)
    load_checkpoint(other, into, tmp_path / "c")
    assert_equal(values_of(other, into), expected)


def test_a_program_that_ends_writes_first(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, torch\n"
        "from compile_fsdp import async_save_checkpoint\n"
        "from tests.test_checkpoint_crash import constant\n"
        "async_save_checkpoint(constant(2.0), None, sys.argv[1])"
    )
    run_program(code, tmp_path / "c")
    model = nn.Linear(2, 2)
    load_checkpoint(model, None, tmp_path / "c")
    assert all(torch.equal(each, torch.full_like(each, 2.0)) for each in model.parameters())


def run_program(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


# Errors -----------------------------------------------------------------------------------------


@contextmanager
def no_space() -> Iterator[None]:
    real: Any = Path.open

    def fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".distcp":
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    Path.open = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.open = real  # type: ignore[method-assign]


@contextmanager
def nothing() -> Iterator[None]:
    yield


def save_where_one_rank_cannot_write(folder: Path) -> str:
    model = shard(zoo())
    optimizer = adamw(model)
    save_checkpoint(model, optimizer, folder)
    expected = values_of(model, optimizer)
    take_steps(model, optimizer, 0, 1)
    with no_space() if dist.get_rank() == 1 else nothing():
        pending = async_save_checkpoint(model, optimizer, folder)
        take_steps(model, optimizer, 1, 1)
        error = pending.exception(timeout=60)
    assert isinstance(error, RuntimeError)
    dist.barrier()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "litter"
    assert_equal(loaded(folder), expected)
    async_save_checkpoint(model, optimizer, folder).result()
    assert_equal(loaded(folder), values_of(model, optimizer))
    return str(error)


def test_a_full_disk_on_one_rank_is_the_result_on_all(tmp_path: Path) -> None:
    first, second = run(2, save_where_one_rank_cannot_write, tmp_path / "c")
    assert first == second
    assert first.startswith(
        f"async_save_checkpoint: {tmp_path / 'c'} could not be written and is unchanged: "
    )
    assert "No space left on device (on rank 1)" in first


@distributed(2)
def test_what_shows_before_writing_is_raised_at_once(tmp_path: Path) -> None:
    model = shard(zoo())
    optimizer = adamw(model)
    optimizer.state[model.bias]["history"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match=r"'optimizer\.state\.bias\.history' is a list with ten"):
        async_save_checkpoint(model, optimizer, tmp_path / "c")
    with pytest.raises(ValueError, match="ranks disagree on dir"):
        async_save_checkpoint(model, None, tmp_path / str(dist.get_rank()))
    assert not list(tmp_path.iterdir())


class Unpicklable(nn.Linear):
    def get_extra_state(self) -> object:
        return lambda: None

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_snapshot_that_fails_leaves_no_litter(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be written and is unchanged: .*lambda"):
        async_save_checkpoint(Unpicklable(1, 1), None, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_failure_that_nobody_asks_for_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"nobody asked for its result.*No space left"):
        with no_space():
            pending = async_save_checkpoint(zoo(), None, tmp_path / "c")
            while not pending.done():
                time.sleep(0.01)
        del pending
        gc.collect()


@distributed(2)
def test_a_process_group_that_goes_is_an_error_and_no_hang(tmp_path: Path) -> None:
    model = shard(zoo())
    save_checkpoint(model, None, tmp_path / "c")
    expected = values_of(model)
    with held_writes() as release:
        pending = async_save_checkpoint(model, None, tmp_path / "c")
        dist.barrier()
        dist.destroy_process_group()
        release()
        with pytest.raises((RuntimeError, ValueError)):
            pending.result(timeout=60)
    other = zoo(seed=1)
    load_checkpoint(other, None, tmp_path / "c")
    assert_equal(values_of(other), expected)


# Death ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True], ids=["replacing", "first"])
def test_a_background_save_killed_at_any_moment(is_first: bool, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from compile_fsdp import async_save_checkpoint\n"
        "from tests.test_checkpoint_crash import crash_everywhere\n"
        "save = lambda *arguments: async_save_checkpoint(*arguments).result()\n"
        f"crash_everywhere(pathlib.Path(sys.argv[1]), is_first={is_first}, save=save)"
    )
    assert int(run_program(code, tmp_path)) > 8


def train_save_and_die(rank: int, folder: Path, dying: int) -> None:
    """Two ranks train beside a save, in which one of them is killed."""
    join_pair(rank, folder)
    model = shard(zoo())
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, folder / "c")
    torch.save(values_of(model, optimizer), folder.parent / f"expected-{rank}.pt")
    take_steps(model, optimizer, 1, 1)
    with held_writes() as release:
        pending = async_save_checkpoint(model, optimizer, folder / "c")
        take_steps(model, optimizer, 2, 1)
        if rank == dying:
            # Its data file is open and not on disk.
            die_before_event(2, folder)
        release()
        error = pending.exception(timeout=60)
    (folder.parent / "error.txt").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_killed_during_a_background_save(dying: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_pair(train_save_and_die, folder, dying)
    error = (tmp_path / "error.txt").read_text()
    assert f"async_save_checkpoint: {folder / 'c'} could not be written and is unchanged" in error
    model = zoo(seed=1)
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, folder / "c")
    assert_equal(values_of(model, optimizer), torch.load(tmp_path / "expected-0.pt"))


# By torch.distributed.checkpoint alone ----------------------------------------------------------


def dcp_save_and_go_on(folder: Path, mode: str) -> Values:
    model = shard(zoo(), mode)
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    expected = values_of(model)
    pending = [
        dcp_async_save(
            model.state_dict(),
            checkpoint_id=folder / name,
            async_stager=stager,
            process_group=dist.new_group(backend="gloo"),
        )
        for name, stager in (("default", None), ("blocking", BlockingAsyncStager()))
    ]
    take_steps(model, optimizer, 1, 2)
    for each in pending:
        each.result()
    return expected


def dcp_loaded(folder: Path, mode: str) -> list[Values]:
    results = []
    for name in ("default", "blocking"):
        model = shard(zoo(seed=1), mode)
        state = model.state_dict()
        dcp_load(state, checkpoint_id=folder / name)
        model.load_state_dict(state)
        results.append(values_of(model))
    return results


@pytest.mark.compat
@pytest.mark.parametrize("mode", ["zero3", "zero1"])
def test_dcp_async_save_copies_the_right_rows(mode: str, tmp_path: Path) -> None:
    """Its stagers copy DTensors to host memory, which must not forget their rows.

    `BlockingAsyncStager` copies no 0-D DTensor, torch's own included: what it saves of one is the
    value at the time when it is written, and no business of ours.
    """
    expected = run(3, dcp_save_and_go_on, tmp_path, mode)[0]
    staged, blocking = run(2, dcp_loaded, tmp_path, mode)[1]
    assert_equal(staged, expected)
    with_rows = {name for name, value in expected.items() if value.ndim}
    assert_equal(
        {name: blocking[name] for name in with_rows}, {name: expected[name] for name in with_rows}
    )
