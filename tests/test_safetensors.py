"""export_safetensors and import_safetensors: one folder that Hugging Face libraries read."""

from __future__ import annotations

import builtins
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from compile_fsdp import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    export_safetensors,
    fully_shard,
    import_safetensors,
)
from compile_fsdp.checkpoint_export import _Output
from tests.checkpointing import Values, adamw, assert_equal, shard, take_steps, values_of, zoo
from tests.distributed import distributed, run
from tests.test_huggingface import VOCABULARY, blocks_of, gpt2, llama
from tests.training import cpu_mesh

MakeModel = Callable[[], nn.Module]


def shared_folder(folder: Path) -> Path:
    """A folder in what pytest made once for all ranks."""
    return folder / "exported"


def tokens() -> torch.Tensor:
    return torch.arange(12).view(2, 6) % VOCABULARY


def shard_hugging_face(model: nn.Module, **options: Any) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block, cpu_mesh(), **options)
    fully_shard(model, cpu_mesh(), **options)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens()).logits
    return result


# Hugging Face -----------------------------------------------------------------------------------


def train_and_export(make: MakeModel, folder: Path, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(3)
    model = shard_hugging_face(make().eval())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    export_safetensors(model, folder, **options)
    return logits(model)


@pytest.mark.compat
@pytest.mark.parametrize(("make", "sharded"), [(llama, False), (gpt2, True)])
def test_from_pretrained_loads_what_was_exported(
    make: MakeModel, sharded: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    options = {"max_shard_bytes": 4096} if sharded else {}
    expected = run(2, train_and_export, make, tmp_path / "m", options)[0]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == type(make()).__name__
    assert model.config.architectures == [type(make()).__name__]
    assert torch.equal(logits(model.eval()), expected)
    # The same tensors in the same kinds of files as transformers' own.
    size = "4KB" if sharded else "5GB"
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert names_in(tmp_path / "m") == names_in(tmp_path / "theirs")
    indices = [
        json.loads(path.read_text()) if path.exists() else {}
        for path in (tmp_path / each / "model.safetensors.index.json" for each in ("m", "theirs"))
    ]
    assert bool(indices[0]) is sharded
    assert indices[0].get("metadata") == indices[1].get("metadata")


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            names |= set(file.keys())
    return names


def import_into_meta(make: MakeModel, folder: Path) -> tuple[torch.Tensor, bool]:
    with torch.device("meta"):
        model = make()
    shard_hugging_face(model.eval())
    if hasattr(model, "model"):
        # Not a part of any checkpoint: who makes a model on meta makes these tables.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    import_safetensors(model, folder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return logits(model), embedding.weight is head.weight


@pytest.mark.compat
@pytest.mark.parametrize(("make", "size"), [(llama, "4KB"), (gpt2, "5GB")])
def test_a_sharded_meta_model_imports_what_save_pretrained_wrote(
    make: MakeModel, size: str, tmp_path: Path
) -> None:
    model = make().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path, max_shard_size=size)
    for found, is_tied in run(3, import_into_meta, make, tmp_path):
        assert torch.equal(found, logits(model))
        assert is_tied is (make is gpt2)


def test_an_exported_dtype_is_what_from_pretrained_gives(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run(2, train_and_export, llama, tmp_path / "m", {"dtype": torch.bfloat16})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype is torch.bfloat16
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}


# Values -----------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"shard_layout": ShardLayout.PACKED},
    "blocks": {"placement": BlockAtomic(2)},
    "whole tensors": {"placement": TensorAtomic()},
}


def sharded_zoo(seed: int, layout: str) -> nn.Module:
    model = zoo(seed=seed)
    options = dict(LAYOUTS[layout])
    placement = options.pop("placement", None)
    mesh = cpu_mesh()
    if placement is not None:
        options["placements"] = Placements(("dp",), *[(placement,)] * 3)
    if isinstance(placement, TensorAtomic):
        ranks = dist.get_world_size()
        options["parameter_to_owner"] = {p: i % ranks for i, p in enumerate(model.parameters())}
    fully_shard(model, mesh, **options)
    return model


def export_zoo(folder: Path, layout: str) -> Values:
    model = sharded_zoo(0, layout)
    export_safetensors(model, folder, max_shard_bytes=300)
    return values_of(model)


