"""Placements: which of parameter, gradient and optimizer state is sharded over which mesh axis.

A placement tuple has one entry per data-parallel axis, outermost axis first. Shard axes are
always a suffix, so every rank's part of a buffer is one contiguous piece of it:

    (Replicate, Shard) on a mesh (outer=2, inner=2)

        flat buffer   [ segment 0 | segment 1 ]
        inner rank         0           1           both outer ranks hold the same piece
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = [
    "BlockAtomic",
    "Flat",
    "Placements",
    "RowAtomic",
    "ShardAxes",
    "ShardLayout",
    "TensorAtomic",
    "axis_names",
    "check_placements",
    "differing_axes",
    "is_average",
    "is_sharded",
    "segment_number",
    "strictest_shard",
]


class ShardLayout(Enum):
    """How the segments of a sharded buffer are sized."""

    PADDED = "padded"
    """Equal segments, the collectives' fast path; the buffer may contain padding, but at most 3 %:
    where whole rows in equal segments need more, segments are unequal as with ``PACKED``."""
    PACKED = "packed"
    """No padding; segments end at the nearest legal cut and are generally unequal."""


class _DimZeroShard(Shard):
    """A ``Shard(0)`` that also promises what a cut never splits.

    Promises are kept by the layout, not by the placement, so all of these compare equal to a
    plain ``Shard(0)``: equality says "sharded the same way", as DTensor needs it.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def __reduce__(self) -> tuple[object, ...]:
        # Shard's own pickling forgets the attributes of subclasses.
        return (type(self), ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    __str__ = __repr__


class Flat(_DimZeroShard):
    """Any cut of the flat buffer is allowed, also through a row."""


class RowAtomic(_DimZeroShard):
    """A dim-0 row is never split; what a plain ``Shard(0)`` means."""


class BlockAtomic(_DimZeroShard):
    """``rows`` rows, counted from the tensor's first, are never split.

    For block-quantised formats and 8-bit optimizers. A last, shorter block is legal.
    """

    def __init__(self, rows: int) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int):
            raise TypeError(f"BlockAtomic(rows): rows must be a whole number, got {rows!r}")
        if rows < 1:
            raise ValueError(f"BlockAtomic(rows) needs at least 1 row a block, got {rows}")
        super().__init__()
        self.rows = rows

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rows,))

    def __repr__(self) -> str:
        return f"BlockAtomic({self.rows})"

    __str__ = __repr__


class TensorAtomic(_DimZeroShard):
    """A tensor lives whole on one rank, its owner. One data-parallel axis only."""


def is_sharded(placement: Placement) -> bool:
    """True for ``Shard(0)`` and each of the promises above."""
    return isinstance(placement, Shard)


def is_average(placement: Placement) -> bool:
    """True for ``Partial("avg")``."""
    return isinstance(placement, Partial) and placement.reduce_op == "avg"


