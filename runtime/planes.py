"""The planes that one phase of a quantised group reads, gathered like a frozen group of bytes.

    main                the group's main weight           optimizer's placements    main dtype
      | quantise, after a step, this rank's rows
    post_optimizer      its part of the planes            optimizer's placements    bytes
      | redistribute, where the planes are wider
    model               what a phase gathers              parameter placements      bytes
      | all-gather of the data and of the scales
    full                data and scales, one flat buffer  replicated                bytes

A quantised group has two such units, one for forward (rowwise) and one for backward (columnwise).
To graphs each is a parameter group by itself: of ``uint8``, frozen, with two tensors for each
matrix. Nothing that plans, orders or proves communication has to know more. The gradients and the
main weight are the group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate

from .context import GroupContext
from .dbuffer import DBuffer
from .group_info import GroupInfo
from .group_unsharding import GroupUnsharding
from .layout import GlobalLayout
from .modes import without_autograd
from .placement import differing_axes
from .quantized_dbuffer import QuantizedDBuffer
from .unsharding import Unsharding
from .weights import Weights, same_memory, shard_count

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup

__all__ = ["PlaneUnit", "PlaneWeights", "unit_name"]


def unit_name(group: str, columnwise: bool) -> str:
    """The name, or label, of the planes of the group with this name, or label."""
    return f"{group}:{'columnwise' if columnwise else 'rowwise'}"


class PlaneWeights(Weights):
    """The buffers of one pair of planes.

    ``full`` has two tensors for each matrix: all data, then all scales, the scales at 1/32 of the
    data's offsets behind it.

    Args:
        main: the main weight, of a layout that `quantized_layout` made.
        placements: of the planes, for each mesh axis.
        columnwise: which planes.

    Attributes:
        shard: this rank's data and scales, one behind the other: what graphs take as input.
    """

    def __init__(self, main: DBuffer, placements: Sequence[Placement], columnwise: bool) -> None:
        self.main = main
        self.columnwise = columnwise
        self.gathers = shard_count(main.mesh, placements) > 1
        numel = main.local_numel(placements)
        with without_autograd():
            self.shard = torch.empty(numel + numel // 32, dtype=torch.uint8, device=main.device)
        self.model = self._over(self.shard, placements)
        self.post_optimizer = self.model.view(main.placements)
        self.full = self._make_full()

    def _over(self, both: torch.Tensor, placements: Sequence[Placement]) -> QuantizedDBuffer:
        """Planes at ``placements`` in ``both``, 1-D, the scales behind the data."""
        main, numel = self.main, both.numel() * 32 // 33
        return QuantizedDBuffer(
            main.mesh,
            placements,
            main.tensor_shapes,
            layout=main.layout,
            rowwise=not self.columnwise,
            columnwise=self.columnwise,
            local=[both[:numel], both[numel:]],
        )

    def _make_full(self) -> DBuffer:
        data, scales = self._planes(self.model)
        size = data.layout.size
        offsets = [
            *data.layout.tensor_to_offset,
            *(size + offset for offset in scales.layout.tensor_to_offset),
        ]
        shapes = (*data.tensor_shapes, *scales.tensor_shapes)
        layout = GlobalLayout(shapes, tuple(offsets), size + scales.layout.size, (0,))
        replicated = [Replicate()] * self.main.mesh.ndim
        local = None if self.gathers else same_memory(self.shard)
        return DBuffer(
            self.main.mesh,
            replicated,
            shapes,
            torch.uint8,
            self.main.device,
            layout=layout,
            local=local,
        )

    def _planes(self, buffer: QuantizedDBuffer) -> tuple[DBuffer, ...]:
        return buffer.planes_for(rowwise=not self.columnwise, columnwise=self.columnwise)

    def use_main(self, main: DBuffer) -> None:
        """Quantise another main weight from now on: the parameters have been made trainable."""
        self.main = main
        self.post_optimizer = self.model.view(main.placements)

    def follow_main(self) -> None:
        """See `Weights.follow_main`: it is quantised."""
        self.post_optimizer.quantize_(self.main)
        self.redistribution_due = self.post_optimizer.placements != self.model.placements

    @property
    def follows(self) -> bool:
        """See `Weights.follows`: planes are never what they are quantised from."""
        return True

    @property
    def redistributed(self) -> tuple[tuple[DBuffer, DBuffer], ...]:
        """See `Weights.redistributed`."""
        planes, wider = self._planes(self.post_optimizer), self._planes(self.model)
        return tuple(zip(planes, wider, strict=True))

    @property
    def gathered_axes(self) -> tuple[int, ...]:
        """See `Weights.gathered_axes`."""
        return differing_axes(self.model.placements, self.full.placements)

    def pieces(self, into: DBuffer) -> tuple[tuple[DBuffer, torch.Tensor], ...]:
        """See `Weights.pieces`: the data, and the scales behind it."""
        data, scales = self._planes(self.model)
        size = data.layout.size
        return (data, into.local[:size]), (scales, into.local[size:])


class PlaneUnit(GroupUnsharding):
    """The rowwise or the columnwise planes of a quantised group, for graphs and hooks to gather.

    Args:
        group: the group whose main weight they are quantised from.
        columnwise: which planes.

    Attributes:
        flat_leaf: this rank's bytes.
    """

    def __init__(self, group: FsdpParameterGroup, columnwise: bool) -> None:
        super().__init__(group.owning_module)
        self.group = group
        self.columnwise = columnwise
        self.mesh = group.mesh
        self.device = group.device
        self.parameters = ()
        self._planes = PlaneWeights(group.main_weight, group.model_weight.placements, columnwise)
        self._weights = self._planes
        self._unsharding = Unsharding(
            self._planes, [parameter.sharded for parameter in group.parameters]
        )
        # With a version counter of its own: quantising is no change of what a forward saved.
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.flat_leaf = nn.Parameter(empty, requires_grad=False)
        self.flat_leaf.data = self._planes.shard
        if self._planes.gathers:
            self._planes.full.release_storage()

    def follow_name(self) -> None:
        """Take the name of the group, followed by which planes these are."""
        group = self.group
        name, label = (unit_name(each, self.columnwise) for each in (group.name, group.label))
        self.rename(name, label, group.model)

    @property
    def context(self) -> GroupContext:  # type: ignore[override]
        """The group's."""
        return self.group.context

    @property
    def info(self) -> GroupInfo:
        """These planes as a frozen group of bytes."""
        layout, group = self._planes.full.layout, self.group
        return GroupInfo(
            name=self.name,
            label=self.label,
            fqns=tuple((f"{fqn}.{what}",) for what in ("data", "scales") for fqn in group.fqns),
            shapes=layout.tensor_shapes,
            offsets=layout.tensor_to_offset,
            full_numel=layout.size,
            local_numel=self.flat_leaf.numel(),
            dtype=torch.uint8,
            requires_grad=False,
            trainable=self.trainable,
            mesh_shape=tuple(group.mesh.shape),
            ranks=group.ranks,
            gathers=self._planes.gathers,
        )

    @property
    def trainable(self) -> tuple[bool, ...]:
        """None is."""
        return (False,) * len(self._planes.full.layout.tensor_shapes)

    def follow_requires_grad(self) -> bool:
        """Nothing changes."""
        return False

    def use_main(self, main: DBuffer) -> None:
        """See `PlaneWeights.use_main`."""
        self._planes.use_main(main)
        self.note_step()

    def full_planes(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of matrix ``index`` as bytes, aliasing `full_local_tensor`."""
        full, count = self._planes.full, len(self.group.parameters)
        return full.get_local_tensor(index), full.get_local_tensor(count + index)

    def reduce_gradients(self) -> None:
        """Planes have none; nor have they any of what follows."""

    expect_step = reduce_gradients
    reduce_withheld_gradients = reduce_gradients
    forget_unreduced_gradients = reduce_gradients
    release_unused_gradient_storage = reduce_gradients

    @property
    def gradient(self) -> None:
        """None: gradients are the group's."""

    def gradients_wanted(self) -> bool:
        """Never: gradients are the group's."""
        return False
