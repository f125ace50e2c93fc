"""Loading changes nothing before everything was found right; errors are one line on all ranks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import MixedPrecisionPolicy, fully_shard, load_checkpoint, save_checkpoint
from compile_fsdp.checkpoint_planner import Locator
from tests.checkpointing import Zoo, adamw, assert_equal, shard, take_steps, values_of, zoo
from tests.distributed import distributed, run


def saved_by_one_process(folder: Path) -> Path:
    model = zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, folder)
    return folder


def assert_load_fails(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: Path,
    kind: type[Exception],
    pattern: str,
) -> None:
    """The error is of ``kind``, one line that matches, and nothing has changed."""
    before = values_of(model, optimizer)
    options = [dict(group) for group in optimizer.param_groups] if optimizer else []
    with pytest.raises(kind, match=pattern) as caught:
        load_checkpoint(model, optimizer, folder)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert_equal(values_of(model, optimizer), before)
    if optimizer:
        assert [dict(group) for group in optimizer.param_groups] == options


# What is at the path ----------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    model = zoo()
    assert_load_fails(
        model, adamw(model), tmp_path / "no", FileNotFoundError, r"no checkpoint at .*/no: .*"
    )


def test_another_folder(tmp_path: Path) -> None:
    pattern = r"is not a checkpoint: expected a file \.metadata in it, found "
    assert_load_fails(zoo(), None, tmp_path, FileNotFoundError, pattern + "an empty folder")
    (tmp_path / "notes.txt").touch()
    assert_load_fails(zoo(), None, tmp_path, FileNotFoundError, pattern + "notes.txt")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_load_fails(zoo(), None, tmp_path / "file", ValueError, "is a file")
    with pytest.raises(ValueError, match="is a file"):
        save_checkpoint(zoo(), None, tmp_path / "file")
    with pytest.raises(ValueError, match="name a folder in it"):
        save_checkpoint(zoo(), None, "/")


def test_wrong_types(tmp_path: Path) -> None:
    for function in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
            function({}, None, tmp_path)
        with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or None"):
            function(zoo(), {}, tmp_path)
        with pytest.raises(TypeError, match="must be a path, got int"):
            function(zoo(), None, 3)


# Another model or optimizer ---------------------------------------------------------------------


class Renamed(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.tint = self.bias
        del self.bias


class Bigger(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(2))


class Smaller(Zoo):
    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Reshaped(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(2, 3))


class Untied(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(7, 6))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (Renamed, r"expected 'tint', found \d+ other names like"),
        (Bigger, "expected 'more', found"),
        (
            lambda: Zoo().head,
            r"expected '\w+', found '\w+\.\w+'\. It was saved from a module around",
        ),
        (Smaller, "expected no 'unused', which the model does not have, found it"),
        (Reshaped, r"expected 'unused' of shape \(2, 3\), found \(3, 2\)"),
    ],
)
def test_another_model(make: Callable[[], nn.Module], pattern: str, tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    for optimized in (False, True):
        model = make()
        optimizer = adamw(model) if optimized else None
        assert_load_fails(model, optimizer, folder, ValueError, f"another model: {pattern}")


def test_tied_parameters_that_differ_in_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(Untied(), None, tmp_path / "c")
    pattern = "'embedding.weight' and 'head.weight' are tied: expected equal values"
    assert_load_fails(zoo(), None, tmp_path / "c", ValueError, pattern)


def test_a_model_without_memory(tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    with torch.device("meta"):
        model = Zoo()
    with pytest.raises(ValueError, match="'bias' is on the meta device"):
        load_checkpoint(model, None, folder)


def test_no_optimizer_state_in_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(zoo(), None, tmp_path / "c")
    model = zoo(seed=1)
    pattern = "has no optimizer state: expected .* pass optimizer=None"
    assert_load_fails(model, adamw(model), tmp_path / "c", ValueError, pattern)


def test_another_optimizer(tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    model = zoo(seed=1)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]

    def check(optimizer: torch.optim.Optimizer, pattern: str) -> None:
        assert_load_fails(model, optimizer, folder, ValueError, pattern)

    check(
        torch.optim.SGD([{"params": matrices}, {"params": others}], lr=1.0),
        "another optimizer: expected SGD with option 'dampening', found AdamW without",
    )
    check(torch.optim.AdamW([*matrices, *others]), "expected 1 parameter groups, found 2")
    check(
        torch.optim.AdamW([{"params": matrices}, {"params": others[1:]}]),
        "looking for 'temperature' in group 1, expected no such, found it",
    )
    check(
        torch.optim.AdamW([{"params": [*matrices, *others[:1]]}, {"params": others[1:]}]),
        "looking for 'temperature' in group 0, expected it, found no such name",
    )


def test_an_optimizer_of_other_parameters(tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    pattern = (
        r"parameter 0 of the optimizer's group 0, of shape \(7, 6\): expected a parameter of the "
        r"model, found another; build the optimizer from this model's parameters\(\)"
    )
    for function in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match=pattern):
            function(zoo(), torch.optim.AdamW(zoo().embedding.parameters()), folder)


@distributed(2)
def test_an_optimizer_from_before_sharding(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    shard(model)
    with pytest.raises(ValueError, match="after fully_shard, not before"):
        save_checkpoint(model, optimizer, tmp_path / "c")


def test_state_that_cannot_be_saved(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    optimizer.state[model.bias]["history"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match=r"'optimizer\.state\.bias\.history' is a list with ten"):
        save_checkpoint(model, optimizer, tmp_path / "c")
    optimizer.state.clear()
    optimizer.state["shared"] = {}
    with pytest.raises(ValueError, match="has state under str 'shared'"):
        save_checkpoint(model, optimizer, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_names_that_cannot_be_saved(tmp_path: Path) -> None:
    taken = nn.Module()
    taken.a = nn.Linear(1, 1)
    taken._orig_mod = nn.Module()
    taken._orig_mod.a = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"'_orig_mod\.a\.weight' would be saved as 'a\.weight'"):
        save_checkpoint(taken, None, tmp_path / "c")
    hooked = nn.Linear(1, 1)
    hooked.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update(packed=torch.zeros(1))
    )
    with pytest.raises(ValueError, match="'packed' is neither a parameter nor a buffer"):
        save_checkpoint(hooked, None, tmp_path / "c")


class LoadsInside(nn.Linear):
    """Loads a checkpoint in its own forward."""

    folder: Path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        load_checkpoint(self, None, self.folder)
        return super().forward(x)


@distributed(2)
def test_a_model_in_use(tmp_path: Path) -> None:
    model = LoadsInside(2, 2)
    model.folder = tmp_path / "c"
    fully_shard(model, dist.init_device_mesh("cpu", (2,)))
    save_checkpoint(model, None, model.folder)
    with pytest.raises(RuntimeError, match="'weight' is in use: expected a model between steps"):
        model(torch.ones(1, 2))


# On several ranks -------------------------------------------------------------------------------


def without_data(folder: Path) -> None:
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("make", "kind", "pattern"),
    [
        (Bigger, ValueError, "expected 'more', found"),
        (Smaller, ValueError, "expected no 'unused', which the model does not have, found it"),
        (Reshaped, ValueError, r"expected 'unused' of shape \(2, 3\), found \(3, 2\)"),
        (Untied, ValueError, "looking for 'head.weight' in group 0, expected it"),
        ("dtype", ValueError, r"'bias' in torch\.float64, found torch\.float32; "),
        ("alone", ValueError, "has no optimizer state: .* pass optimizer=None"),
        ("missing", FileNotFoundError, "no checkpoint at .*; check the path"),
        ("truncated", RuntimeError, r"is damaged: expected \d+ bytes for '[\w.]+', found \d+; "),
    ],
)
@distributed(2)
def test_nothing_changes_on_any_rank(
    make: Any, kind: type[Exception], pattern: str, tmp_path: Path
) -> None:
    """Sharded parameters, the state of an optimizer that has stepped, and its options."""
    saved = shard(zoo())
    optimizer = adamw(saved)
    take_steps(saved, optimizer, 0, 1)
    save_checkpoint(saved, None if make == "alone" else optimizer, tmp_path / "c")
    if make == "truncated" and dist.get_rank() == 0:
        without_data(tmp_path / "c")
    dist.barrier()
    torch.manual_seed(1)
    if callable(make):
        model = shard(make())
    else:
        dtype = torch.float64 if make == "dtype" else torch.float32
        policy = MixedPrecisionPolicy(main_params_dtype=dtype)
        model = shard(zoo(seed=1, dtype=dtype), policy=policy)
    other = adamw(model)
    take_steps(model, other, 3, 1)
    folder = tmp_path / ("no" if make == "missing" else "c")
    assert_load_fails(model, other, folder, kind, pattern)
    take_steps(model, other, 4, 1)


# Damage -----------------------------------------------------------------------------------------


def test_truncated_files(tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    model = zoo(seed=1)
    optimizer = adamw(model)
    for kept in (0, len(content) // 2, len(content) - 1):
        data.write_bytes(content[:kept])
        pattern = rf"__0_0\.distcp is damaged: expected \d+ bytes for '[\w.]+', found {kept};"
        assert_load_fails(model, optimizer, folder, RuntimeError, pattern)
    data.unlink()
    assert_load_fails(model, optimizer, folder, RuntimeError, "found no such file")


def test_damaged_metadata(tmp_path: Path) -> None:
    folder = saved_by_one_process(tmp_path / "c")
    content = (folder / ".metadata").read_bytes()
    for damaged in (b"", content[: len(content) // 2], pickle.dumps({"a": 1})):
        (folder / ".metadata").write_bytes(damaged)
        assert_load_fails(zoo(), None, folder, RuntimeError, r"\.metadata is damaged: ")


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Data has a checksum; what has none is framing, and a change of it is an error or nothing."""
    weight = torch.randn(2, 2)
    model = nn.ParameterDict({"w": nn.Parameter(weight.clone())})
    save_checkpoint(model, None, tmp_path / "c")
    data = tmp_path / "c" / "__0_0.distcp"
    content = data.read_bytes()
    start = content.find(weight.numpy().tobytes())
    errors = 0
    for position in [*range(0, len(content), 13), *range(start, start + 16)]:
        flipped = bytearray(content)
        flipped[position] ^= 1
        data.write_bytes(flipped)
        try:
            load_checkpoint(model, None, tmp_path / "c")
        except RuntimeError as error:
            assert "__0_0.distcp is damaged: expected the data of 'w', found" in str(error)
            errors += 1
        else:
            assert not start <= position < start + 16
        assert torch.equal(model["w"], weight)
    assert errors > 16


