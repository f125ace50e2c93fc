"""What a checkpoint holds of a model and of an optimizer, and how it comes back.

    <fqn>                                 a parameter (its main weight) or a persistent buffer
    optimizer.state.<parameter>.<name>    one entry of the optimizer's state of that parameter
    optimizer.description                 parameter groups, with names instead of parameters

Loading has three steps, so that nothing changes before everything is known to be right: `plan`
compares names and shapes and makes temporary pieces in host memory, `prepare` checks what was
read into them and allocates, `commit` writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.parameter_group import (
    get_containing_parameter_group,
    sync_model_weights_from_main_weights,
)

from .checkpoint_planner import Locator, Piece, Value

DESCRIPTION = "optimizer.description"
"""The key of the optimizer's description; see `compile_fsdp.checkpoint_optimizer`."""

_STATE_PREFIX = "optimizer.state."
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_EXTRA_STATE = "_extra_state"


def clean_fqn(name: str) -> str:
    """``name`` without what ``torch.compile`` and activation checkpointing wrap around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_optimizer_key(key: str) -> bool:
    """Whether ``key`` belongs to the optimizer's part of a checkpoint."""
    return key == DESCRIPTION or key.startswith(_STATE_PREFIX)


def state_key(fqn: str, name: str) -> str:
    """Where a checkpoint has the optimizer state ``name`` of the parameter ``fqn``."""
    return f"{_STATE_PREFIX}{fqn}.{name}"


