"""DBuffer: several logical tensors in one flat buffer, distributed over a mesh.

One layout places all tensors in a global flat buffer and cuts it into segments. A placement
for each mesh axis says what a rank holds of it. On a mesh (outer=2, inner=2), layout of 4:

    placements            rank (outer, inner)
                          (0,0)      (1,0)      (0,1)      (1,1)
    Replicate, Replicate  |0 1 2 3|  |0 1 2 3|  |0 1 2 3|  |0 1 2 3|    every segment
    Replicate, Shard      |0 1|      |0 1|      |2 3|      |2 3|
    Shard, Shard          |0|        |1|        |2|        |3|          one segment
    Partial, Shard        |0 1|      |0 1|      |2 3|      |2 3|        average over outer is due

``Partial("avg")`` is held like ``Replicate()``, but the value is the average over the axis. A
rank's part is always one contiguous piece, so collectives run on it without copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.dlpack import from_dlpack

from compile_fsdp.runtime.geometry import Geometry
from compile_fsdp.runtime.layout import GlobalLayout, make_layout
from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.placement import (
    ShardAxes,
    ShardLayout,
    axis_names,
    check_placements,
    is_sharded,
    strictest_shard,
)
from compile_fsdp.runtime.redistribute import redistribute
from compile_fsdp.runtime.streams import Lane

__all__ = ["DBuffer"]


class DBuffer:
    """Logical tensors in one flat buffer, of which this rank holds ``local``.

    Padding between tensors has no defined value; nothing given out contains any.

    Args:
        mesh: The ranks that share the buffer. This rank must be one of them.
        placements: For each mesh axis ``Replicate()``, ``Shard(0)`` (or one of its promises in
            `compile_fsdp.runtime.placement`) or ``Partial("avg")``; shard axes are a suffix.
        tensor_shapes: Full shapes of the tensors.
        dtype: Of all tensors.
        device: Defaults to the mesh's device type; ``"meta"`` is legal.
        layout: A layout to share with other buffers. Its segment count must be a multiple of this
            buffer's (the product of its shard axes' sizes). The default has a segment for each
            rank of the mesh, so that every redistribution is possible.
        shard_layout: For the default layout.
        alignment: For the default layout, in elements.
        local: 1-D storage for this rank's part; by default new, uninitialised memory.

    Raises:
        TypeError, ValueError: The arguments do not fit one another.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        layout: GlobalLayout | None = None,
        shard_layout: ShardLayout = ShardLayout.PADDED,
        alignment: int = 1,
        local: torch.Tensor | None = None,
    ) -> None:
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = tuple(placements)
        self.tensor_shapes = tuple(tuple(shape) for shape in tensor_shapes)
        self.dtype = dtype
        check_placements("buffer", self.placements, axis_names(mesh))
        self.layout = layout or make_layout(
            self.tensor_shapes,
            int(mesh.size()),
            shard=strictest_shard(self.placements),
            shard_layout=shard_layout,
            alignment=alignment,
        )
        self._check_shapes()
        self._geometry = Geometry(mesh, self.placements, self.layout)
        self.device = _device(mesh, device, local)
        self.local = self._new_local() if local is None else self._checked(local)

    @property
    def shard_axes(self) -> ShardAxes:
        """The mesh axes that cut the buffer, and this rank's place on them."""
        return self._geometry.shard_axes

    @property
    def segment(self) -> tuple[int, int]:
        """``(start, stop)`` of ``local`` in the global flat buffer, in elements."""
        return self._geometry.segment

    @classmethod
    def from_local(
        cls,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_shapes: Sequence[Sequence[int]],
        *,
        layout: GlobalLayout | None = None,
        shard_layout: ShardLayout = ShardLayout.PADDED,
        alignment: int = 1,
    ) -> DBuffer:
        """A buffer over ``local``, this rank's part (1-D, aliased). No communication."""
        return cls(
            mesh,
            placements,
            tensor_shapes,
            local.dtype,
            layout=layout,
            shard_layout=shard_layout,
            alignment=alignment,
            local=local,
        )

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: GlobalLayout | None = None,
        shard_layout: ShardLayout = ShardLayout.PADDED,
        alignment: int = 1,
    ) -> DBuffer:
        """A buffer that holds this rank's part of full ``tensors``. No communication.

        Args:
            tensors: Full tensors, equal on every rank. A meta tensor gives its shape only: its
                part of the buffer is left uninitialised.
            dtype: Defaults to the tensors' common one.

        Raises:
            ValueError: No ``dtype`` is given and the tensors have several, or there are none.
        """
        dtypes = {tensor.dtype for tensor in tensors} if dtype is None else {dtype}
        if len(dtypes) != 1:
            found = sorted(map(str, dtypes))
            raise ValueError(
                f"distribute_tensors: expected tensors of one dtype, found {found}; pass dtype= to "
                "convert them"
            )
        buffer = cls(
            mesh,
            placements,
            [tuple(tensor.shape) for tensor in tensors],
            dtypes.pop(),
            device,
            layout=layout,
            shard_layout=shard_layout,
            alignment=alignment,
        )
        with without_autograd():
            for index, tensor in enumerate(tensors):
                if not tensor.is_meta:
                    piece = buffer.get_local_tensor(index)
                    piece.copy_(buffer.part_of(index, tensor).view(piece.shape))
        return buffer

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """What this rank holds of ``full``, a full value of tensor ``index``; 1-D, no copy where
        ``full`` is contiguous."""
        first, last = self._geometry.elements(index)
        return full.detach().reshape(-1)[first:last]

    def cast(self, dtype: torch.dtype) -> DBuffer:
        """A copy in ``dtype``; this very buffer when it has that dtype already."""
        if dtype == self.dtype:
            return self
        with without_autograd():
            local = self.local.to(dtype)
        return self.like(self.placements, local)

    def view(self, placements: Sequence[Placement]) -> DBuffer:
        """The part of this buffer that ``placements`` give this rank, aliasing its storage.

        Each axis is the same, or is sharded where it was not. Of a ``Partial`` axis the shard is
        a view of the storage: this rank's own contribution, until a reduction writes the sum.

        Raises:
            ValueError: ``placements`` need data that this rank does not hold.
        """
        geometry = self._geometry.at(placements)
        for axis, (old, new) in enumerate(zip(self.placements, placements, strict=True)):
            if old != new and not is_sharded(new):
                raise ValueError(
                    f"view of axis {axis_names(self.mesh)[axis]!r} as {new}: it is {old}, and a "
                    "view only narrows, to the same or a sharded placement; use redistribute()"
                )
        start, stop = geometry.segment
        with without_autograd():
            local = self.local[start - self.segment[0] : stop - self.segment[0]]
        return self.like(placements, local)

    def redistribute(
        self,
        new_placements: Sequence[Placement],
        out: DBuffer | None = None,
        *,
        lane: Lane | None = None,
        depends: bool = False,
        label: str = "",
    ) -> DBuffer:
        """Change the placement of one axis.

        shard -> Replicate is an all-gather, Partial -> Replicate an all-reduce, Partial -> shard
        a reduce-scatter, Replicate -> shard a local slice and Replicate -> Partial a relabelling.
        The last two alias this buffer when no ``out`` is given. With ``out``, which may be a view
        of this buffer or the reverse, data is moved in place where it can be.

        Args:
            new_placements: As `placements`, one axis changed (none: a copy, or this buffer).
            out: Where to put the result.
            lane: Where collectives and copies run; the result is valid after what the lane holds
                now. None: on a lane of its own, which the current stream waits for.
            depends: This buffer is written by something still on the lane.
            label: Name for `compile_fsdp.runtime.collectives.recorded`.

        Raises:
            ValueError: More than one axis changes; the change is not one of the above; ``out``
                differs in mesh, placements, layout, dtype or device.
        """
        return redistribute(self, tuple(new_placements), out, lane, depends=depends, label=label)

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """This rank's rows of tensor ``index``, aliasing ``local``.

        Shape ``(n_rows, *shape[1:])``, so ``(0, *shape[1:])`` when it has none; a 0-D tensor is
        0-D where it lives and ``(0,)`` elsewhere. In a ``Flat`` layout, which cuts rows, 1-D.
        """
        start, stop, shape = self._geometry.piece(index)
        return self.local[start:stop].view(shape)

    def get_local_tensors(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """`get_local_tensor` of each of ``indices``, in fewer calls where they are most tensors."""
        if 2 * len(indices) < len(self.tensor_shapes):
            return [self.get_local_tensor(index) for index in indices]
        pieces = self._geometry.pieces_of(self.local)
        return [pieces[index] for index in indices]

    def get_dtensor(self, index: int, *, own_storage: bool = False) -> DTensor:
        """A DTensor over `get_local_tensor`, of the full shape and these placements.

        A new object each time, aliasing ``local``; with ``own_storage`` by a storage that has
        nothing but these rows.

        Raises:
            ValueError: The layout cuts rows (``Flat``) and the buffer is sharded.
        """
        if not own_storage:
            return self.get_dtensors((index,))[0]
        with without_autograd():
            local = self.get_local_tensor(index)
            local = from_dlpack(local) if local.numel() else torch.empty_like(local)
            return self._geometry.dtensors((index,), [local], self.dtype)[0]

    def get_dtensors(self, indices: Sequence[int]) -> list[DTensor]:
        """`get_dtensor` of each of ``indices``."""
        with without_autograd():
            locals_ = self.get_local_tensors(indices)
            return self._geometry.dtensors(tuple(indices), locals_, self.dtype)

    def shard_tensor(self, index: int, full: torch.Tensor) -> DTensor:
        """``full``, a full value of tensor ``index``, as a DTensor distributed like this buffer.

        In this buffer's dtype and on its device, in new memory. No communication: every rank
        passes the same value.
        """
        with without_autograd():
            part = self.part_of(index, full).to(self.device, self.dtype, copy=True)
            local = part.view(self.get_local_tensor(index).shape)
            return self._geometry.dtensors((index,), [local], self.dtype)[0]

    @property
    def has_storage(self) -> bool:
        """Whether ``local`` has memory; an empty part always has."""
        return self.local.untyped_storage().nbytes() >= self._storage_bytes

    def release_storage(self, lane: Lane | None = None) -> None:
        """Free the memory of ``local``, keeping the tensor and every view of it.

        ``lane``: whose memory it is; None: the current stream's.

        Raises:
            RuntimeError: ``local`` is a part of another buffer's storage.
        """
        self._check_owns_storage("release")
        if lane is None:
            self.local.untyped_storage().resize_(0)
        else:
            lane.memory.shrink(self.local, lane=lane)

    def reallocate_storage(self, lane: Lane | None = None, label: str = "") -> None:
        """Give ``local`` and its views uninitialised memory again; nothing if they have it.

        ``lane``: whose memory it is, as of `release_storage`; ``label`` says what it is for.
        """
        if self.has_storage:
            return
        self._check_owns_storage("reallocate")
        size = self._storage_bytes
        if lane is None:
            self.local.untyped_storage().resize_(size)
        else:
            lane.memory.grow(self.local, size, owner=f"parameters of {label}", lane=lane)

    def __repr__(self) -> str:
        start, stop = self.segment
        return (
            f"DBuffer({len(self.tensor_shapes)} tensors, {self.placements}, {self.dtype}, "
            f"elements {start}..{stop} of {self.layout.size} on {self.device})"
        )

    # Others of the same kind.

    def changed_axes(self, placements: tuple[Placement, ...]) -> tuple[int, ...]:
        """The mesh axes on which ``placements`` differ from this buffer's, outermost first.

        Raises:
            TypeError, ValueError: A buffer like this one cannot have ``placements``.
        """
        return self._geometry.changed_axes(placements)

    def is_like(self, other: DBuffer, placements: tuple[Placement, ...]) -> bool:
        """Whether this is what ``other.like(placements)`` would be, as far as identities tell."""
        return (
            self.placements is placements
            and self.layout is other.layout
            and self.mesh is other.mesh
            and self.dtype is other.dtype
            and self.device == other.device
        )

    def local_numel(self, placements: Sequence[Placement]) -> int:
        """Elements that this rank would hold at ``placements``."""
        return self._geometry.at(placements).numel

    def segment_sizes(self, axis: int) -> list[int]:
        """Elements of the segments of the ranks along mesh ``axis``, in rank order."""
        return self._geometry.segment_sizes(axis)

    def like(self, placements: Sequence[Placement], local: torch.Tensor | None = None) -> DBuffer:
        """A buffer with this one's mesh, shapes, layout and device.

        Over ``local``, or else of this one's dtype over new, uninitialised memory.
        """
        buffer = DBuffer.__new__(type(self))
        buffer._geometry = self._geometry.at(placements)
        buffer.mesh, buffer.layout = self.mesh, self.layout
        buffer.placements = tuple(placements)
        buffer.tensor_shapes = self.tensor_shapes
        buffer.dtype = self.dtype if local is None else local.dtype
        buffer.device = self.device if local is None else local.device
        buffer.local = buffer._new_local() if local is None else buffer._checked(local)
        return buffer

    # Construction and checks.

    def _new_local(self) -> torch.Tensor:
        # A buffer made under inference mode could never be written by training.
        with without_autograd():
            return torch.empty(self._geometry.numel, dtype=self.dtype, device=self.device)

    def _checked(self, local: torch.Tensor) -> torch.Tensor:
        size = self._geometry.numel
        if local.ndim != 1 or not local.is_contiguous() or local.numel() != size:
            raise ValueError(
                f"local: expected a contiguous 1-D tensor of {size} elements, this rank's segment "
                f"{self.segment}, found shape {tuple(local.shape)} and strides {local.stride()}"
            )
        if local.dtype != self.dtype:
            raise ValueError(f"local: expected dtype {self.dtype}, found {local.dtype}")
        return local

    def _check_shapes(self) -> None:
        if self.layout.tensor_shapes != self.tensor_shapes:
            raise ValueError(
                f"layout: expected shapes {self.tensor_shapes}, found {self.layout.tensor_shapes}"
            )

    @property
    def _storage_bytes(self) -> int:
        stop = self.local.storage_offset() + self.local.numel()
        return int(stop) * self.local.element_size() if self.local.numel() else 0

    def _check_owns_storage(self, what: str) -> None:
        own = self._storage_bytes
        if self.local.storage_offset() or self.local.untyped_storage().nbytes() > own:
            raise RuntimeError(
                f"cannot {what} the storage of {self!r}: it is a part of a larger buffer; "
                f"{what} that one"
            )


def _device(
    mesh: DeviceMesh, device: torch.device | str | None, local: torch.Tensor | None
) -> torch.device:
    if local is not None:
        return local.device
    device = torch.device(mesh.device_type if device is None else device)
    # "cuda" means the current device: buffers are compared by device.
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
