"""OptimizerState: an optimizer's state by parameter name, cut like the parameters.

torch may give a state tensor other placements than its parameter's (a plain ``Shard(0)``, which
means other rows), so its rows are taken from the parameter: what has the parameter's number of
rows, here and in total, is cut like the parameter. How each entry was held is written down::

    LIKE_PARAMETER  exp_avg    a DTensor over a DTensor parameter, a plain tensor over a plain one
    LOCAL           (custom)   a plain tensor that holds this rank's rows
    REPLICATED      step       a plain tensor, the same on every rank
    OBJECT          (custom)   anything else, the same on every rank
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_fsdp.runtime.parameter_group import get_containing_parameter_group

from .checkpoint_planner import Piece, Value, exact_placements, piece_of
from .checkpoint_state import DESCRIPTION, clean_fqn, state_key

_FORMAT = 1

# How a step is computed, not what it computes: a resumed optimizer keeps its own choice.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_OPTIONS = frozenset({"params", "param_names"}) | _IMPLEMENTATION


class Held(enum.StrEnum):
    """How an optimizer holds one entry of a parameter's state."""

    LIKE_PARAMETER = "like_parameter"
    LOCAL = "local"
    REPLICATED = "replicated"
    OBJECT = "object"


class Description(TypedDict):
    """What a checkpoint says of its optimizer.

    ``param_groups`` have their options and, as ``params``, names. ``states`` has a `Held` for
    each entry of each parameter that has state.
    """

    format: int
    optimizer: str
    param_groups: list[dict[str, Any]]
    states: dict[str, dict[str, str]]


