"""QuantizedDBuffer: several matrices in MXFP8, in flat buffers distributed over a mesh.

A matrix is held twice, quantised along its rows and along its columns (see
`compile_fsdp.runtime.mxfp8`), each time as data and scales. These are four planes of bytes; each
is a `DBuffer`, and a rank holds the same blocks of 32 rows in all of them. Two matrices, A (96, 64)
and B (64, 32), on two ranks, in bytes:

                  rank 0              rank 1
    data          | A rows 0..63      | A rows 64..95    | B         |      rowwise, columnwise
                  0                   4096               6144        8192
    scales        | A rows 0..63      | A rows 64..95    | B         |      rowwise, columnwise
                  0                   128                192         256

Scales lie as data do, at 1/32 of the offsets. So the layout of the data says all: it is one in
which tensors and segments start at multiples of 32 elements, and no 32 rows are cut. A matrix
product of a forward sums over columns and needs the rowwise planes, one of a backward the
columnwise ones: either can be moved without the other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Shard

from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.layout import GlobalLayout, make_layout
from compile_fsdp.runtime.mxfp8 import (
    BLOCK,
    DATA_DTYPE,
    SCALE_DTYPE,
    check_eligible,
    dequantize,
    quantize,
)
from compile_fsdp.runtime.placement import (
    BlockAtomic,
    ShardLayout,
    axis_names,
    is_average,
    strictest_shard,
)
from compile_fsdp.runtime.streams import Lane

__all__ = ["QuantizedDBuffer", "quantized_layout"]


def quantized_layout(
    tensor_shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    shard: Shard | None = None,
    shard_layout: ShardLayout = ShardLayout.PADDED,
    owners: Sequence[int] | None = None,
    alignment: int = 1,
) -> GlobalLayout:
    """A layout for the data planes, and for the main weight that is quantised into them.

    Args:
        tensor_shapes: 2-D, both dims a multiple of 32.
        num_shards, shard, shard_layout, owners: As for `compile_fsdp.runtime.layout.make_layout`;
            on top of what ``shard`` promises, 32 rows together are never split.
        alignment: In bytes, of tensors and segments in every plane.

    Raises:
        ValueError: A shape is another one; an argument is out of range.
    """
    _check_shapes(tensor_shapes)
    promises = [BlockAtomic(BLOCK), *([shard] if shard else [])]
    return make_layout(
        tensor_shapes,
        num_shards,
        shard=strictest_shard(promises),
        shard_layout=shard_layout,
        owners=owners,
        alignment=BLOCK * alignment,
    )


class QuantizedDBuffer:
    """Matrices in MXFP8, of which this rank holds the same rows in each plane.

    Args:
        mesh: The ranks that share the buffer. This rank must be one of them.
        placements: For each mesh axis ``Replicate()`` or ``Shard(0)`` (or one of its promises in
            `compile_fsdp.runtime.placement`); shard axes are a suffix.
        tensor_shapes: Full shapes: 2-D, both dims a multiple of 32.
        device: Defaults to the mesh's device type; ``"meta"`` is legal.
        layout: Of the data planes, to share with a main weight; see `quantized_layout`. The
            default has a segment for each rank of the mesh.
        shard_layout, alignment: For the default layout, as for `quantized_layout`.
        rowwise, columnwise: Which planes there are; at least one of the two pairs.
        local: 1-D ``uint8`` storage for this rank's part of each plane, in the order of
            `planes_for`; by default new, uninitialised memory.

    Attributes:
        layout: Of the data planes. A scale plane's is the same at 1/32 of the offsets.

    Raises:
        TypeError, ValueError: The arguments do not fit one another, or a rank would not hold
            whole blocks of 32 rows.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_shapes: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        *,
        layout: GlobalLayout | None = None,
        shard_layout: ShardLayout = ShardLayout.PADDED,
        alignment: int = 1,
        rowwise: bool = True,
        columnwise: bool = True,
        local: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = tuple(placements)
        self.tensor_shapes = tuple(tuple(shape) for shape in tensor_shapes)
        _check_shapes(self.tensor_shapes)
        _check_placements(mesh, self.placements)
        self.layout = layout or quantized_layout(
            self.tensor_shapes,
            int(mesh.size()),
            shard=strictest_shard(self.placements),
            shard_layout=shard_layout,
            alignment=alignment,
        )
        if self.layout.tensor_shapes != self.tensor_shapes:
            raise ValueError(
                f"layout: expected shapes {self.tensor_shapes}, found {self.layout.tensor_shapes}"
            )
        _check_blocks(self.layout)
        pairs = [pair for pair, wanted in ((False, rowwise), (True, columnwise)) if wanted]
        if not pairs:
            raise ValueError("QuantizedDBuffer: expected rowwise or columnwise planes, found none")
        locals_ = [None] * (2 * len(pairs)) if local is None else list(local)
        if len(locals_) != 2 * len(pairs):
            raise ValueError(
                f"local: expected a tensor for each of {2 * len(pairs)} planes, found "
                f"{len(locals_)}"
            )
        # Data and scales, by whether they are columnwise.
        self._planes: dict[bool, tuple[DBuffer, DBuffer]] = {}
        for number, pair in enumerate(pairs):
            data, scales = locals_[2 * number : 2 * number + 2]
            self._planes[pair] = (
                self._plane(self.layout, device, data),
                self._plane(_scale_layout(self.layout, columnwise=pair), device, scales),
            )

    def _plane(
        self, layout: GlobalLayout, device: torch.device | str | None, local: torch.Tensor | None
    ) -> DBuffer:
        shapes = layout.tensor_shapes
        return DBuffer(
            self.mesh, self.placements, shapes, torch.uint8, device, layout=layout, local=local
        )

    # Planes ------------------------------------------------------------------------------------

    @property
    def has_rowwise(self) -> bool:
        """Whether there are rowwise planes, with memory or without."""
        return False in self._planes

    @property
    def has_columnwise(self) -> bool:
        """Whether there are columnwise planes, with memory or without."""
        return True in self._planes

    @property
    def device(self) -> torch.device:
        """Where the planes live."""
        return next(iter(self._planes.values()))[0].device

    def planes_for(self, *, rowwise: bool, columnwise: bool) -> tuple[DBuffer, ...]:
        """The planes asked for, of ``uint8``: rowwise data and scales, then columnwise ones.

        Raises:
            ValueError: None are asked for, or some that the buffer was made without.
        """
        if not (rowwise or columnwise):
            raise ValueError("expected rowwise=True or columnwise=True, or both; found neither")
        planes: list[DBuffer] = []
        for pair, wanted in ((False, rowwise), (True, columnwise)):
            if wanted:
                planes += self._pair(pair)
        return tuple(planes)

    def get_local_data(self, index: int, *, columnwise: bool = False) -> torch.Tensor:
        """This rank's rows of matrix ``index`` as ``float8_e4m3fn``, ``(n_rows, cols)``.

        Aliases the plane; ``n_rows`` is a multiple of 32, possibly 0.
        """
        return self._pair(columnwise)[0].get_local_tensor(index).view(DATA_DTYPE)

    def get_local_scales(self, index: int, *, columnwise: bool = False) -> torch.Tensor:
        """The scales of `get_local_data` as ``float8_e8m0fnu``, aliasing the plane.

        ``(n_rows, cols / 32)``, or columnwise ``(n_rows / 32, cols)``.
        """
        return self._pair(columnwise)[1].get_local_tensor(index).view(SCALE_DTYPE)

    def _pair(self, columnwise: bool) -> tuple[DBuffer, DBuffer]:
        pair = self._planes.get(columnwise)
        if pair is None:
            raise ValueError(f"{self!r} has no {_name(columnwise)} planes")
        return pair

    # Values ------------------------------------------------------------------------------------

    def quantize_(self, main_weight: DBuffer) -> QuantizedDBuffer:
        """Quantise ``main_weight`` into every plane, each rank its own rows. No communication.

        Args:
            main_weight: fp32, bf16 or fp16, of this buffer's mesh and layout, and at its
                placements or wider ones.

        Returns:
            This buffer.

        Raises:
            TypeError: ``main_weight`` has another dtype.
            ValueError: It has another mesh or layout, its values await a reduction, or this rank
                does not hold all of the rows.
            RuntimeError: A plane has no memory.
        """
        self._check_source(main_weight)
        if main_weight.placements != self.placements:
            main_weight = main_weight.view(self.placements)
        for columnwise, planes in self._planes.items():
            self._check_memory("quantize_", columnwise)
            for index in range(len(self.tensor_shapes)):
                rows = main_weight.get_local_tensor(index)
                quantized = quantize(rows, columnwise=columnwise)
                for plane, values in zip(planes, quantized, strict=True):
                    plane.get_local_tensor(index).copy_(values.view(torch.uint8))
        return self

    def dequantize(
        self, index: int, *, columnwise: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The values of this rank's rows of matrix ``index``, ``(n_rows, cols)``, in new memory.

        Raises:
            RuntimeError: The planes have no memory.
        """
        self._check_memory("dequantize", columnwise)
        data = self.get_local_data(index, columnwise=columnwise)
        scales = self.get_local_scales(index, columnwise=columnwise)
        return dequantize(data, scales, columnwise=columnwise, dtype=dtype)

    # Placements --------------------------------------------------------------------------------

    def view(self, placements: Sequence[Placement]) -> QuantizedDBuffer:
        """The part of this buffer that ``placements`` give this rank, aliasing its storage.

        Raises:
            ValueError: ``placements`` need data that this rank does not hold.
        """
        which = {"rowwise": self.has_rowwise, "columnwise": self.has_columnwise}
        return self._over([plane.view(placements) for plane in self.planes_for(**which)], **which)

    def redistribute(
        self,
        new_placements: Sequence[Placement],
        out: QuantizedDBuffer | None = None,
        *,
        rowwise: bool,
        columnwise: bool,
        lane: Lane | None = None,
        depends: bool = False,
        label: str = "",
    ) -> QuantizedDBuffer:
        """Change the placement of one axis, plane by plane; see `DBuffer.redistribute`.

        Args:
            new_placements: As for `DBuffer.redistribute`; nothing here is ``Partial``.
            out: Where to put the result. Its planes that were not asked for stay as they are.
            rowwise, columnwise: Which planes to move.
            lane, depends, label: As for `DBuffer.redistribute`.

        Returns:
            ``out``, or a buffer that has the planes asked for and no others.

        Raises:
            ValueError: As for `DBuffer.redistribute`; this buffer or ``out`` was made without
                some of the planes.
        """
        planes = self.planes_for(rowwise=rowwise, columnwise=columnwise)
        targets: Sequence[DBuffer | None] = [None] * len(planes)
        if out is not None:
            targets = out.planes_for(rowwise=rowwise, columnwise=columnwise)
        _check_placements(self.mesh, new_placements)
        moved = [
            plane.redistribute(
                new_placements,
                target,
                lane=lane,
                # What is on the lane before the first plane is before the others as well.
                depends=depends and number == 0,
                label=label,
            )
            for number, (plane, target) in enumerate(zip(planes, targets, strict=True))
        ]
        return self._over(moved, rowwise=rowwise, columnwise=columnwise) if out is None else out

    def _over(
        self, planes: Sequence[DBuffer], *, rowwise: bool, columnwise: bool
    ) -> QuantizedDBuffer:
        """A buffer like this one over other planes of its layouts."""
        return QuantizedDBuffer(
            self.mesh,
            planes[0].placements,
            self.tensor_shapes,
            layout=self.layout,
            rowwise=rowwise,
            columnwise=columnwise,
            local=[plane.local for plane in planes],
        )

    # Storage -----------------------------------------------------------------------------------

    @property
    def is_rowwise_unsharded(self) -> bool:
        """Whether this rank has all rows in the rowwise planes: unsharded, and with memory."""
        return self._is_unsharded(columnwise=False)

    @property
    def is_columnwise_unsharded(self) -> bool:
        """Whether this rank has all rows in the columnwise planes: unsharded, and with memory."""
        return self._is_unsharded(columnwise=True)

    def _is_unsharded(self, *, columnwise: bool) -> bool:
        planes = self._planes.get(columnwise, ())
        return bool(planes) and all(
            plane.has_storage and not plane.shard_axes.axes for plane in planes
        )

    def release_storage(self, lane: Lane | None = None, *, rowwise: bool, columnwise: bool) -> None:
        """Free the memory of some planes, keeping them and every view of them.

        Args:
            lane: Whose memory it is; None: the current stream's.
            rowwise, columnwise: Of which planes.

        Raises:
            RuntimeError: A plane is a part of another buffer's storage.
            ValueError: The buffer was made without some of them.
        """
        for plane in self.planes_for(rowwise=rowwise, columnwise=columnwise):
            plane.release_storage(lane)

    def reallocate_storage(
        self, lane: Lane | None = None, label: str = "", *, rowwise: bool, columnwise: bool
    ) -> None:
        """Give some planes and their views uninitialised memory again; nothing if they have it.

        ``label`` says what it is for; the rest is as for `release_storage`.
        """
        for plane in self.planes_for(rowwise=rowwise, columnwise=columnwise):
            plane.reallocate_storage(lane, label)

    def __repr__(self) -> str:
        kinds = " and ".join(map(_name, self._planes))
        return (
            f"QuantizedDBuffer({len(self.tensor_shapes)} tensors, {self.placements}, {kinds}, "
            f"of {self.layout.size} elements on {self.device})"
        )

    # Checks ------------------------------------------------------------------------------------

    def _check_source(self, main_weight: DBuffer) -> None:
        for what, expected, found in (
            ("mesh", self.mesh, main_weight.mesh),
            ("layout", self.layout, main_weight.layout),
        ):
            if expected != found:
                raise ValueError(
                    f"quantize_: the main weight must agree with the buffer in {what}: expected "
                    f"{expected}, found {found}; make both with one quantized_layout()"
                )
        for axis, placement in zip(axis_names(self.mesh), main_weight.placements, strict=True):
            if is_average(placement):
                raise ValueError(
                    f"quantize_: the main weight is {placement} on axis {axis!r}, so its values "
                    "await a reduction; redistribute() it first"
                )

    def _check_memory(self, what: str, columnwise: bool) -> None:
        if not all(plane.has_storage for plane in self._pair(columnwise)):
            raise RuntimeError(
                f"{what}: the {_name(columnwise)} planes of {self!r} have been released; call "
                "reallocate_storage(), and fill them, first"
            )


def _name(columnwise: bool) -> str:
    return "columnwise" if columnwise else "rowwise"


def _scale_layout(layout: GlobalLayout, *, columnwise: bool) -> GlobalLayout:
    """Where the scales of data with ``layout`` lie."""
    rows, cols = (BLOCK, 1) if columnwise else (1, BLOCK)
    return GlobalLayout(
        tuple((shape[0] // rows, shape[1] // cols) for shape in layout.tensor_shapes),
        tuple(offset // BLOCK for offset in layout.tensor_to_offset),
        layout.size // BLOCK,
        tuple(start // BLOCK for start in layout.rank_to_offset),
    )


def _check_shapes(tensor_shapes: Sequence[Sequence[int]]) -> None:
    for index, shape in enumerate(tensor_shapes):
        check_eligible(f"tensor {index}", shape)


def _check_placements(mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """What is legal for a quantised buffer on top of `check_placements`, which its planes call."""
    for axis, placement in zip(axis_names(mesh), placements, strict=False):
        if isinstance(placement, Partial):
            raise ValueError(
                f"QuantizedDBuffer placement of axis {axis!r}: expected Replicate() or Shard(0), "
                f"found {placement}; quantised values cannot be added up"
            )


def _check_blocks(layout: GlobalLayout) -> None:
    """Check that scales lie at 1/32 of the data's offsets, and that no cut parts 32 rows."""
    way_out = "make it with quantized_layout(), or for BlockAtomic(32) placements"
    for what, places in (
        ("a tensor starts", layout.tensor_to_offset),
        ("a segment starts", layout.rank_to_offset),
        ("the buffer ends", (layout.size,)),
    ):
        for place in places:
            if place % BLOCK:
                raise ValueError(
                    f"layout: {what} at element {place}, which is no multiple of {BLOCK}, so its "
                    f"scales have no place; {way_out}"
                )
    starts = layout.rank_to_offset
    for index, shape in enumerate(layout.tensor_shapes):
        offset, numel = layout.tensor_to_offset[index], layout.numels[index]
        for segment in range(bisect_right(starts, offset), bisect_left(starts, offset + numel)):
            block, rest = divmod(starts[segment] - offset, BLOCK * shape[1])
            if rest:
                raise ValueError(
                    f"layout: segment {segment} starts within rows {block * BLOCK}.."
                    f"{block * BLOCK + BLOCK - 1} of tensor {index} of shape {shape}, but MXFP8 "
                    f"needs blocks of {BLOCK} rows whole on a rank; {way_out}"
                )