def load_with_one_damaged_part(folder: Path, key: str, offset: int) -> None:
    """The part is damaged that only one rank reads; every rank must notice."""
    model = shard(zoo())
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    [part] = [
        part
        for index, part in metadata.storage_data.items()
        if index.fqn == key and index.offset[0] == offset
    ]
    dist.barrier()
    if dist.get_rank() == 0:
        path = folder / part.relative_path
        content = bytearray(path.read_bytes())
        for position in range(part.offset, part.offset + part.length):
            content[position] ^= 255
        path.write_bytes(content)
    dist.barrier()
    take_steps(model, optimizer, 1, 1)
    pattern = rf"nothing was loaded: .*is damaged: expected the data of {key!r}, found BadZipFile"
    assert_load_fails(model, optimizer, folder, RuntimeError, pattern)
    take_steps(model, optimizer, 2, 1)


@pytest.mark.parametrize(
    "key", ["layers.0.down.weight", "optimizer.state.embedding.weight.exp_avg"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_meets_stops_all(key: str, rank: int, tmp_path: Path) -> None:
    rows = run(2, first_row_of, key.removeprefix("optimizer.state.").removesuffix(".exp_avg"))
    assert rows[0] == 0 < rows[1]
    run(2, load_with_one_damaged_part, tmp_path / "c", key, rows[rank])


def first_row_of(fqn: str) -> int:
    parameter = shard(zoo()).get_parameter(fqn)
    return Locator([parameter]).piece_of(parameter).offset[0]


# Ranks ------------------------------------------------------------------------------------------


@distributed(2)
def test_ranks_that_disagree(tmp_path: Path) -> None:
    model = shard(zoo())
    mine = tmp_path / str(dist.get_rank())
    with pytest.raises(ValueError, match=r"ranks disagree on dir: rank 0 has .*/0, rank 1 has"):
        save_checkpoint(model, None, mine)
    with pytest.raises(TypeError, match=r"^model must be a .*, got str \(on rank 1\)$"):
        save_checkpoint(model if dist.get_rank() == 0 else "model", None, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@distributed(2)
def test_state_that_one_rank_lacks(tmp_path: Path) -> None:
    model = shard(zoo())
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    if dist.get_rank() == 1:
        del optimizer.state[model.get_submodule("layers.0.up").weight]
    pattern = (
        r"ranks disagree on optimizer\.state\.layers\.0\.up\.weight\.exp_avg: rank 0 has a tensor "
        r"of shape \(5, 6\), rank 1 has nothing"
    )
    with pytest.raises(ValueError, match=pattern):
        save_checkpoint(model, optimizer, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def save_where_one_rank_cannot_write(folder: Path) -> str:
    model = shard(zoo())
    save_checkpoint(model, None, folder)
    before = sorted(path.name for path in folder.iterdir())
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    real_open: Any = Path.open
    if dist.get_rank() == 1:

        def no_space(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self.suffix == ".distcp":
                raise OSError(28, "No space left on device")
            return real_open(self, *args, **kwargs)

        Path.open = no_space  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(model, optimizer, folder)
    finally:
        Path.open = real_open  # type: ignore[method-assign]
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    load_checkpoint(model, None, folder)
    save_checkpoint(model, optimizer, folder)
    return str(caught.value)


def test_a_full_disk_on_one_rank_fails_the_save_everywhere(tmp_path: Path) -> None:
    first, second = run(2, save_where_one_rank_cannot_write, tmp_path / "c")
    assert first == second
    assert re.search(
        r"could not be written and is unchanged: OSError: .*No space left on device \(on rank 1\)",
        first,
    )