class OptimizerState:
    """The state and the options of ``optimizer``, whose parameters are ``model``'s.

    Raises:
        ValueError: a parameter of the optimizer is not one of the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        names = {id(each): clean_fqn(name) for name, each in model.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self._groups: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise _foreign_parameter(parameter, number, position)
                self._parameters[names[id(parameter)]] = parameter
            self._groups.append([names[id(parameter)] for parameter in group["params"]])
        self._loaded: dict[str, dict[str, tuple[Held, Piece | Value]]] = {}
        self._options: list[dict[str, Any]] = []
        self._restored: dict[str, dict[str, Any]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    # Saving -----------------------------------------------------------------------------------

    def entries(self) -> dict[str, Piece | Value]:
        """What to save, aliasing the optimizer's memory.

        Raises:
            ValueError: some state cannot be cut anew for another number of ranks.
        """
        known = {id(parameter) for parameter in self._parameters.values()}
        for key in self._optimizer.state:
            if id(key) not in known:
                raise ValueError(
                    f"the optimizer has state under {type(key).__name__} {key!r:.60}: expected "
                    "state of its parameters only; save that by other means"
                )
        entries: dict[str, Piece | Value] = {}
        states: dict[str, dict[str, str]] = {}
        for fqn, parameter in self._parameters.items():
            for name, value in self._optimizer.state.get(parameter, {}).items():
                held, entry = _entry(fqn, name, value, parameter)
                states.setdefault(fqn, {})[name] = held.value
                entries[state_key(fqn, name)] = entry
        description = Description(
            format=_FORMAT,
            optimizer=type(self._optimizer).__name__,
            param_groups=[
                {"params": names, **_options(group)}
                for names, group in zip(self._groups, self._optimizer.param_groups, strict=True)
            ],
            states=states,
        )
        return {**entries, DESCRIPTION: Value(description)}

    # Loading ----------------------------------------------------------------------------------

    def plan(self, metadata: Metadata, description: Description) -> dict[str, Piece | Value]:
        """What to read.

        Raises:
            ValueError: the checkpoint is of another optimizer, or of other parameters.
        """
        self._check_description(description)
        saved = metadata.state_dict_metadata
        for fqn, states in description["states"].items():
            self._loaded[fqn] = {}
            for name, kind in states.items():
                key = state_key(fqn, name)
                held = Held(kind)
                expected = BytesStorageMetadata if held is Held.OBJECT else TensorStorageMetadata
                found = saved.get(key)
                if not isinstance(found, expected):
                    raise ValueError(
                        f"the checkpoint's optimizer state is incomplete: expected {key!r}, found "
                        f"{type(found).__name__ if found else 'nothing'}; load another checkpoint"
                    )
                entry: Piece | Value = Value(None)
                if isinstance(found, TensorStorageMetadata):
                    entry = _temporary(found, held, self._parameters[fqn])
                self._loaded[fqn][name] = held, entry
        self._options = [
            {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in description["param_groups"]
        ]
        self._saved_dtypes = {
            fqn: saved[fqn].properties.dtype  # type: ignore[union-attr]
            for fqn in self._parameters
        }
        return {
            state_key(fqn, name): entry
            for fqn, states in self._loaded.items()
            for name, (_, entry) in states.items()
        }

    def prepare(self) -> None:
        """Allocate the state that the optimizer does not have yet."""
        with torch.inference_mode(False), torch.no_grad():
            for fqn, states in self._loaded.items():
                restored = self._restored.setdefault(fqn, {})
                for name, (held, entry) in states.items():
                    if isinstance(entry, Value):
                        restored[name] = entry.value
                    else:
                        restored[name] = self._tensor(fqn, name, held, entry)

    def commit(self) -> None:
        """Write state and options into the optimizer."""
        with torch.inference_mode(False), torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
            for fqn, parameter in self._parameters.items():
                if fqn in self._restored:
                    state = self._optimizer.state[parameter]
                    state.clear()
                    state.update(self._restored[fqn])
                else:
                    self._optimizer.state.pop(parameter, None)
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                for name, value in options.items():
                    _set_option(group, name, value)

    def _check_description(self, description: Description) -> None:
        if description["format"] != _FORMAT:
            raise ValueError(
                f"the checkpoint's optimizer state has format {description['format']}, expected "
                f"{_FORMAT}; it was saved by another version of compile_fsdp, load it with that"
            )
        saved_groups = description["param_groups"]
        if len(saved_groups) != len(self._groups):
            raise ValueError(
                f"the checkpoint is of another optimizer: expected {len(self._groups)} parameter "
                f"groups, found {len(saved_groups)}; build the optimizer that was saved"
            )
        for number, (names, group) in enumerate(zip(self._groups, saved_groups, strict=True)):
            for name in (*names, *group["params"]):
                if (name in names) != (name in group["params"]):
                    expected, found = ("it", "no such name") if name in names else ("no such", "it")
                    raise ValueError(
                        f"the checkpoint's optimizer has other parameters than this one: looking "
                        f"for {name!r} in group {number}, expected {expected}, found {found}; "
                        "build the optimizer that was saved, or pass optimizer=None"
                    )
        self._check_kind(description)

    def _check_kind(self, description: Description) -> None:
        own = type(self._optimizer).__name__
        if description["optimizer"] == own:
            return
        for group, saved in zip(
            self._optimizer.param_groups, description["param_groups"], strict=True
        ):
            # Options that a scheduler adds (initial_lr) are in the saved ones only.
            missing = sorted(_options(group).keys() - saved.keys())
            if missing:
                raise ValueError(
                    f"the checkpoint is of another optimizer: expected {own} with option "
                    f"{missing[0]!r}, found {description['optimizer']} without; build the "
                    "optimizer that was saved, or pass optimizer=None"
                )

    def _tensor(self, fqn: str, name: str, held: Held, loaded: Piece) -> torch.Tensor:
        """The state tensor to have after `commit`: the present one where it fits, or a new one."""
        parameter = self._parameters[fqn]
        wraps = held is Held.LIKE_PARAMETER and isinstance(parameter, DTensor)
        dtype = loaded.local.dtype
        if held is not Held.REPLICATED and dtype == self._saved_dtypes[fqn]:
            dtype = parameter.dtype
        present = self._optimizer.state.get(parameter, {}).get(name)
        if isinstance(present, torch.Tensor) and isinstance(present, DTensor) == wraps:
            local = present.to_local() if isinstance(present, DTensor) else present
            if (
                tuple(present.shape) == (loaded.shape if wraps else tuple(loaded.local.shape))
                and local.shape == loaded.local.shape
                and local.dtype == dtype
            ):
                self._copies.append((local, loaded.local))
                return present
        device = _local(parameter).device
        if name == "step" and not self._steps_on_device(parameter):
            device = torch.device("cpu")
        local = loaded.local.to(device, dtype)
        return _like_parameter(local, loaded.shape, parameter) if wraps else local

    def _steps_on_device(self, parameter: nn.Parameter) -> bool:
        """Whether torch's optimizers want the step count beside this parameter."""
        return any(
            group.get("fused") or group.get("capturable")
            for group in self._optimizer.param_groups
            if any(each is parameter for each in group["params"])
        )


