"""TARGET on the command line -> a workload."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..planning.errors import PlanError, one_line
from ..planning.sharding import largest_list
from ..planning.workload import Built, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
USUAL_LENGTH = 8192


@dataclass(frozen=True)
class Sizes:
    """What the command line says about the model's arguments.

    Attributes:
        batch: sequences of a rank.
        length: tokens of a sequence; None: `USUAL_LENGTH`, or what the model can do.
        dtype: of the parameters; None: as the target makes them.
    """

    batch: int
    length: int | None
    dtype: str | None


def workload_of(target: str, sizes: Sizes) -> Workload:
    """What ``target`` names.

    Raises:
        PlanError: there is no such thing.
    """
    if sizes.batch < 1 or (sizes.length is not None and sizes.length < 1):
        raise PlanError("--batch and --seq must be 1 or more")
    if target.startswith("hf:"):
        return _transformer(target.removeprefix("hf:"), sizes)
    return _function(target, sizes)


# MODULE:FUNCTION ----------------------------------------------------------------------------------


def _function(target: str, sizes: Sizes) -> Workload:
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise PlanError(
            f"TARGET {target!r}: expected MODULE:FUNCTION, or hf:CONFIG.json for a transformers "
            "configuration"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PlanError(
            f"TARGET {target!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        known = ", ".join(public[:8]) or "none"
        raise PlanError(
            f"TARGET {target!r}: {module_name!r} has no function {name!r}; functions: {known}"
        )

    def build(mesh: DeviceMesh) -> Built:
        return _checked(target, _call(target, function, mesh), sizes)

    return Workload(target, build)


def _call(target: str, function: Callable[..., Any], mesh: DeviceMesh) -> Any:
    takes_mesh = "mesh" in inspect.signature(function).parameters
    try:
        return function(mesh=mesh) if takes_mesh else function()
    except Exception as error:
        raise PlanError(
            f"TARGET {target!r} failed: {type(error).__name__}: {one_line(error)}; plans call it "
            "with fake tensors, so it must not read values of tensors, nor make a mesh itself (a "
            "parameter named `mesh` is given one)"
        ) from error


def _checked(target: str, result: Any, sizes: Sizes) -> Built:
    parts = result if isinstance(result, tuple) else (result,)
    if not (
        2 <= len(parts) <= 3
        and isinstance(parts[0], nn.Module)
        and isinstance(parts[1], tuple | list)
        and isinstance((*parts, {})[2], Mapping)
    ):
        found = ", ".join(type(part).__name__ for part in parts)
        raise PlanError(
            f"TARGET {target!r} returned ({found}), expected (model, args) or (model, args, "
            "kwargs): an nn.Module, a tuple, a dict"
        )
    return Built(parts[0], tuple(parts[1]), dict((*parts, {})[2]))


# hf:CONFIG.json -----------------------------------------------------------------------------------


def _transformer(path: str, sizes: Sizes) -> Workload:
    config = _config(path)
    limit = getattr(config, "max_position_embeddings", None) or USUAL_LENGTH
    length = sizes.length or min(USUAL_LENGTH, limit)
    dtype = DTYPES[sizes.dtype or "bf16"]

    def build(_: DeviceMesh) -> Built:
        from transformers import AutoModelForCausalLM

        make: Any = AutoModelForCausalLM.from_config
        try:
            model = make(config, dtype=dtype)
        except Exception as error:
            raise PlanError(
                f"hf:{path}: transformers cannot make a causal language model of it: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
        tokens = torch.zeros(sizes.batch, length, dtype=torch.long)
        arguments = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return Built(model, (), arguments, largest_list(model))

    return Workload(f"{Path(path).name} ({config.model_type})", build)


def _config(path: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise PlanError(
            "hf: needs transformers, which is not installed; pip install transformers"
        ) from error
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"hf:{path}: no JSON file can be read there: {one_line(error)}") from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind not in CONFIG_MAPPING:
        known = list(CONFIG_MAPPING.keys())
        close = difflib.get_close_matches(str(kind), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f", one of {len(known)} names"
        raise PlanError(
            f"hf:{path}: transformers knows no model_type {kind!r}; expected the model_type of a "
            f"causal language model such as 'llama'{hint}"
        )
    rest = {key: value for key, value in data.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(str(kind), **{**rest, "use_cache": False})
    except Exception as error:
        raise PlanError(
            f"hf:{path}: transformers refuses it: {type(error).__name__}: {one_line(error)}"
        ) from error
