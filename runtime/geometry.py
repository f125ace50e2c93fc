"""Geometry: what a rank holds of flat buffers with one layout and one set of placements.

A parameter group makes buffers all the time (a packed gradient, a reduced piece, a main gradient
for each step), of few kinds: those of one kind differ in nothing but their memory. So what follows
from mesh, layout and placements alone is worked out once, and shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from compile_fsdp.runtime.dtensor import make_spec
from compile_fsdp.runtime.layout import GlobalLayout
from compile_fsdp.runtime.placement import (
    Flat,
    ShardAxes,
    axis_names,
    check_placements,
    differing_axes,
    strictest_shard,
)
from compile_fsdp.runtime.row_dtensor import RowDTensor
from compile_fsdp.runtime.torch_internals import DTensorSpec, dtensors_over, unflatten

__all__ = ["Geometry"]

# Tuples of placements that are recognised by identity: the buffers of a group have few.
_MOST_RECOGNISED = 64

Piece = tuple[int, int, tuple[int, ...]]


class Geometry:
    """This rank's part of the buffers over one layout, mesh and set of placements.

    Args:
        mesh: The ranks that share the buffers.
        placements: For each mesh axis.
        layout: Where the tensors lie, and how the buffer is cut.

    Attributes:
        shard_axes: The mesh axes that cut the buffer, and this rank's place on them.
        segment: ``(start, stop)`` of this rank's part in the global flat buffer, in elements.
        numel: The length of that part.

    Raises:
        TypeError, ValueError: The placements are illegal, or the layout has not enough segments.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], layout: GlobalLayout
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.layout = layout
        check_placements("buffer", placements, axis_names(mesh))
        self.shard_axes = ShardAxes.of(mesh, placements)
        self._check_layout()
        self.segment = self.segment_on(self.shard_axes)
        self.numel = self.segment[1] - self.segment[0]
        self._cuts_rows = isinstance(strictest_shard(placements), Flat)
        # Made when first asked for.
        self._pieces: dict[int, Piece] = {}
        self._specs: dict[tuple[int, torch.dtype], DTensorSpec] = {}
        self._lists_of_specs: dict[tuple[tuple[int, ...], torch.dtype], list[DTensorSpec]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._others: list[Geometry] = [self]
        self._recognised: dict[int, tuple[tuple[Placement, ...], Geometry]] = {}
        self._changed: dict[int, tuple[tuple[Placement, ...], tuple[int, ...]]] = {}
        self._cut: _Cut | None = None

    def at(self, placements: Sequence[Placement]) -> Geometry:
        """The geometry of other ``placements`` on the same mesh and layout."""
        wanted = tuple(placements)
        recognised = self._recognised.get(id(wanted))
        if recognised is not None and recognised[0] is wanted:
            return recognised[1]
        for known in self._others:
            if _equal(known.placements, wanted):
                break
        else:
            known = Geometry(self.mesh, wanted, self.layout)
            self._others.append(known)
            known._others, known._recognised = self._others, self._recognised
        if len(self._recognised) < _MOST_RECOGNISED:
            self._recognised[id(wanted)] = (wanted, known)
        return known

    def changed_axes(self, placements: tuple[Placement, ...]) -> tuple[int, ...]:
        """The mesh axes on which ``placements`` differ from these, outermost first.

        Raises:
            TypeError, ValueError: ``placements`` are illegal.
        """
        known = self._changed.get(id(placements))
        if known is not None and known[0] is placements:
            return known[1]
        self.at(placements)
        changed = differing_axes(self.placements, placements)
        if len(self._changed) < _MOST_RECOGNISED:
            self._changed[id(placements)] = (placements, changed)
        return changed

    def segment_on(self, axes: ShardAxes) -> tuple[int, int]:
        """``(start, stop)`` of this rank's segment where ``axes`` cut the buffer."""
        return self.layout.segment(axes.segment, axes.num_shards)

    def segment_sizes(self, axis: int) -> list[int]:
        """Elements of the segments of the ranks along mesh ``axis``, in rank order."""
        sizes = self._sizes.get(axis)
        if sizes is None:
            axes = self.shard_axes
            segments = [
                self.layout.segment(number, axes.num_shards) for number in axes.segments_along(axis)
            ]
            sizes = self._sizes[axis] = [stop - start for start, stop in segments]
        return sizes

    def rows(self, index: int) -> tuple[int, ...]:
        """Rows of tensor ``index`` in each segment."""
        return self.layout.rows_by_segment(index, self.shard_axes.num_shards)

    def elements(self, index: int) -> tuple[int, int]:
        """The elements ``[first, last)`` of tensor ``index`` that this rank holds."""
        return self.layout.elements(index, self.shard_axes.segment, self.shard_axes.num_shards)

    def piece(self, index: int) -> Piece:
        """``(start, stop)`` of tensor ``index`` in this rank's part, and the shape of what is
        there."""
        return self._pieces.get(index) or self._find_piece(index)

    def pieces_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of every tensor in ``local``, aliasing it."""
        if self._cut is None:
            self._cut = _Cut([self.piece(index) for index in range(len(self.layout.tensor_shapes))])
        return self._cut.apply(local)

    def dtensors(
        self, indices: tuple[int, ...], locals_: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[DTensor]:
        """DTensors over ``locals_``, this rank's rows of the tensors in ``indices``.

        Raises:
            ValueError: A tensor is 0-D and the buffer cut, or the layout cuts rows (``Flat``).
        """
        specs = self._lists_of_specs.get((indices, dtype))
        if specs is None:
            specs = [self._spec(index, dtype) for index in indices]
            if len(indices) == len(self.layout.tensor_shapes):
                self._lists_of_specs[indices, dtype] = specs
        return dtensors_over(locals_, specs, RowDTensor if self.shard_axes.axes else DTensor)

    def _spec(self, index: int, dtype: torch.dtype) -> DTensorSpec:
        """What DTensors over tensor ``index`` know about themselves."""
        spec = self._specs.get((index, dtype))
        if spec is None:
            shape = self.layout.tensor_shapes[index]
            if self.shard_axes.axes and not shape:
                raise ValueError(
                    f"tensor {index} is 0-D: DTensor cannot shard it, having no dim 0. Give 0-D "
                    "tensors a buffer whose placements shard nothing"
                )
            rows = self.rows(index)
            spec = make_spec(self.mesh, self.placements, shape, dtype, rows, self.shard_axes)
            self._specs[index, dtype] = spec
        return spec

    def _find_piece(self, index: int) -> Piece:
        first, last = self.elements(index)
        here, shape = last - first, self.layout.tensor_shapes[index]
        numel = math.prod(shape)
        if 0 < numel == here:
            held = shape
        elif not shape or (numel and self._cuts_rows):
            held = (here,)
        else:
            segment, shards = self.shard_axes.segment, self.shard_axes.num_shards
            held = (self.layout.rows(index, segment, shards)[1], *shape[1:])
        # The offset of an empty piece may lie outside of the segment.
        start = self.layout.tensor_to_offset[index] + first - self.segment[0] if here else 0
        self._pieces[index] = (start, start + here, held)
        return self._pieces[index]

    def _check_layout(self) -> None:
        shards = self.shard_axes.num_shards
        if self.layout.num_shards % shards:
            raise ValueError(
                f"layout: placements {self.placements} cut the buffer into {shards}, which does "
                f"not divide the layout's {self.layout.num_shards} segments; make the "
                "layout for all axes that any buffer of the group shards"
            )


class _Cut:
    """How to take a flat tensor to pieces by one call.

    Args:
        pieces: ``(start, stop)`` and shape of each.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        # torch cuts without gaps, and by the shapes of tensors, of which it needs no values.
        self._shapes: list[torch.Tensor] = []
        # The number of each piece among those, or else its shape: it has no elements.
        self._places: list[int | tuple[int, ...]] = [shape for _, _, shape in pieces]
        # What has no elements is made once: nobody can write it.
        self._empty: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        end = 0
        order = sorted(range(len(pieces)), key=lambda index: pieces[index][0])
        for index in (index for index in order if pieces[index][1] > pieces[index][0]):
            start, stop, shape = pieces[index]
            if start > end:
                self._shapes.append(torch.empty(start - end, device="meta"))
            self._places[index] = len(self._shapes)
            self._shapes.append(torch.empty(shape, device="meta"))
            end = stop

    def apply(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of ``local``, aliasing it."""
        cut, empty = unflatten(local, self._shapes), iter(self._without_elements(local))
        return [cut[place] if type(place) is int else next(empty) for place in self._places]

    def _without_elements(self, local: torch.Tensor) -> list[torch.Tensor]:
        kind = local.dtype, local.device
        known = self._empty.get(kind)
        if known is None or type(local) is not torch.Tensor:
            shapes = [place for place in self._places if isinstance(place, tuple)]
            known = [local[:0].clone().view(shape) for shape in shapes]
            if type(local) is torch.Tensor:  # and no fake one
                self._empty[kind] = known
        return known


def _equal(one: tuple[Placement, ...], other: tuple[Placement, ...]) -> bool:
    """Placements that promise different things are equal for DTensor, but not here."""
    return one == other and all(type(a) is type(b) for a, b in zip(one, other, strict=True))