def differing_axes(one: Sequence[Placement], other: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh axes on which two buffers are placed differently, outermost first."""
    return tuple(axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def strictest_shard(placements: Iterable[Placement]) -> Shard | None:
    """The one promise that implies those of all ``placements``; None when none is sharded.

    Buffers of a parameter group share a layout, so the layout has to keep the promises of all.
    """
    shards = [placement for placement in placements if isinstance(placement, Shard)]
    if not shards:
        return None
    if any(isinstance(shard, TensorAtomic) for shard in shards):
        return TensorAtomic()
    blocks = [shard.rows for shard in shards if isinstance(shard, BlockAtomic)]
    if blocks:
        return BlockAtomic(math.lcm(*blocks))
    return Flat() if all(isinstance(shard, Flat) for shard in shards) else RowAtomic()


def check_placements(what: str, placements: Sequence[Placement], axes: Sequence[object]) -> None:
    """Check one placement tuple against the axes it is for.

    Args:
        what: The name used in messages, such as ``"parameter"``.
        placements: One placement per axis.
        axes: Axis names or numbers, for messages.

    Raises:
        TypeError: An entry is not a ``Placement``.
        ValueError: Wrong length; a placement other than ``Replicate()``, ``Shard(0)`` and
            ``Partial("avg")``; a shard axis with an axis that is not sharded to its right.
    """
    if len(placements) != len(axes):
        raise ValueError(
            f"{what} placements: expected one for each of the axes {tuple(axes)}, "
            f"found {len(placements)}: {tuple(placements)}"
        )
    for axis, placement in zip(axes, placements, strict=True):
        _check_placement(what, placement, axis)
    sharded = [is_sharded(placement) for placement in placements]
    for number, axis in enumerate(axes):
        if sharded[number] and not all(sharded[number:]):
            raise ValueError(
                f"{what} placements {tuple(placements)}: axis {axis!r} is sharded but an axis "
                f"inside it is not. Shard axes must be a suffix of {tuple(axes)}, or a rank's "
                "part of a buffer is not contiguous; shard the inner axes first"
            )


def _check_placement(what: str, placement: Placement, axis: object) -> None:
    if not isinstance(placement, Placement):
        raise TypeError(
            f"{what} placement of axis {axis!r}: expected a torch.distributed.tensor Placement, "
            f"found {placement!r}"
        )
    if isinstance(placement, Shard):
        if placement.dim != 0:
            raise ValueError(
                f"{what} placement of axis {axis!r}: expected Shard(0), found {placement}. "
                "Flat buffers are cut along dim 0 only; use Shard(0)"
            )
    elif not (isinstance(placement, Replicate) or is_average(placement)):
        raise ValueError(
            f"{what} placement of axis {axis!r}: expected Replicate(), Shard(0) or "
            f'Partial("avg"), found {placement}'
        )


def segment_number(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of the segment of the rank at ``coordinate`` on shard axes of ``sizes`` ranks.

    Both list the outermost axis first. The innermost is the most significant digit, so the
    segments of one inner rank are adjacent and undoing the outer axes yields one contiguous
    piece:

        segment           0      1      2      3        sizes (outer 2, inner 2)
        (outer, inner)  (0,0)  (1,0)  (0,1)  (1,1)
    """
    number = 0
    for index, size in zip(reversed(coordinate), reversed(sizes), strict=True):
        number = number * size + index
    return number


@dataclass(frozen=True)
class ShardAxes:
    """The axes of a mesh that placements shard, and this rank's segment on them.

    Attributes:
        axes: Numbers of the mesh axes, outermost first.
        sizes: Ranks on each of them.
        coordinate: This rank's index on each of them.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardAxes:
        """The shard axes of ``placements``, one of which there is for each axis of ``mesh``."""
        axes = tuple(axis for axis, placement in enumerate(placements) if is_sharded(placement))
        return cls(
            axes,
            tuple(int(mesh.size(axis)) for axis in axes),
            tuple(int(mesh.get_local_rank(axis)) for axis in axes),
        )

    @property
    def num_shards(self) -> int:
        """Number of segments: the product of the sizes."""
        return math.prod(self.sizes)

    @property
    def segment(self) -> int:
        """This rank's segment number."""
        return self.number_of(self.coordinate)

    def number_of(self, coordinate: Sequence[int]) -> int:
        """The segment number of the rank at ``coordinate``."""
        return segment_number(coordinate, self.sizes)

    def segments_along(self, axis: int) -> list[int]:
        """Segment numbers of the ranks that differ from this one on mesh axis ``axis`` only."""
        position = self.axes.index(axis)
        coordinate = list(self.coordinate)
        numbers = []
        for index in range(self.sizes[position]):
            coordinate[position] = index
            numbers.append(self.number_of(coordinate))
        return numbers


@dataclass(frozen=True)
class Placements:
    """What a parameter group shards over each data-parallel axis.

    Attributes:
        dp_axes: Axes of the mesh, as names or numbers (negative counts from the end), distinct
            and in mesh order.
        parameter: Placements of the model weight: ``Replicate()`` or ``Shard(0)``.
        gradient: Placements of the main gradient: ``Partial("avg")`` or ``Shard(0)``.
        optimizer: Placements of the main weight: ``Replicate()`` or ``Shard(0)``.

    Raises:
        TypeError: An axis is neither a name nor a number; an entry is not a ``Placement``.
        ValueError: The combination is illegal; the message says why.
    """

    dp_axes: tuple[str | int, ...]
    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for field in ("dp_axes", "parameter", "gradient", "optimizer"):
            object.__setattr__(self, field, _as_tuple(field, getattr(self, field)))
        self._check_axes()
        check_placements("parameter", self.parameter, self.dp_axes)
        check_placements("gradient", self.gradient, self.dp_axes)
        check_placements("optimizer", self.optimizer, self.dp_axes)
        for number, axis in enumerate(self.dp_axes):
            self._check_axis_modes(number, axis)
        if isinstance(self.shard, TensorAtomic) and len(self.dp_axes) != 1:
            raise ValueError(
                "TensorAtomic needs exactly one data-parallel axis (an owner is a rank of that "
                f"axis), found {self.dp_axes}"
            )

    def _check_axes(self) -> None:
        if not self.dp_axes:
            raise ValueError("dp_axes: expected at least one mesh axis, found none")
        for axis in self.dp_axes:
            if isinstance(axis, bool) or not isinstance(axis, (str, int)):
                raise TypeError(f"dp_axes: expected axis names or numbers, found {axis!r}")
        if len(set(self.dp_axes)) != len(self.dp_axes):
            raise ValueError(f"dp_axes: expected distinct axes, found {self.dp_axes}")

    def _check_axis_modes(self, number: int, axis: str | int) -> None:
        parameter, gradient = self.parameter[number], self.gradient[number]
        optimizer = self.optimizer[number]
        for what, placement in (("parameter", parameter), ("optimizer", optimizer)):
            if isinstance(placement, Partial):
                raise ValueError(
                    f"{what} placement of axis {axis!r}: expected Replicate() or Shard(0), "
                    f"found {placement}; only gradients are partial"
                )
        if isinstance(gradient, Replicate):
            raise ValueError(
                f'gradient placement of axis {axis!r}: expected Partial("avg") or Shard(0), '
                f'found {gradient}. Use Partial("avg"): it is reduced on the last microbatch'
            )
        for what, placement in (("parameter", parameter), ("gradient", gradient)):
            if is_sharded(placement) and not is_sharded(optimizer):
                raise ValueError(
                    f"optimizer placement of axis {axis!r} is {optimizer} but the {what} "
                    f"placement is {placement}: the optimizer must not be less sharded than the "
                    f"{what}, or a step would have to gather. Shard the optimizer on {axis!r}"
                )

    @property
    def shard(self) -> Shard | None:
        """The strictest promise of the three tuples; None when nothing is sharded (DDP)."""
        return strictest_shard((*self.parameter, *self.gradient, *self.optimizer))

    def resolve(self, mesh: DeviceMesh) -> Placements:
        """The same placements with axes as non-negative numbers of ``mesh``.

        Raises:
            ValueError: An axis is not one of the mesh's; two name the same axis; the axes are
                not in mesh order.
        """
        axes = tuple(_axis_number(axis, mesh) for axis in self.dp_axes)
        if len(set(axes)) != len(axes):
            raise ValueError(f"dp_axes {self.dp_axes} name one mesh axis twice: {axes}")
        if list(axes) != sorted(axes):
            raise ValueError(
                f"dp_axes {self.dp_axes}: expected mesh order {_describe(mesh)}, found axis "
                f"numbers {axes}; list the axes (and their placements) outermost first"
            )
        return Placements(axes, self.parameter, self.gradient, self.optimizer)

    @classmethod
    def ddp(cls, mesh: DeviceMesh) -> Placements:
        """Nothing sharded: all-reduce of the gradients on the last microbatch. 1-D mesh."""
        return cls._of(mesh, "ddp", [Replicate()], [Partial("avg")], [Replicate()])

    @classmethod
    def zero1(cls, mesh: DeviceMesh) -> Placements:
        """Optimizer state sharded. 1-D mesh."""
        return cls._of(mesh, "zero1", [Replicate()], [Partial("avg")], [Shard(0)])

    @classmethod
    def zero2(cls, mesh: DeviceMesh) -> Placements:
        """Optimizer state and gradients sharded. 1-D mesh."""
        return cls._of(mesh, "zero2", [Replicate()], [Shard(0)], [Shard(0)])

    @classmethod
    def zero3(cls, mesh: DeviceMesh) -> Placements:
        """Everything sharded. 1-D mesh."""
        return cls._of(mesh, "zero3", [Shard(0)], [Shard(0)], [Shard(0)])

    @classmethod
    def hsdp(cls, mesh: DeviceMesh) -> Placements:
        """ZeRO-3 on the inner axis, replicas over the outer. 2-D mesh (dp_outer, dp_inner)."""
        replicated: list[Placement] = [Replicate(), Shard(0)]
        return cls._of(mesh, "hsdp", replicated, [Partial("avg"), Shard(0)], replicated)

    @classmethod
    def hfsdp(cls, mesh: DeviceMesh) -> Placements:
        """HSDP with the optimizer also sharded over the outer axis. 2-D mesh."""
        gradient = [Partial("avg"), Shard(0)]
        return cls._of(mesh, "hfsdp", [Replicate(), Shard(0)], gradient, [Shard(0), Shard(0)])

    @classmethod
    def _of(
        cls,
        mesh: DeviceMesh,
        mode: str,
        parameter: Sequence[Placement],
        gradient: Sequence[Placement],
        optimizer: Sequence[Placement],
    ) -> Placements:
        if mesh.ndim != len(parameter):
            raise ValueError(
                f"Placements.{mode}(mesh): expected a {len(parameter)}-D mesh, found "
                f"{mesh.ndim}-D {_describe(mesh)}; pass the data-parallel submesh, such as "
                "mesh['dp'], or build Placements(dp_axes, ...) by hand"
            )
        return cls(axis_names(mesh), tuple(parameter), tuple(gradient), tuple(optimizer))


def _as_tuple(field: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"{field}: expected a sequence with one entry per axis, found {value!r}; "
            f"write ({value!r},)"
        )
    return tuple(value)


def _axis_number(axis: str | int, mesh: DeviceMesh) -> int:
    if isinstance(axis, str):
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(f"dp_axes: mesh {_describe(mesh)} has no axis named {axis!r}")
        return names.index(axis)
    if not -mesh.ndim <= axis < mesh.ndim:
        raise ValueError(
            f"dp_axes: axis {axis} is out of range for the {mesh.ndim}-D mesh {_describe(mesh)}"
        )
    return axis % mesh.ndim


def axis_names(mesh: DeviceMesh) -> tuple[str | int, ...]:
    """The names of a mesh's axes, or their numbers when they have none."""
    return tuple(mesh.mesh_dim_names or range(mesh.ndim))


def _describe(mesh: DeviceMesh) -> str:
    sizes = (mesh.size(axis) for axis in range(mesh.ndim))
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(axis_names(mesh), sizes, strict=True)) + ")"
