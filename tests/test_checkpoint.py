"""save_checkpoint and load_checkpoint on real ranks: values, names, other worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from compile_fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from tests.checkpointing import (
    Values,
    Zoo,
    adamw,
    assert_equal,
    shard,
    take_steps,
    values_of,
    zoo,
)
from tests.distributed import distributed, run

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def save_after_steps(folder: Path, mode: str = "zero3") -> Values:
    model = shard(zoo(), mode)
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 2)
    save_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


def load_all(folders: list[Path], mode: str = "zero3") -> list[Values]:
    """Each checkpoint in a model of other values, with an optimizer that never stepped."""
    results = []
    for folder in folders:
        model = shard(zoo(seed=1), mode)
        optimizer = adamw(model)
        load_checkpoint(model, optimizer, folder)
        values = values_of(model, optimizer)
        for name, parameter in model.named_parameters():
            if parameter in optimizer.state:
                state = optimizer.state[parameter]["exp_avg"]
                assert torch.equal(state.full_tensor(), values[f"{name}/exp_avg"])
        results.append(values)
    return results


def keys_of(folder: Path) -> set[str]:
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


# Other worlds -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.compat
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 3, 4)]
    saved = [run(int(folder.name), save_after_steps, folder)[0] for folder in folders]
    for ranks in (1, 2, 3, 4):
        for loaded in run(ranks, load_all, folders):
            for found, expected in zip(loaded, saved, strict=True):
                assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "hsdp", "hfsdp"])
def test_any_placements_load_what_others_saved(mode: str, tmp_path: Path) -> None:
    here, there = tmp_path / mode, tmp_path / "zero3"
    saved = run(4, save_after_steps, here, mode)[0]
    assert_equal(run(2, load_all, [here])[0][0], saved)
    saved = run(2, save_after_steps, there)[0]
    assert_equal(run(4, load_all, [there], mode)[3][0], saved)


def test_a_plain_module_in_one_process_loads_what_ranks_saved(tmp_path: Path) -> None:
    saved = run(3, save_after_steps, tmp_path / "c")[0]
    model = zoo(seed=1)
    optimizer = adamw(model)
    load_checkpoint(model, optimizer, tmp_path / "c")
    assert_equal(values_of(model, optimizer), saved)
    take_steps(model, optimizer, 2, 1)


def test_ranks_load_what_a_plain_module_saved(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 2)
    save_checkpoint(model, optimizer, tmp_path / "c")
    for loaded in run(2, load_all, [tmp_path / "c"]):
        assert_equal(loaded[0], values_of(model, optimizer))


def test_the_files_are_plain_dcp(tmp_path: Path) -> None:
    saved = run(2, save_after_steps, tmp_path / "c")[0]
    own = {name: torch.empty_like(value) for name, value in saved.items() if "/" not in name}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp_load(own, checkpoint_id=str(tmp_path / "c"))
    assert_equal(own, {name: saved[name] for name in own})
    dcp_to_torch_save(str(tmp_path / "c"), str(tmp_path / "c.pt"))
    converted = torch.load(tmp_path / "c.pt", weights_only=False)
    assert torch.equal(converted["layers.0.up.weight"], saved["layers.0.up.weight"])


def exchange_by_plain_dcp(folder: Path, ranks_that_save: int) -> Values:
    saves = dist.get_world_size() == ranks_that_save
    model = shard(zoo(seed=0 if saves else 1))
    state = model.state_dict()
    if saves:
        dcp_save(state, checkpoint_id=folder)
    else:
        dcp_load(state, checkpoint_id=folder)
    return values_of(model)


@pytest.mark.compat
def test_dcp_by_itself_reads_and_writes_the_right_rows(tmp_path: Path) -> None:
    """Without this module: DTensors tell DCP where their rows are."""
    saved = run(3, exchange_by_plain_dcp, tmp_path / "c", 3)[0]
    for loaded in run(2, exchange_by_plain_dcp, tmp_path / "c", 3):
        assert_equal(loaded, saved)


# Going on ---------------------------------------------------------------------------------------


def _resume(
    folder: Path, make_model: Callable[[int], nn.Module], make_optimizer: MakeOptimizer
) -> tuple[Values, Values]:
    """Four steps at once, and two, a checkpoint, and two by a model that loads it."""
    whole = make_model(0)
    optimizer = make_optimizer(whole)
    take_steps(whole, optimizer, 0, 2)
    save_checkpoint(whole, optimizer, folder)
    take_steps(whole, optimizer, 2, 2)

    resumed = make_model(1)
    other = make_optimizer(resumed)
    take_steps(resumed, other, 7, 1)
    load_checkpoint(resumed, other, folder)
    take_steps(resumed, other, 2, 2)
    return values_of(resumed, other), values_of(whole, optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("mode", ["zero3", "zero1"])
@distributed(2)
def test_a_resumed_run_equals_an_uninterrupted_one(mode: str, fused: bool, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    options = {"fused": True} if fused else {"foreach": True}
    found, expected = _resume(
        folder, lambda seed: shard(zoo(seed=seed), mode), lambda model: adamw(model, **options)
    )
    assert_equal(found, expected)


@pytest.mark.compat
@distributed(2)
def test_fp32_main_weights_of_a_bf16_model_come_back(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        fully_shard_optimizer(optimizer)
        return optimizer

    found, expected = _resume(
        folder,
        lambda seed: shard(zoo(seed=seed, dtype=torch.bfloat16), "zero3", policy),
        make_optimizer,
    )
    assert_equal(found, expected)
    weight = found["layers.0.up.weight"]
    assert weight.dtype is torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("mode", ["zero3", "zero1", "ddp"])
@distributed(2)
def test_compute_sees_what_was_loaded(mode: str, tmp_path: Path) -> None:
    """Right after it: what had been gathered, and bf16 copies, are of the weights before."""
    folder = shared(tmp_path)
    models = [shard(zoo(seed=seed, dtype=torch.bfloat16), mode) for seed in (0, 1)]
    tokens = torch.arange(7).view(1, 7)
    with torch.no_grad():
        before = [model(tokens) for model in models]
        save_checkpoint(models[0], None, folder)
        load_checkpoint(models[1], None, folder)
        assert not torch.equal(before[0], before[1])
        assert torch.equal(models[1](tokens), before[0])


@distributed(2)
def test_state_is_loaded_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    """Compiled steps and CUDA graphs hold on to them; and state that was not saved goes."""
    folder = shared(tmp_path)
    model = shard(zoo())
    optimizer = adamw(model)
    save_checkpoint(model, optimizer, folder / "fresh")
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, folder / "stepped")
    expected = values_of(model, optimizer)
    take_steps(model, optimizer, 1, 1)
    before = {id(value) for state in optimizer.state.values() for value in state.values()}
    load_checkpoint(model, optimizer, folder / "stepped")
    after = {id(value) for state in optimizer.state.values() for value in state.values()}
    assert before == after
    assert_equal(values_of(model, optimizer), expected)
    load_checkpoint(model, optimizer, folder / "fresh")
    assert not optimizer.state


@distributed(2)
def test_an_optimizer_goes_on_with_another_implementation(tmp_path: Path) -> None:
    """Step counts move to where the loading optimizer wants them, and its switches stay."""
    folder = shared(tmp_path)
    model = shard(zoo())
    optimizer = adamw(model, foreach=True)
    take_steps(model, optimizer, 0, 2)
    save_checkpoint(model, optimizer, folder)
    other = adamw(model, fused=True)
    load_checkpoint(model, other, folder)
    assert all(group["fused"] and not group["foreach"] for group in other.param_groups)
    assert_equal(values_of(model, other), values_of(model, optimizer))
    take_steps(model, other, 2, 1)
    state = other.state[next(iter(model.parameters()))]
    assert state["step"].item() == 3
    assert isinstance(state["exp_avg"], DTensor)


def test_options_come_back(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    take_steps(model, optimizer, 0, 1)
    scheduler.step()
    save_checkpoint(model, optimizer, tmp_path / "c")
    other = adamw(model, betas=(0.5, 0.6), capturable=False)
    load_checkpoint(model, other, tmp_path / "c")
    for found, expected in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {**found, "params": ()} == {**expected, "params": ()}
    assert other.param_groups[0]["lr"] == 0.005 and other.param_groups[0]["initial_lr"] == 0.01


def test_a_learning_rate_tensor_stays_the_same_object(tmp_path: Path) -> None:
    model = zoo()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.25), foreach=False)
    save_checkpoint(model, optimizer, tmp_path / "c")
    rate = torch.tensor(1.0)
    other = torch.optim.AdamW(parameters, lr=rate, foreach=False)
    load_checkpoint(model, other, tmp_path / "c")
    assert other.param_groups[0]["lr"] is rate and rate.item() == 0.25
    plain = torch.optim.AdamW(parameters, lr=1.0)
    load_checkpoint(model, plain, tmp_path / "c")
    assert plain.param_groups[0]["lr"] == 0.25


class Oddball(torch.optim.Optimizer):
    """Keeps state in every way there is: local rows, replicated, objects, one value per row."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            local = parameter.to_local()
            if not state:
                state.update(local=local.clone(), count=torch.zeros(3), name="n", none=None)
                if parameter.ndim > 1:
                    state["rows"] = parameter.sum(dim=1, keepdim=True)
            state["local"].add_(1)
            state["count"].add_(1)