def _foreign_parameter(parameter: torch.Tensor, group: int, position: int) -> ValueError:
    way_out = "build the optimizer from this model's parameters()"
    if get_containing_parameter_group(parameter) is not None:
        way_out = "build the optimizer from model.parameters() after fully_shard, not before"
    return ValueError(
        f"parameter {position} of the optimizer's group {group}, of shape "
        f"{tuple(parameter.shape)}: expected a parameter of the model, found another; {way_out}"
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in _NOT_OPTIONS
    }


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    present = group.get(name)
    if isinstance(present, torch.Tensor):
        # A compiled step, or a scheduler, holds on to this very tensor.
        present.copy_(torch.as_tensor(value))
    elif isinstance(present, int | float) and isinstance(value, torch.Tensor):
        group[name] = value.item()
    else:
        group[name] = value


def _entry(
    fqn: str, name: str, value: object, parameter: nn.Parameter
) -> tuple[Held, Piece | Value]:
    """How ``value`` is held, and what to save of it."""
    key = state_key(fqn, name)
    if not isinstance(value, torch.Tensor):
        if any(True for _ in _tensors_in(value)):
            raise ValueError(
                f"optimizer state {key!r} is a {type(value).__name__} with tensors in it: expected "
                "a tensor or a plain object, which can be cut anew; save it by other means"
            )
        return Held.OBJECT, Value(value)
    whole = piece_of(parameter)
    if not isinstance(value, DTensor):
        alike = name != "step" and value.shape == whole.local.shape
        if alike and _is_sharded(parameter):
            return Held.LOCAL, Piece(value.detach(), whole.shape, whole.offset)
        alike = alike and not isinstance(parameter, DTensor)
        return Held.LIKE_PARAMETER if alike else Held.REPLICATED, piece_of(value)
    if _is_cut_alike(tuple(value.shape), parameter):
        with torch.no_grad():
            local = value.to_local()
        rows = _cut(tuple(value.shape), whole, parameter)
        if tuple(local.shape) == rows[0]:
            return Held.LIKE_PARAMETER, Piece(local.detach(), tuple(value.shape), rows[1])
    if all(isinstance(placement, Replicate) for placement in value.placements):
        return Held.LIKE_PARAMETER, piece_of(value)
    raise ValueError(
        f"optimizer state {key!r} is a DTensor of shape {tuple(value.shape)} and placements "
        f"{value.placements}: expected one that is cut like its parameter of shape {whole.shape} "
        "or replicated; save it by other means"
    )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors_in(each)


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        isinstance(placement, Shard) for placement in parameter.placements
    )


def _is_row_sharded(parameter: torch.Tensor) -> bool:
    return get_containing_parameter_group(parameter) is not None and _is_sharded(parameter)


def _is_cut_alike(shape: tuple[int, ...], parameter: nn.Parameter) -> bool:
    """Whether a tensor of ``shape`` that belongs to ``parameter`` is cut like it."""
    same_rows = len(shape) > 0 and shape[:1] == tuple(parameter.shape[:1])
    return shape == tuple(parameter.shape) or (same_rows and _is_row_sharded(parameter))


def _cut(
    shape: tuple[int, ...], whole: Piece, parameter: nn.Parameter
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local shape and offset of a tensor of ``shape`` that is cut like ``parameter``."""
    if shape == whole.shape:
        return tuple(whole.local.shape), whole.offset
    return (whole.local.shape[0], *shape[1:]), (whole.offset[0], *(0 for _ in shape[1:]))


def _temporary(saved: TensorStorageMetadata, held: Held, parameter: nn.Parameter) -> Piece:
    """A piece in host memory for what this rank holds of a saved state tensor."""
    shape = tuple(saved.size)
    local_shape, offset = shape, (0,) * len(shape)
    if held is not Held.REPLICATED and _is_cut_alike(shape, parameter):
        local_shape, offset = _cut(shape, piece_of(parameter), parameter)
    with torch.inference_mode(False):
        return Piece(torch.empty(local_shape, dtype=saved.properties.dtype), shape, offset)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return parameter.to_local()


def _like_parameter(
    local: torch.Tensor, shape: tuple[int, ...], parameter: nn.Parameter
) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    cut_alike = _is_cut_alike(shape, parameter)
    placements = exact_placements(parameter) if cut_alike else [Replicate()] * mesh.ndim
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
