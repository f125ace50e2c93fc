"""What is planned: a model and one call of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals import flatten


@dataclass(frozen=True)
class Built:
    """A model and the arguments of one call.

    Attributes:
        model: may be sharded already.
        args, kwargs: of its forward.
        blocks: names of the modules to shard beside the root; None: look for them.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] | None = None

    @property
    def samples(self) -> tuple[int, str]:
        """What a rank works on in a step, and in which unit: the elements of the first tensor of
        whole numbers are tokens; without one, the rows of the first tensor are samples."""
        leaves, _ = flatten((self.args, dict(self.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if not tensor.is_floating_point() and tensor.ndim:
                return tensor.numel(), "tokens"
        return next((len(tensor) for tensor in tensors if tensor.ndim), 1), "samples"


@dataclass(frozen=True)
class Workload:
    """How to build what is planned, again for each mesh.

    Attributes:
        name: for people.
        build: makes the model and its arguments; takes the mesh.
    """

    name: str
    build: Callable[[DeviceMesh], Built]