def oddball_locals(folder: Path, ranks_that_saved: int) -> list[torch.Tensor]:
    model = shard(zoo())
    optimizer = Oddball(model.parameters())
    if dist.get_world_size() == ranks_that_saved:
        take_steps(model, optimizer, 0, 2)
        save_checkpoint(model, optimizer, folder)
    else:
        load_checkpoint(model, optimizer, folder)
    weight = model.get_submodule("layers.0.up").weight
    state = optimizer.state[weight]
    assert state["name"] == "n" and state["none"] is None and "none" in state
    assert torch.equal(state["count"], torch.full((3,), 2.0))
    assert not isinstance(state["local"], DTensor) and isinstance(state["rows"], DTensor)
    assert state["local"].shape == weight.to_local().shape
    assert state["rows"].shape == (5, 1)
    take_steps(model, optimizer, 2, 1)
    return [state["local"], state["rows"].to_local()]


def test_state_of_every_kind_is_cut_anew(tmp_path: Path) -> None:
    saved = run(3, oddball_locals, tmp_path / "c", 3)
    loaded = run(2, oddball_locals, tmp_path / "c", 3)
    for here, there in zip(
        map(torch.cat, zip(*loaded, strict=True)),
        map(torch.cat, zip(*saved, strict=True)),
        strict=True,
    ):
        assert torch.equal(here, there)


