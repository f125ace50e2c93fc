"""Ranks that are not there: a mesh over PyTorch's fake process group.

--mesh 64x8     dp_outer x dp_inner: 64 nodes of 8 ranks
--mesh 8x64     8 replicas, each over 64 ranks, which are 8 nodes of 8
--mesh 512      one axis
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..torch_internals import fake_tensors, init_fake_process_group
from .errors import PlanError

DEFAULT_RANKS_PER_NODE = 8
MOST_RANKS = 65536


@dataclass(frozen=True)
class MeshShape:
    """Ranks and how they are cut.

    Attributes:
        outer: ranks on dp_outer; 1 where the mesh was given as one number.
        inner: ranks on dp_inner, neighbours.
        ranks_per_node: consecutive ranks that share a node.
    """

    outer: int
    inner: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.outer * self.inner

    def __str__(self) -> str:
        return f"{self.outer}x{self.inner}"


def parse_mesh(text: str, ranks_per_node: int | None = None) -> MeshShape:
    """``"64x8"`` (dp_outer x dp_inner) or ``"512"``.

    Args:
        text: the mesh.
        ranks_per_node: None: 8, or all ranks where there are fewer.

    Raises:
        PlanError: it is no mesh, or does not fill whole nodes.
    """
    found = re.fullmatch(r"\s*([0-9]+)(?:\s*[xX*]\s*([0-9]+))?\s*", text)
    sizes = [int(size) for size in found.groups() if size] if found else []
    if not sizes or min(sizes) < 1:
        raise PlanError(
            f"--mesh {text!r}: expected OUTERxINNER, two numbers of ranks of 1 or more such as "
            "64x8 (64 nodes, dp_outer, of 8 ranks, dp_inner), or one number of ranks"
        )
    outer, inner = (1, *sizes)[-2:]
    ranks = outer * inner
    if ranks > MOST_RANKS:
        raise PlanError(f"--mesh {text!r}: {ranks} ranks, expected at most {MOST_RANKS}")
    node = min(DEFAULT_RANKS_PER_NODE, ranks) if ranks_per_node is None else ranks_per_node
    if node < 1 or ranks % node or (inner % node and node % inner):
        raise PlanError(
            f"--mesh {text!r}: {ranks} ranks of which {inner} are neighbours on dp_inner do not "
            f"factor into nodes of {node} ranks; --ranks-per-node must divide the ranks of the "
            "mesh, and divide or be a multiple of dp_inner"
        )
    return MeshShape(outer, inner, node)


@contextmanager
def pretended(shape: MeshShape, *, axes: int) -> Iterator[DeviceMesh]:
    """A mesh of ``shape`` in which this process is rank 0; tensors made inside are fake.

    Args:
        shape: the ranks.
        axes: 1: one axis "dp_inner" over all ranks; 2: "dp_outer" and "dp_inner".

    Raises:
        PlanError: this process has a process group of its own.
    """
    if dist.is_initialized():
        raise PlanError(
            "this process has a process group already; a plan pretends to have another one. Plan "
            "in a process of its own, or call torch.distributed.destroy_process_group() before"
        )
    init_fake_process_group(shape.ranks)
    try:
        sizes = (shape.outer, shape.inner) if axes == 2 else (shape.ranks,)
        names = ("dp_outer", "dp_inner")[-axes:]
        # Before tensors are fake: the mesh needs values.
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        with fake_tensors():
            yield mesh
    finally:
        dist.destroy_process_group()
