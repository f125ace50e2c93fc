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

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.dtensor import make_dtensor, segment_number
from compile_fsdp.runtime.layout import GlobalLayout, make_layout
from compile_fsdp.runtime.placement import (
    Flat,
    ShardLayout,
    check_placements,
    is_sharded,
    strictest_shard,
)
from compile_fsdp.runtime.streams import Lane, make_lane

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
        layout: A layout to share with other buffers. Its shard count must be a multiple of this
            buffer's (the product of its shard axes' sizes), to which the default is equal.
        shard_layout: For the default layout.
        alignment: For the default layout, in elements.
        local: 1-D storage for this rank's part; by default new, uninitialised memory.

    Attributes:
        segment: ``(start, stop)`` of ``local`` in the global flat buffer, in elements.

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
        axes = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        check_placements("buffer", self.placements, axes)
        self._shard_axes = [axis for axis, each in enumerate(self.placements) if is_sharded(each)]
        self.layout = layout or make_layout(
            self.tensor_shapes,
            self._num_shards,
            shard=strictest_shard(self.placements),
            shard_layout=shard_layout,
            alignment=alignment,
        )
        self._check_layout()
        self.segment = self.layout.segment(self._shard_number, self._num_shards)
        self.device = _device(mesh, device, local)
        self.local = self._new_local() if local is None else self._checked(local)

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
        with torch.inference_mode(False), torch.no_grad():
            for index, tensor in enumerate(tensors):
                if not tensor.is_meta:
                    first, last = buffer._elements(index)
                    full = tensor.detach().reshape(-1)
                    buffer._local_elements(index).copy_(full[first:last])
        return buffer

    def cast(self, dtype: torch.dtype) -> DBuffer:
        """A copy in ``dtype``; this very buffer when it has that dtype already."""
        if dtype == self.dtype:
            return self
        with torch.inference_mode(False), torch.no_grad():
            local = self.local.to(dtype)
        return self._like(self.placements, local)

    def view(self, placements: Sequence[Placement]) -> DBuffer:
        """The part of this buffer that ``placements`` give this rank, aliasing its storage.

        Each axis is the same, or is sharded where it was not. Of a ``Partial`` axis the shard is
        a view of the storage: this rank's own contribution, until a reduction writes the sum.

        Raises:
            ValueError: ``placements`` need data that this rank does not hold.
        """
        result = self._like(placements, local=None, allocate=False)
        for axis, (old, new) in enumerate(zip(self.placements, result.placements, strict=True)):
            if old != new and not is_sharded(new):
                raise ValueError(
                    f"view of axis {self._axis_name(axis)} as {new}: it is {old}, and a view "
                    "only narrows (to the same or a sharded placement); use redistribute()"
                )
        start = result.segment[0] - self.segment[0]
        with torch.inference_mode(False), torch.no_grad():
            local = self.local[start : start + result.segment[1] - result.segment[0]]
        return self._like(placements, local)

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
        new_placements = tuple(new_placements)
        check_placements("buffer", new_placements, range(self.mesh.ndim))
        changed = [
            axis
            for axis, (old, new) in enumerate(zip(self.placements, new_placements, strict=True))
            if old != new
        ]
        if len(changed) > 1:
            names = [self._axis_name(axis) for axis in changed]
            raise ValueError(
                f"redistribute {self.placements} to {new_placements}: one axis changes per call, "
                f"found {names}; call redistribute() once for each"
            )
        if out is not None:
            self._check_out(out, new_placements)
        own_lane = make_lane(self.device, "redistribute") if lane is None else lane
        if lane is None:
            own_lane.wait_current()
        result = self._move(changed, new_placements, out, own_lane, depends, label)
        if lane is None:
            own_lane.synchronize()
        return result

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """This rank's rows of tensor ``index``, aliasing ``local``.

        Shape ``(n_rows, *shape[1:])``, so ``(0, *shape[1:])`` when it has none; a 0-D tensor is
        0-D where it lives and ``(0,)`` elsewhere. In a ``Flat`` layout, which cuts rows, 1-D.
        """
        piece = self._local_elements(index)
        shape = self.tensor_shapes[index]
        if self._is_flat:
            return piece if piece.numel() != math.prod(shape) else piece.view(shape)
        if not shape:
            return piece.view(()) if piece.numel() else piece
        _, rows = self.layout.rows(index, self._shard_number, self._num_shards)
        return piece.view(rows, *shape[1:])

    def get_dtensor(self, index: int) -> DTensor:
        """A DTensor over `get_local_tensor`, of the full shape and these placements.

        A new object each time, aliasing ``local``.

        Raises:
            ValueError: The layout cuts rows (``Flat``) and the buffer is sharded.
        """
        rows = [
            self.layout.rows(index, rank, self._num_shards)[1] for rank in range(self._num_shards)
        ]
        with torch.inference_mode(False), torch.no_grad():
            local = self.get_local_tensor(index)
            shape = self.tensor_shapes[index]
            return make_dtensor(local, self.mesh, self.placements, shape, rows)

    @property
    def has_storage(self) -> bool:
        """Whether ``local`` has memory; an empty part always has."""
        return self.local.untyped_storage().nbytes() >= self._storage_bytes

    def release_storage(self) -> None:
        """Free the memory of ``local``, keeping the tensor and every view of it.

        Raises:
            RuntimeError: ``local`` is a part of another buffer's storage.
        """
        self._check_owns_storage("release")
        self.local.untyped_storage().resize_(0)

    def reallocate_storage(self) -> None:
        """Give ``local`` and its views uninitialised memory again; nothing if they have it."""
        if not self.has_storage:
            self._check_owns_storage("reallocate")
            self.local.untyped_storage().resize_(self._storage_bytes)

    def __repr__(self) -> str:
        start, stop = self.segment
        return (
            f"DBuffer({len(self.tensor_shapes)} tensors, {self.placements}, {self.dtype}, "
            f"elements {start}..{stop} of {self.layout.size} on {self.device})"
        )

    # Segments.

    @property
    def _num_shards(self) -> int:
        return math.prod(self.mesh.size(axis) for axis in self._shard_axes)

    @property
    def _shard_number(self) -> int:
        coordinate = [self.mesh.get_local_rank(axis) for axis in self._shard_axes]
        return segment_number(coordinate, [self.mesh.size(axis) for axis in self._shard_axes])

    def _elements(self, index: int) -> tuple[int, int]:
        return self.layout.elements(index, self._shard_number, self._num_shards)

    def _local_elements(self, index: int) -> torch.Tensor:
        first, last = self._elements(index)
        start = self.layout.tensor_to_offset[index] + first - self.segment[0]
        # An empty piece may have an offset outside of the segment.
        return self.local[start : start + last - first] if first < last else self.local[:0]

    @property
    def _is_flat(self) -> bool:
        return isinstance(strictest_shard(self.placements), Flat)

    # Moving data.

    def _move(
        self,
        changed: list[int],
        placements: tuple[Placement, ...],
        out: DBuffer | None,
        lane: Lane,
        depends: bool,
        label: str,
    ) -> DBuffer:
        if not changed:
            return self if out is None else self._copy_to(out, self.local, lane)
        axis = changed[0]
        old, new = self.placements[axis], placements[axis]
        if isinstance(old, Replicate):
            return self._relabel(axis, placements, out, lane)
        if isinstance(old, Partial) and isinstance(new, Replicate):
            result = self._destination(placements, out, lane)
            self._copy_to(result, self.local, lane)
            collectives.all_reduce(
                lane,
                result.local,
                self.mesh.get_group(axis),
                average=True,
                depends=depends,
                label=label,
            )
            return result
        if isinstance(old, Partial) and is_sharded(new):
            result = self._destination(placements, out, lane)
            collectives.reduce_scatter(
                lane,
                result.local,
                self.local,
                self.mesh.get_group(axis),
                self._sizes_on(axis, result),
                average=True,
                depends=depends,
                label=label,
            )
            return result
        if is_sharded(old) and isinstance(new, Replicate):
            result = self._destination(placements, out, lane)
            collectives.all_gather(
                lane,
                result.local,
                self.local,
                self.mesh.get_group(axis),
                result._sizes_on(axis, self),
                depends=depends,
                label=label,
            )
            return result
        raise ValueError(
            f"redistribute axis {self._axis_name(axis)} from {old} to {new}: not possible; "
            "redistribute to Replicate() first"
        )

    def _relabel(
        self, axis: int, placements: tuple[Placement, ...], out: DBuffer | None, lane: Lane
    ) -> DBuffer:
        """Replicate -> shard or Partial: what this rank holds already."""
        if is_sharded(placements[axis]):
            result = self.view(placements)
        else:
            result = self._like(placements, self.local)
        return result if out is None else self._copy_to(out, result.local, lane)

    def _sizes_on(self, axis: int, sharded: DBuffer) -> list[int]:
        """Elements of this buffer's part that each rank of ``axis`` holds under ``sharded``."""
        coordinate = [self.mesh.get_local_rank(each) for each in sharded._shard_axes]
        sizes = [self.mesh.size(each) for each in sharded._shard_axes]
        elements = []
        for rank in range(self.mesh.size(axis)):
            coordinate[sharded._shard_axes.index(axis)] = rank
            start, stop = self.layout.segment(
                segment_number(coordinate, sizes), sharded._num_shards
            )
            elements.append(stop - start)
        return elements

    def _destination(
        self, placements: tuple[Placement, ...], out: DBuffer | None, lane: Lane
    ) -> DBuffer:
        if out is not None:
            return out
        with lane.allocating():
            return self._like(placements, local=None)

    def _copy_to(self, out: DBuffer, source: torch.Tensor, lane: Lane) -> DBuffer:
        def copy() -> None:
            with torch.inference_mode(False), torch.no_grad():
                out.local.copy_(source)

        if out.local.data_ptr() != source.data_ptr():
            lane.then(copy)
        return out

    # Construction and checks.

    def _like(
        self, placements: Sequence[Placement], local: torch.Tensor | None, allocate: bool = True
    ) -> DBuffer:
        """A buffer with this one's mesh, shapes and layout."""
        dtype = self.dtype if local is None else local.dtype
        device: torch.device | str = self.device if allocate else "meta"
        return DBuffer(
            self.mesh,
            placements,
            self.tensor_shapes,
            dtype,
            device if local is None else None,
            layout=self.layout,
            local=local,
        )

    def _new_local(self) -> torch.Tensor:
        # A buffer made under inference mode could never be written by training.
        with torch.inference_mode(False), torch.no_grad():
            size = self.segment[1] - self.segment[0]
            return torch.empty(size, dtype=self.dtype, device=self.device)

    def _checked(self, local: torch.Tensor) -> torch.Tensor:
        size = self.segment[1] - self.segment[0]
        if local.ndim != 1 or not local.is_contiguous() or local.numel() != size:
            raise ValueError(
                f"local: expected a contiguous 1-D tensor of {size} elements, this rank's segment "
                f"{self.segment}, found shape {tuple(local.shape)} and strides {local.stride()}"
            )
        if local.dtype != self.dtype:
            raise ValueError(f"local: expected dtype {self.dtype}, found {local.dtype}")
        return local

    def _check_layout(self) -> None:
        if self.layout.tensor_shapes != self.tensor_shapes:
            raise ValueError(
                f"layout: expected shapes {self.tensor_shapes}, found {self.layout.tensor_shapes}"
            )
        if self.layout.num_shards % self._num_shards:
            raise ValueError(
                f"layout: placements {self.placements} cut the buffer into {self._num_shards}, "
                f"which does not divide the layout's {self.layout.num_shards} segments; make the "
                "layout for all axes that any buffer of the group shards"
            )

    def _check_out(self, out: DBuffer, placements: tuple[Placement, ...]) -> None:
        for what, expected, found in (
            ("mesh", self.mesh, out.mesh),
            ("placements", placements, out.placements),
            ("layout", self.layout, out.layout),
            ("dtype", self.dtype, out.dtype),
            ("device", self.device, out.device),
        ):
            if expected != found:
                raise ValueError(f"out: expected {what} {expected}, found {found}")

    @property
    def _storage_bytes(self) -> int:
        stop = self.local.storage_offset() + self.local.numel()
        return stop * self.local.element_size() if self.local.numel() else 0

    def _check_owns_storage(self, what: str) -> None:
        own = self._storage_bytes
        if self.local.storage_offset() or self.local.untyped_storage().nbytes() > own:
            raise RuntimeError(
                f"cannot {what} the storage of {self!r}: it is a part of a larger buffer; "
                f"{what} that one"
            )

    def _axis_name(self, axis: int) -> str:
        names = self.mesh.mesh_dim_names
        return f"{names[axis]!r}" if names else str(axis)


def _device(
    mesh: DeviceMesh, device: torch.device | str | None, local: torch.Tensor | None
) -> torch.device:
    if local is not None:
        return local.device
    device = torch.device(mesh.device_type if device is None else device)
    # "cuda" means the current device: buffers are compared by device.
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