# Names ------------------------------------------------------------------------------------------


@pytest.mark.compat
@distributed(2)
def test_wrappers_leave_names_clean(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    plain = shard(zoo())
    wrapped = zoo()
    for number, layer in enumerate(wrapped.layers):
        wrapped.layers[number] = checkpoint_wrapper(layer)
    wrapped = shard(wrapped)
    wrapped.layers[0] = torch.compile(wrapped.layers[0], backend="eager")
    compiled = torch.compile(wrapped, backend="eager")
    optimizers = [adamw(each) for each in (plain, compiled)]
    for name, model, optimizer in zip(
        ("plain", "compiled"), (plain, compiled), optimizers, strict=True
    ):
        take_steps(model, optimizer, 0, 1)
        save_checkpoint(model, optimizer, folder / name)
    keys = keys_of(folder / "compiled")
    assert keys == keys_of(folder / "plain")
    assert set(plain.state_dict()) <= keys
    assert "optimizer.state.layers.0.up.weight.exp_avg" in keys
    take_steps(compiled, optimizers[1], 1, 1)
    load_checkpoint(compiled, optimizers[1], folder / "plain")
    load_checkpoint(plain, optimizers[0], folder / "compiled")
    for own, theirs in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(own.to_local(), theirs.to_local())


@distributed(2)
def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    found, expected = _resume(folder, lambda seed: shard(zoo(seed=seed)), adamw)
    assert_equal(found, expected)
    assert torch.equal(found["head.weight"], found["embedding.weight"])
    assert {"head.weight", "embedding.weight"} <= keys_of(folder)
    model = shard(zoo(seed=1))
    load_checkpoint(model, None, folder)
    assert model.get_submodule("head").weight is model.get_submodule("embedding").weight


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.memory: object = "nothing"

    def get_extra_state(self) -> object:
        return self.memory

    def set_extra_state(self, state: object) -> None:
        self.memory = state


def test_extra_state_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(Remembering(), nn.Linear(2, 2))
    model[0].memory = {"seen": [1, 2]}
    save_checkpoint(torch.compile(model, backend="eager"), None, tmp_path / "c")
    assert "0._extra_state" in keys_of(tmp_path / "c")
    other = nn.Sequential(Remembering(), nn.Linear(2, 2))
    load_checkpoint(other, None, tmp_path / "c")
    assert other[0].memory == {"seen": [1, 2]}
    assert torch.equal(other[1].weight, model[1].weight)


def test_another_dtype_is_converted_on_request(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, optimizer, tmp_path / "c")
    other = zoo(seed=1, dtype=torch.float64)
    into = adamw(other)
    load_checkpoint(other, into, tmp_path / "c", convert_dtypes=True)
    state = into.state[other.bias]
    assert state["exp_avg"].dtype is torch.float64 and state["step"].dtype is torch.float32
    assert torch.equal(other.bias.float(), model.bias)
    take_steps(other, into, 1, 1)


def test_a_model_alone(tmp_path: Path) -> None:
    model = zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    save_checkpoint(model, None, tmp_path / "alone")
    assert keys_of(tmp_path / "alone") == set(model.state_dict())
    save_checkpoint(model, optimizer, tmp_path / "both")
    other = Zoo()
    load_checkpoint(other, None, tmp_path / "both")
    assert_equal(values_of(other), values_of(model))


def shared(folder: Path) -> Path:
    """pytest runs the fixture once, so that all ranks have this very folder."""
    return folder / "checkpoint"
