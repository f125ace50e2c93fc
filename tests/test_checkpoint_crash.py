"""A save that dies at any moment leaves the earlier checkpoint, or the new one, and no litter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import load_checkpoint, save_checkpoint
from compile_fsdp.checkpoint_folder import CheckpointFolder
from tests.checkpointing import adamw, assert_equal, shard, take_steps, values_of, zoo
from tests.dying import die_before_event, join_pair, run_pair

ROOT = Path(__file__).resolve().parent.parent


def constant(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def what_loads(folder: Path) -> float:
    """The one value of which a checkpoint is made."""
    model = constant(-1.0)
    load_checkpoint(model, None, folder)
    values = {value for each in model.parameters() for value in each.flatten().tolist()}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


def crash_everywhere(
    parent: Path, *, is_first: bool, save: Callable[..., None] = save_checkpoint
) -> None:
    """Kill a save before its first event, then one before its second, and so on to the end."""
    old, new, newer = (constant(value) for value in (1.0, 2.0, 3.0))
    outcomes = []
    for number in range(1, 200):
        folder = parent / str(number) / "c"
        if not is_first:
            save_checkpoint(old, None, folder)
            (folder / "notes.txt").write_text("kept")
        child = os.fork()
        if child == 0:
            die_before_event(number, folder.parent)
            save(new, None, folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        try:
            outcomes.append(what_loads(folder))
        except FileNotFoundError:
            assert is_first
            outcomes.append(0.0)
        save_checkpoint(newer, None, folder)
        assert what_loads(folder) == 3.0
        assert [path.name for path in folder.parent.iterdir()] == ["c"], "litter"
        assert is_first or (folder / "notes.txt").read_text() == "kept"
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    # The change is from one complete checkpoint to the other, once, and before the end.
    assert outcomes == sorted(outcomes) and outcomes[-2:] == [2.0, 2.0]
    assert set(outcomes) == ({0.0, 2.0} if is_first else {1.0, 2.0})
    print(len(outcomes))


@pytest.mark.parametrize("is_first", [False, True], ids=["replacing", "first"])
def test_a_save_killed_at_any_moment(is_first: bool, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, torch; torch.set_num_threads(1);"
        "from tests.test_checkpoint_crash import crash_everywhere;"
        f"crash_everywhere(pathlib.Path(sys.argv[1]), is_first={is_first})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 8


# Ranks ------------------------------------------------------------------------------------------


def save_and_die(rank: int, folder: Path, dying: int, event: int) -> None:
    """Two ranks save; then one is killed during the next save and the other says what it saw."""
    join_pair(rank, folder)
    model = shard(zoo())
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, folder / "c")
    if rank == 0:
        shutil.copytree(folder / "c", folder.parent / "copy")
    take_steps(model, optimizer, 1, 1)
    dist.barrier()
    if rank == dying:
        die_before_event(event, folder)
    try:
        save_checkpoint(model, optimizer, folder / "c")
    except RuntimeError as error:
        (folder.parent / "error.txt").write_text(str(error))
    os._exit(0)


# Rank 1 opens its data file and syncs it; rank 0 makes the folder first.
@pytest.mark.parametrize(("dying", "event"), [(1, 1), (1, 2), (0, 4)])
def test_a_rank_killed_during_a_save(dying: int, event: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_pair(save_and_die, folder, dying, event)
    error = (tmp_path / "error.txt").read_text()
    assert f"save_checkpoint: {folder / 'c'} could not be written and is unchanged: " in error

    found, expected = (_values_in_one_process(path) for path in (folder / "c", tmp_path / "copy"))
    assert_equal(found, expected)
    save_checkpoint(zoo(), None, folder / "c")
    assert [path.name for path in folder.iterdir()] == ["c"]


def _values_in_one_process(folder: Path) -> dict[str, torch.Tensor]:
    model = zoo(seed=1)
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


# The folder by itself -----------------------------------------------------------------------------


def write(folder: Path, content: str) -> Path:
    """Something that looks like a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_text(content)
    (folder / ".metadata").write_text("")
    return folder


def content(folder: Path) -> str:
    return (folder / "__0_0.distcp").read_text()


def interrupted(path: Path) -> CheckpointFolder:
    """A save that died between its two renames."""
    folder = CheckpointFolder(path)
    write(path, "old")
    write(folder.begin(), "new")
    scratch = next(path.parent.glob(".c.saving-*"))
    path.rename(path.with_name(scratch.name.replace("saving", "replaced")))
    assert not path.exists()
    return folder


def test_an_interrupted_swap_is_read_and_then_finished(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "c")
    assert content(folder.readable()) == "new"
    assert not folder.path.exists(), "reading changes nothing"
    folder.discard(folder.begin())
    assert content(folder.path) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("kind", ["saving", "replaced"])
def test_half_of_a_swap_is_no_checkpoint(kind: str, tmp_path: Path) -> None:
    """The user has removed the checkpoint after a crash; leftovers must not come back as it."""
    folder = interrupted(tmp_path / "c")
    shutil.rmtree(next(tmp_path.glob(f".c.{kind}-*")))
    with pytest.raises(FileNotFoundError):
        folder.readable()


@pytest.mark.parametrize("error", [PermissionError, KeyboardInterrupt])
@pytest.mark.parametrize("forever", [False, True])
def test_a_failing_rename_costs_no_checkpoint(
    error: type[BaseException], forever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one comes back; and if even that fails, readers find the new one."""
    folder = CheckpointFolder(write(tmp_path / "c", "old"))
    scratch = write(folder.begin(), "new")
    real: Callable[..., Path] = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self == scratch or (forever and target == folder.path):
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(error):
        folder.commit(scratch)
    folder.discard(scratch)
    assert content(folder.readable()) == ("new" if forever else "old")


def test_other_files_stay_and_data_of_more_ranks_goes(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "old")
    (path / "__7_0.distcp").touch()
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocabulary.distcp").write_text("words")
    (path / "link").symlink_to("tokenizer")
    folder = CheckpointFolder(path)
    folder.commit(write(folder.begin(), "new"))
    names = [".metadata", "__0_0.distcp", "link", "tokenizer"]
    assert sorted(entry.name for entry in path.iterdir()) == names
    assert content(path) == "new"
    assert (path / "link" / "vocabulary.distcp").read_text() == "words"
    assert (path / "link").is_symlink()


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path) -> None:
    target = write(tmp_path / "step-1", "old")
    (tmp_path / "latest").symlink_to(target)
    folder = CheckpointFolder(tmp_path / "latest")
    folder.commit(write(folder.begin(), "new"))
    assert (tmp_path / "latest").is_symlink()
    assert content(tmp_path / "latest") == content(target) == "new"


def test_leftovers_of_other_checkpoints_are_left_alone(tmp_path: Path) -> None:
    token = "0" * 16
    others = [f".cc.saving-{token}", ".c.saving-x", ".c.old", f".c.saving-x.saving-{token}"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f".c.saving-{token}").mkdir()
    folder = CheckpointFolder(tmp_path / "c")
    folder.discard(folder.begin())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
