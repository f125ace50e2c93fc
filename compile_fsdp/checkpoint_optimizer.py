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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Placement, Replicate

from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.parameter_group import get_containing_parameter_group
from compile_fsdp.runtime.row_dtensor import cut_tensor_like

from .checkpoint_planner import Locator, Piece, Value
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

    ``locator`` finds this rank's part of them.

    Raises:
        ValueError: a parameter of the optimizer is not one of the model's.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, locator: Locator
    ) -> None:
        self._optimizer = optimizer
        names = {id(each): clean_fqn(name) for name, each in model.named_parameters()}
        self._owners: dict[str, _Owner] = {}
        self._groups: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise _foreign_parameter(parameter, number, position)
                self._owners[names[id(parameter)]] = _Owner(parameter, group, locator)
            self._groups.append([names[id(parameter)] for parameter in group["params"]])
        self._loaded: dict[str, dict[str, tuple[Held, Piece | Value]]] = {}
        self._saved_dtypes: dict[str, torch.dtype] = {}
        self._options: list[dict[str, Any]] = []
        self._restored: dict[str, dict[str, Any]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    # Saving -----------------------------------------------------------------------------------

    def entries(self) -> dict[str, Piece | Value]:
        """What to save, aliasing the optimizer's memory.

        Raises:
            ValueError: some state cannot be cut anew for another number of ranks.
        """
        known = {id(owner.parameter) for owner in self._owners.values()}
        for holder in self._optimizer.state:
            if id(holder) not in known:
                kind = type(holder).__name__
                raise ValueError(
                    f"the optimizer has state under {kind} {holder!r:.60}: expected state of its "
                    "parameters only; save that by other means"
                )
        entries: dict[str, Piece | Value] = {}
        states: dict[str, dict[str, str]] = {}
        for fqn, owner in self._owners.items():
            for name, value in self._optimizer.state.get(owner.parameter, {}).items():
                key = state_key(fqn, name)
                held, entries[key] = owner.entry(key, value)
                states.setdefault(fqn, {})[name] = held.value
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
                    entry = self._owners[fqn].temporary(found, held)
                self._loaded[fqn][name] = held, entry
            parameter = saved[fqn]
            assert isinstance(parameter, TensorStorageMetadata)
            self._saved_dtypes[fqn] = parameter.properties.dtype
        self._options = [
            {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in description["param_groups"]
        ]
        return {
            state_key(fqn, name): entry
            for fqn, states in self._loaded.items()
            for name, (_, entry) in states.items()
        }

    def prepare(self) -> None:
        """Allocate the state that the optimizer does not have yet."""
        with without_autograd():
            for fqn, states in self._loaded.items():
                restored = self._restored.setdefault(fqn, {})
                for name, (held, entry) in states.items():
                    if isinstance(entry, Value):
                        restored[name] = entry.value
                    else:
                        restored[name] = self._tensor(fqn, name, held, entry)

    def commit(self) -> None:
        """Write state and options into the optimizer."""
        with without_autograd():
            for target, source in self._copies:
                target.copy_(source)
            for fqn, owner in self._owners.items():
                if fqn in self._restored:
                    state = self._optimizer.state[owner.parameter]
                    state.clear()
                    state.update(self._restored[fqn])
                else:
                    self._optimizer.state.pop(owner.parameter, None)
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
        owner = self._owners[fqn]
        wraps = held is Held.LIKE_PARAMETER and isinstance(owner.parameter, DTensor)
        dtype = loaded.local.dtype
        if held is not Held.REPLICATED and dtype == self._saved_dtypes[fqn]:
            dtype = owner.parameter.dtype
        present = self._optimizer.state.get(owner.parameter, {}).get(name)
        if isinstance(present, torch.Tensor) and isinstance(present, DTensor) == wraps:
            local = present.to_local() if isinstance(present, DTensor) else present
            if (
                tuple(present.shape) == (loaded.shape if wraps else tuple(loaded.local.shape))
                and local.shape == loaded.local.shape
                and local.dtype == dtype
            ):
                self._copies.append((local, loaded.local))
                return present
        device = owner.piece.local.device
        if name == "step" and not (owner.group.get("fused") or owner.group.get("capturable")):
            # Where torch's optimizers want it.
            device = torch.device("cpu")
        local = loaded.local.to(device, dtype)
        return owner.like_parameter(local, loaded.shape) if wraps else local


class _Owner:
    """A parameter of the optimizer, and how tensors in its state are cut.

    Attributes:
        parameter: as the optimizer has it.
        group: its parameter group in the optimizer.
        piece: what this rank holds of it.
    """

    def __init__(self, parameter: nn.Parameter, group: Mapping[str, Any], locator: Locator) -> None:
        self.parameter = parameter
        self.group = group
        self.piece = locator.piece_of(parameter)
        self._locator = locator

    def entry(self, key: str, value: object) -> tuple[Held, Piece | Value]:
        """How the state ``value`` is held, and what to save of it.

        Raises:
            ValueError: it cannot be cut anew.
        """
        if not isinstance(value, torch.Tensor):
            if any(True for _ in _tensors_in(value)):
                raise ValueError(
                    f"optimizer state {key!r} is a {type(value).__name__} with tensors in it: "
                    "expected a tensor or a plain object; save it by other means"
                )
            return Held.OBJECT, Value(value)
        shape = tuple(value.shape)
        if not isinstance(value, DTensor):
            # A step count has the shape of a 0-D parameter.
            if value.shape != self.piece.local.shape or key.endswith(".step"):
                return Held.REPLICATED, self._locator.piece_of(value)
            held = Held.LOCAL if isinstance(self.parameter, DTensor) else Held.LIKE_PARAMETER
            return held, Piece(value.detach(), self.piece.shape, self.piece.offset)
        with torch.no_grad():
            local = value.to_local()
        local_shape, offset = self._cut(shape)
        if tuple(local.shape) == local_shape:
            return Held.LIKE_PARAMETER, Piece(local, shape, offset)
        if all(isinstance(placement, Replicate) for placement in value.placements):
            return Held.LIKE_PARAMETER, self._locator.piece_of(value)
        raise ValueError(
            f"optimizer state {key!r} is a DTensor of shape {shape} and placements "
            f"{value.placements}: expected one that is replicated, or cut like its parameter of "
            f"shape {self.piece.shape}; save it by other means"
        )

    def temporary(self, saved: TensorStorageMetadata, held: Held) -> Piece:
        """A piece in host memory for what this rank holds of a saved state tensor."""
        shape = tuple(saved.size)
        local_shape, offset = shape, (0,) * len(shape)
        if held is not Held.REPLICATED:
            local_shape, offset = self._cut(shape)
        with torch.inference_mode(False):
            return Piece(torch.empty(local_shape, dtype=saved.properties.dtype), shape, offset)

    def like_parameter(self, local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
        """A DTensor of ``shape`` over ``local``, cut as `temporary` cuts it."""
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        placements: Sequence[Placement] = [Replicate()] * mesh.ndim
        if self._is_cut(shape):
            placements = self._locator.placements_of(self.parameter)
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return cut_tensor_like(made, self.parameter)

    def _is_cut(self, shape: tuple[int, ...]) -> bool:
        """Whether a state tensor of ``shape`` is cut like the parameter."""
        if shape == self.piece.shape:
            return True
        same_rows = len(shape) > 0 and shape[:1] == self.piece.shape[:1]
        return same_rows and self._locator.is_cut_by_rows(self.parameter)

    def _cut(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Local shape and offset, on this rank, of a state tensor of ``shape``."""
        if shape == self.piece.shape:
            return tuple(self.piece.local.shape), self.piece.offset
        rest = tuple(0 for _ in shape[1:])
        if self._is_cut(shape):
            return (self.piece.local.shape[0], *shape[1:]), (self.piece.offset[0], *rest)
        return shape, (0,) * len(shape)


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


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors_in(each)
