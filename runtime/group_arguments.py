"""What `FsdpParameterGroup` is constructed from, checked and put in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from .dbuffer import DBuffer
from .placement import (
    Flat,
    Placements,
    RowAtomic,
    TensorAtomic,
    axis_names,
    strictest_shard,
)

if TYPE_CHECKING:
    from .group_reduction import GroupReduction


def owners_of(
    originals: Mapping[nn.Parameter, Sequence[str]],
    placements: Sequence[Placement],
    parameter_to_owner: Mapping[nn.Parameter, int] | None,
    mesh: DeviceMesh,
) -> list[int] | None:
    """The rank that holds each tensor whole, where the placements ask for that.

    Raises:
        TypeError: an owner is not a number.
        ValueError: a tensor has no owner, or one that the mesh does not have.
    """
    if not isinstance(strictest_shard(placements), TensorAtomic):
        return None
    owners = []
    for original, fqns in originals.items():
        owner = None if parameter_to_owner is None else parameter_to_owner.get(original)
        if owner is None:
            raise ValueError(
                f"TensorAtomic keeps every parameter whole on one rank, but parameter {fqns[0]!r} "
                "has no owner; pass parameter_to_owner={parameter: rank, ...} with all of them"
            )
        if isinstance(owner, bool) or not isinstance(owner, int):
            raise TypeError(
                f"parameter_to_owner of parameter {fqns[0]!r}: expected a rank, found {owner!r} of "
                f"type {type(owner).__name__}"
            )
        if not 0 <= owner < mesh.size():
            raise ValueError(
                f"parameter_to_owner of parameter {fqns[0]!r}: expected a rank of the mesh axis "
                f"{axis_names(mesh)[0]!r}, 0..{mesh.size() - 1}, found {owner}"
            )
        owners.append(owner)
    return owners


PlacementTuple = tuple[Placement, ...]


def legal_placements(
    mesh: DeviceMesh,
    parameter: Sequence[Placement],
    gradient: Sequence[Placement],
    optimizer: Sequence[Placement],
) -> tuple[PlacementTuple, PlacementTuple, PlacementTuple]:
    """The placements of a group on all axes of ``mesh``.

    ``Flat`` allows any cut, and a group makes one between rows: the DTensors that optimizers see
    cannot express parts of rows.

    Raises:
        TypeError, ValueError: see `compile_fsdp.runtime.placement.Placements`.
    """
    legal = Placements(axis_names(mesh), tuple(parameter), tuple(gradient), tuple(optimizer))
    whole_rows = [
        tuple(RowAtomic() if isinstance(each, Flat) else each for each in placements)
        for placements in (legal.parameter, legal.gradient, legal.optimizer)
    ]
    return whole_rows[0], whole_rows[1], whole_rows[2]


def check_partial(partial: DBuffer, group: GroupReduction) -> None:
    """Raise ValueError unless ``partial`` is a full gradient buffer of ``group``."""
    for what, expected, found in (
        ("layout", group.layout, partial.layout),
        ("placements", (Partial("avg"),) * group.mesh.ndim, partial.placements),
        ("dtype", group.grad_comm_dtype, partial.dtype),
    ):
        if expected is not found and expected != found:
            raise ValueError(
                f"parameter group {group.label or group.name!r}: a partial gradient buffer must "
                f"have {what} {expected}, found {found}; make it with "
                "allocate_partial_grad_buffer()"
            )


def unique_parameters(
    fqn_to_parameter: Mapping[str, nn.Parameter],
) -> dict[nn.Parameter, list[str]]:
    """Parameters in order, each with all of its names.

    Raises:
        ValueError: there is none, or they differ in dtype or requires_grad.
    """
    if not fqn_to_parameter:
        raise ValueError(
            "a parameter group needs at least one parameter, got none; a module without "
            "parameters needs no group"
        )
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in fqn_to_parameter.items():
        names.setdefault(parameter, []).append(fqn)
    first_fqn, first = next(iter(fqn_to_parameter.items()))
    for fqn, parameter in fqn_to_parameter.items():
        for what in ("dtype", "requires_grad"):
            expected, found = getattr(first, what), getattr(parameter, what)
            if expected != found:
                raise ValueError(
                    f"parameters of one group must share {what}: {first_fqn!r} has {expected}, "
                    f"{fqn!r} has {found}; put them into two groups (fully_shard does)"
                )
    return names


def mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = getattr(torch, mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
