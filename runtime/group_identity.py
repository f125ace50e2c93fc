"""Who a parameter group is: its names, its owning module and the way back from its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from .agreement import Label, listed_gradients
from .parameter import FsdpParameter
from .registry import RegisteredGroup, registry


class GroupIdentity:
    """The part of `FsdpParameterGroup` that neither holds nor moves data.

    Args:
        owning_module: the FSDP module whose parameters these are; held weakly.

    Attributes:
        name: the registry name, equal on every rank and in every run; "" until `rename`.
        label: a short name for people.
        model: a number that tells equal labels apart, the same on every rank of the mesh.
        parameters: the parameters in tensor order.
    """

    parameters: tuple[FsdpParameter, ...]

    def __init__(self, owning_module: nn.Module) -> None:
        self._owning_module = weakref.ref(owning_module)
        self.name = ""
        self.label: str = ""
        self.model = 0
        self._gradient_labels: dict[tuple[int, ...], Label] = {}

    @property
    def owning_module(self) -> nn.Module:
        """The module that owns these parameters.

        Raises:
            RuntimeError: it has been deleted.
        """
        module = self._owning_module()
        if module is None:
            raise RuntimeError(
                f"parameter group {self.name or self.label!r} outlived the module that owned it: "
                "keep the sharded module alive while its group is in use"
            )
        return module

    @property
    def parameters_by_tensor(self) -> dict[torch.Tensor, FsdpParameter]:
        """Each parameter under its sharded and its unsharded tensor."""
        return {
            tensor: parameter
            for parameter in self.parameters
            for tensor in (parameter.sharded, parameter.unsharded)
        }

    @property
    def fqns(self) -> list[str]:
        """One name for each tensor."""
        return [parameter.fqns[0] for parameter in self.parameters]

    def rename(self, name: str, label: str, model: int = 0) -> None:
        """Give the group its registry name, its label for people and its model's number."""
        if self.name:
            registry.unregister(self.name)
        self.name = name
        self.model = model
        self.label = Label(label, self._subject(label))
        self._gradient_labels.clear()
        registry.register(name, cast(RegisteredGroup, self))

    def _subject(self, label: str) -> str:
        return f"{label!r}" if self.model == 0 else f"{label!r} in model {self.model}"

    def gradient_label(self, indices: Sequence[int]) -> str:
        """The label of a reduction of these gradients: ranks must agree on which they are."""
        key = tuple(indices)
        if key not in self._gradient_labels:
            names = listed_gradients(self.fqns, key)
            subject = f"gradients of {self._subject(self.label)}: {names}"
            self._gradient_labels[key] = Label(self.label, subject)
        return self._gradient_labels[key]