class ModelState:
    """Parameters, persistent buffers and extra states of a model, by clean FQN.

    A tied tensor has several names and is saved under each, like ``state_dict`` does.

    Attributes:
        locator: finds this rank's part of the model's tensors.

    Raises:
        ValueError: a name is ambiguous or not available.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: dict[str, torch.Tensor] = {}
        self._extra: dict[str, tuple[str, object]] = {}
        self._loaded: dict[str, Piece] = {}
        self._loaded_extra: dict[str, Value] = {}
        own = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
        for raw, value in model.state_dict(keep_vars=True).items():
            name = clean_fqn(raw)
            if name in self._tensors or name in self._extra or is_optimizer_key(name):
                raise ValueError(
                    f"the model's {raw!r} would be saved as {name!r}, which is "
                    f"{'reserved' if is_optimizer_key(name) else 'taken'}; rename that module"
                )
            if isinstance(value, torch.Tensor) and id(value) in own:
                self._tensors[name] = value
            elif name.rpartition(".")[2] == _EXTRA_STATE:
                self._extra[name] = (raw, value)
            else:
                raise ValueError(
                    f"state_dict entry {raw!r} is neither a parameter nor a buffer of the model "
                    "(a state_dict hook made it) and could not be loaded; save it by other means"
                )
        self.locator = Locator(self._tensors.values())

    @property
    def extra_names(self) -> list[str]:
        """Names of extra states."""
        return list(self._extra)

    def pieces(self) -> dict[str, Piece]:
        """This rank's part of every parameter and buffer, aliasing the model's memory."""
        return {name: self.locator.piece_of(tensor) for name, tensor in self._tensors.items()}

    def names_by_tensor(self) -> list[list[str]]:
        """The names of each parameter and buffer: several where it is tied."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return list(names.values())

    def entries(self) -> dict[str, Piece | Value]:
        """What to save, aliasing the model's memory."""
        pieces = self.pieces()
        return {**pieces, **{name: Value(value) for name, (_, value) in self._extra.items()}}

    def _check_not_nested(self, name: str, others: Sequence[str]) -> None:
        nested = next((key for key in others if key.endswith(f".{name}")), None)
        if nested is not None:
            raise ValueError(
                f"the checkpoint is of another model: expected {name!r}, found {nested!r}. It was "
                "saved from a module around this one, or below a key (dcp.save({'model': ...})): "
                "load it as it was saved, there with get_state_dict, dcp.load and set_state_dict "
                "of torch.distributed.checkpoint"
            )

    def plan(self, metadata: Metadata, *, convert_dtypes: bool) -> dict[str, Piece | Value]:
        """What to read.

        Raises:
            ValueError: the checkpoint is of another model, or has another dtype and
                ``convert_dtypes`` is False.
            RuntimeError: the model is in use.
        """
        saved = metadata.state_dict_metadata
        for name in (*self._tensors, *self._extra):
            if name not in saved:
                others = [key for key in saved if not is_optimizer_key(key)]
                self._check_not_nested(name, others)
                raise ValueError(
                    f"the checkpoint is of another model: expected {name!r}, found "
                    f"{len(others)} other names{f' like {others[0]!r}' if others else ''}; "
                    "build the model that was saved"
                )
        for key in saved:
            if key not in self._tensors and key not in self._extra and not is_optimizer_key(key):
                raise ValueError(
                    f"the checkpoint is of another model: expected no {key!r}, which the model "
                    "does not have, found it; build the model that was saved"
                )
        self.check_at_rest()
        for name, tensor in self._tensors.items():
            self._loaded[name] = _temporary(
                self.locator.piece_of(tensor), saved[name], name, convert_dtypes
            )
        self._loaded_extra = {name: Value(None) for name in self._extra}
        return {**self._loaded, **self._loaded_extra}

    def take(self, loaded: Mapping[str, Piece]) -> None:
        """Have ``loaded`` written by `commit`: of each tensor one of its names at least."""
        self._loaded = dict(loaded)
        for names in self.names_by_tensor():
            first = next(name for name in names if name in loaded)
            self._loaded.update({name: loaded[first] for name in names if name not in loaded})

    def check_at_rest(self) -> None:
        """Raise if a tensor cannot be written now.

        Raises:
            ValueError: it has no memory.
            RuntimeError: it is in use.
        """
        for name, tensor in self._tensors.items():
            _check_at_rest(name, tensor)

    def prepare(self) -> None:
        """Check what was read.

        Raises:
            ValueError: tied parameters differ in the checkpoint.
        """
        first: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            other = first.setdefault(id(tensor), name)
            if other != name and not _same(self._loaded[other].local, self._loaded[name].local):
                raise ValueError(
                    f"{other!r} and {name!r} are tied: expected equal values in the checkpoint, "
                    "found different ones; untie them, or load a checkpoint of the tied model"
                )

    def commit(self) -> None:
        """Write what was read into the model, and refresh what computes with it."""
        if self._loaded_extra:
            extra = {self._extra[name][0]: each.value for name, each in self._loaded_extra.items()}
            # Through the module, whose wrappers and hooks know where it goes.
            self._model.load_state_dict(extra, strict=False)
        with without_autograd():
            for name, tensor in self._tensors.items():
                self.locator.piece_of(tensor).local.copy_(self._loaded[name].local)
            sync_model_weights_from_main_weights(list(self._tensors.values()))


def _check_at_rest(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device: expected memory to load into, found none; call "
            "to_empty() or fully_shard first"
        )
    group = get_containing_parameter_group(tensor)
    if group is not None and group.is_held:
        raise RuntimeError(
            f"{name!r} is in use: expected a model between steps, found its parameters unsharded "
            "in a forward or backward; load before or after it"
        )


def _temporary(target: Piece, saved: object, name: str, convert_dtypes: bool) -> Piece:
    """A piece in host memory, in the checkpoint's dtype, for what belongs into ``target``."""
    found = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else "no tensor"
    if not isinstance(saved, TensorStorageMetadata) or found != target.shape:
        raise ValueError(
            f"the checkpoint is of another model: expected {name!r} of shape {target.shape}, "
            f"found {found}; build the model that was saved"
        )
    if saved.properties.dtype != target.local.dtype and not convert_dtypes:
        raise ValueError(
            f"the checkpoint has another dtype: expected {name!r} in {target.local.dtype}, found "
            f"{saved.properties.dtype}; build the model that was saved, or pass "
            "convert_dtypes=True to have values converted"
        )
    with torch.inference_mode(False):
        local = torch.empty(target.local.shape, dtype=saved.properties.dtype)
    return Piece(local, target.shape, target.offset)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise: NaN equals itself."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