def import_zoo(folder: Path, layout: str) -> Values:
    model = sharded_zoo(1, layout)
    import_safetensors(model, folder)
    return values_of(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_awkward_shape(layout: str, tmp_path: Path) -> None:
    expected = run(3, export_zoo, tmp_path / "m", layout)[0]
    stored: Values = {}
    for path in sorted((tmp_path / "m").glob("*.safetensors")):
        stored.update(load_file(path))
    assert expected.keys() - stored.keys() == {"head.weight"}
    assert_equal(stored, {name: expected[name] for name in stored})
    for found in run(2, import_zoo, tmp_path / "m", layout):
        assert_equal(found, expected)


def modes_there_and_back(folder: Path, mode: str) -> tuple[Values, Values]:
    model = shard(zoo(), mode)
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 1)
    export_safetensors(model, folder)
    other = shard(zoo(seed=1), mode)
    import_safetensors(other, folder)
    return values_of(other), values_of(model)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "hsdp", "hfsdp"])
def test_every_mode(mode: str, tmp_path: Path) -> None:
    for found, expected in run(4, modes_there_and_back, tmp_path / "m", mode):
        assert_equal(found, expected)


@distributed(2)
def test_main_weights_and_compute_copies_agree_after_an_import(tmp_path: Path) -> None:
    """bf16 compute: what the next forward reads is what was imported."""
    models = [shard(zoo(seed=seed, dtype=torch.bfloat16), "zero1") for seed in (0, 1)]
    batch = torch.arange(7).view(1, 7)
    with torch.no_grad():
        before = [model(batch) for model in models]
        export_safetensors(models[0], shared_folder(tmp_path))
        import_safetensors(models[1], shared_folder(tmp_path))
        assert not torch.equal(*before)
        assert torch.equal(models[1](batch), before[0])


@distributed(2)
def test_wrapped_models_have_clean_names(tmp_path: Path) -> None:
    model = zoo()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    compiled = torch.compile(shard(model), backend="eager")
    export_safetensors(compiled, shared_folder(tmp_path))
    plain = zoo(seed=1)
    import_safetensors(plain, shared_folder(tmp_path))
    assert_equal(values_of(plain), values_of(zoo()))
    import_safetensors(compiled, shared_folder(tmp_path))


def test_a_plain_module_in_one_process(tmp_path: Path) -> None:
    export_safetensors(zoo(), tmp_path / "m")
    model = zoo(seed=1)
    import_safetensors(model, str(tmp_path / "m"))
    assert_equal(values_of(model), values_of(zoo()))


def test_dtypes_of_floats_are_converted_both_ways(tmp_path: Path) -> None:
    model = zoo()
    export_safetensors(model, tmp_path / "m", dtype=torch.float16)
    assert load_file(tmp_path / "m" / "model.safetensors")["batches"].dtype is torch.int64
    other = zoo(seed=1)
    import_safetensors(other, tmp_path / "m")
    assert torch.equal(other.pair, model.pair.half().float())


