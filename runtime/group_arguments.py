"""What `FsdpParameterGroup` is constructed from, checked and put in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .placement import TensorAtomic, strictest_shard


def owners_of(
    originals: Mapping[nn.Parameter, Sequence[str]],
    placements: Sequence[Placement],
    parameter_to_owner: Mapping[nn.Parameter, int] | None,
) -> list[int] | None:
    """The rank that holds each tensor whole, where the placements ask for that.

    Raises:
        ValueError: a tensor has no owner.
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
        owners.append(owner)
    return owners


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