class Shapeless(nn.Module):
    """What a file's header must get right: no elements, no dims, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))


def test_the_files_are_what_the_library_reads(tmp_path: Path) -> None:
    model = Shapeless()
    export_safetensors(model, tmp_path)
    assert_equal(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))
    other = Shapeless()
    other.mask.zero_()
    import_safetensors(other, tmp_path)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_files_hold_no_more_than_asked(tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (10, 10, 5, 50, 10))
    export_safetensors(model, tmp_path, max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"].values()) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 1, 1, 2, 3)
    ]
    assert index["metadata"] == {"total_parameters": 85, "total_size": 340}


def test_names_can_be_mapped(tmp_path: Path) -> None:
    """A folder of the base model, with tables that the model does not keep."""
    weight = torch.randn(2, 3)
    save_file({"weight": weight, "table": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"base": nn.Linear(3, 2, bias=False)})
    import_safetensors(
        model, tmp_path, rename=lambda name: None if name == "table" else f"base.{name}"
    )
    assert torch.equal(model["base"].weight, weight)


# The folder -------------------------------------------------------------------------------------


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    export_safetensors(zoo(), folder, max_shard_bytes=300)
    (folder / "tokenizer.json").write_text("{}")
    export_safetensors(zoo(seed=1), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    model = zoo()
    import_safetensors(model, folder)
    assert_equal(values_of(model), values_of(zoo(seed=1)))


def test_a_new_configuration_replaces_the_old_one(tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    export_safetensors(gpt2(), tmp_path / "m")
    export_safetensors(llama(), tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "llama"


def export_where_the_disk_is_full(folder: Path) -> tuple[str, Values]:
    model = shard(zoo())
    export_safetensors(model, folder)
    real = _Output.start

    def start(self: _Output, file: Any) -> None:
        real(self, file)
        with self._guarded():
            raise OSError(28, "No space left on device")

    _Output.start = start  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError) as caught:
            export_safetensors(shard(zoo(seed=1)), folder)
    finally:
        _Output.start = real  # type: ignore[method-assign]
    import_safetensors(model, folder)
    dist.barrier()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(caught.value), values_of(model)


def test_a_full_disk_fails_the_export_on_every_rank(tmp_path: Path) -> None:
    results = run(2, export_where_the_disk_is_full, tmp_path / "m")
    for message, values in results:
        assert message == (
            f"export_safetensors: {tmp_path / 'm'} could not be written: "
            "OSError: [Errno 28] No space left on device (on rank 0)"
        )
        assert_equal(values, values_of(zoo()))


# Errors -----------------------------------------------------------------------------------------


def assert_import_fails(
    model: nn.Module, folder: Path, kind: type[Exception], pattern: str, **options: Any
) -> None:
    before = values_of(model)
    with pytest.raises(kind, match=pattern) as caught:
        import_safetensors(model, folder, **options)
    assert "\n" not in str(caught.value)
    assert_equal(values_of(model), before)


def test_everything_that_does_not_fit_is_named(tmp_path: Path) -> None:
    state = {name: each.clone() for name, each in zoo().state_dict().items()}
    del state["head.weight"], state["bias"], state["pair"]
    state["surplus"] = torch.zeros(1)
    state["unused"] = torch.zeros(2, 3)
    state["temperature"] = torch.ones(1, dtype=torch.int32)
    save_file(state, tmp_path / "model.safetensors")
    pattern = re.escape(
        f"{tmp_path} is of another model: expected 'bias', 'pair', which the files lack; found "
        "'surplus', which the model does not have; "
        "expected 'temperature' of torch.float32, found torch.int32; "
        "expected 'unused' of shape (3, 2), found (2, 3); build the model that was saved, or map"
    )
    assert_import_fails(zoo(seed=1), tmp_path, ValueError, pattern)


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    state = {name: each.clone() for name, each in zoo().state_dict().items()}
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    assert_import_fails(zoo(seed=1), tmp_path, ValueError, "'head.weight' are tied: expected equal")


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    model = zoo(seed=1)
    assert_import_fails(model, tmp_path / "no", FileNotFoundError, "found nothing; pass the folder")
    (tmp_path / "notes.txt").touch()
    assert_import_fails(model, tmp_path, FileNotFoundError, "expected model.safetensors or model")
    export_safetensors(zoo(), tmp_path, max_shard_bytes=300)
    last = sorted(tmp_path.glob("model-*"))[-1]
    content = last.read_bytes()
    last.unlink()
    assert_import_fails(model, tmp_path, FileNotFoundError, f"{last} is missing")
    for damaged in (b"", content[:20], content[:-1]):
        last.write_bytes(damaged)
        assert_import_fails(model, tmp_path, RuntimeError, f"{last} is damaged: expected a safe")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert_import_fails(model, tmp_path, RuntimeError, r"index\.json is damaged: expected the ind")


def import_where_one_rank_sees_damage(folder: Path) -> str:
    model = shard(zoo(seed=1))
    before = values_of(model)
    mine = folder if dist.get_rank() == 0 else folder / "other"
    with pytest.raises(RuntimeError) as caught:
        import_safetensors(model, mine)
    assert_equal(values_of(model), before)
    return str(caught.value)


def test_damage_that_one_rank_sees_stops_all(tmp_path: Path) -> None:
    export_safetensors(zoo(), tmp_path)
    export_safetensors(zoo(), tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    first, second = run(2, import_where_one_rank_sees_damage, tmp_path)
    assert first == second and f"{path} is damaged" in first and first.endswith("(on rank 1)")


def test_arguments(tmp_path: Path) -> None:
    for function in (export_safetensors, import_safetensors):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
            function({}, tmp_path)
        with pytest.raises(TypeError, match="must be a path, got int"):
            function(zoo(), 3)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point .* got torch\.int8"):
        export_safetensors(zoo(), tmp_path / "m", dtype=torch.int8)
    with pytest.raises(ValueError, match="max_shard_bytes must be a positive int, got 0"):
        export_safetensors(zoo(), tmp_path / "m", max_shard_bytes=0)
    complex_model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(ValueError, match=r"'w' is torch\.complex64: expected one of bool, "):
        export_safetensors(complex_model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_safetensors(zoo(), tmp_path)
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "safetensors":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'compile_fsdp\[safetensors\]'"):
        import_safetensors(zoo(), tmp_path)
