"""What `fully_shard` refuses before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.mixed_precision import MixedPrecisionPolicy
from compile_fsdp.runtime.placement import Placements, ShardLayout, axis_names
from compile_fsdp.runtime.process_groups import backend_of
from compile_fsdp.runtime.symmetric_memory import IF_AVAILABLE
from compile_fsdp.runtime.torch_internals import is_fake_group

# torch's own backends that do not serve these devices, or (gloo on a GPU) through the host only.
_OF_OTHER_DEVICES = {"cpu": ("nccl",), "cuda": ("gloo", "mpi")}


def check_types(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements | None,
    policy: MixedPrecisionPolicy | None,
) -> None:
    """The first arguments of `fully_shard` are what they are called; else a TypeError."""
    for name, value, expected, optional in (
        ("module", module, nn.Module, False),
        ("mesh", mesh, DeviceMesh, False),
        ("placements", placements, Placements, True),
        ("mixed_precision_policy", policy, MixedPrecisionPolicy, True),
    ):
        if not isinstance(value, expected) and not (optional and value is None):
            found = type(value).__name__
            if found == expected.__name__:  # FSDP2's policy has the same name
                found = f"{type(value).__module__}.{found}; pass compile_fsdp.{found}"
            raise TypeError(
                f"fully_shard: {name} must be a {expected.__name__}"
                f"{' or None' if optional else ''}, got {found}"
            )


def check_wrappers(module: nn.Module) -> None:
    """Nobody else reduces gradients of ``module``; else a TypeError."""
    for below in module.modules():
        if isinstance(below, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "fully_shard: this module has a DistributedDataParallel, which would reduce "
                "gradients a second time; shard what it wraps (its .module) and leave it out, for "
                "sharding reduces gradients over the mesh"
            )


def check_options(
    grad_scale: object,
    shard_layout: object,
    owners: object,
    use_symm_mem: object,
    unify_communication_stream: object,
) -> None:
    """The other arguments have the right types.

    Raises:
        TypeError, ValueError: one has not.
    """
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, (int, float)):
        raise TypeError(
            f"fully_shard: grad_scale must be a number, got {type(grad_scale).__name__}"
        )
    if not math.isfinite(grad_scale):
        raise ValueError(f"fully_shard: grad_scale must be finite, got {grad_scale}")
    if not isinstance(shard_layout, ShardLayout):
        raise TypeError(
            f"fully_shard: shard_layout must be a ShardLayout, got {shard_layout!r}; pass "
            "ShardLayout.PADDED or ShardLayout.PACKED"
        )
    if owners is not None and not isinstance(owners, Mapping):
        raise TypeError(
            "fully_shard: parameter_to_owner must be a mapping from parameters to ranks or None, "
            f"got {type(owners).__name__}"
        )
    if not isinstance(use_symm_mem, bool) and use_symm_mem != IF_AVAILABLE:
        raise TypeError(
            f"fully_shard: use_symm_mem must be True, False or {IF_AVAILABLE!r}, got "
            f"{use_symm_mem!r}"
        )
    if not isinstance(unify_communication_stream, bool):
        raise TypeError(
            "fully_shard: unify_communication_stream must be True or False, got "
            f"{unify_communication_stream!r}"
        )


def check_kinds(owned: Mapping[str, nn.Parameter]) -> None:
    """All parameters are dense, plain tensors; else a ValueError names one."""
    tensors: Mapping[str, torch.Tensor] = owned
    for fqn, parameter in tensors.items():
        if isinstance(parameter, nn.UninitializedParameter):
            found, way_out = "has no shape yet", "run a forward of the lazy module first"
        elif isinstance(parameter, DTensor):
            found, way_out = "is a DTensor", "shard the plain module: tensors have one owner"
        elif parameter.layout is not torch.strided:
            found, way_out = f"has the layout {parameter.layout}", "make it dense (to_dense())"
        else:
            continue
        raise ValueError(
            f"fully_shard: parameter {fqn!r} {found}: expected a dense, plain tensor; {way_out}"
        )


def check_devices(owned: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """All parameters are on the mesh's device or on meta; else a ValueError names one."""
    for fqn, parameter in owned.items():
        if parameter.device.type not in (mesh.device_type, "meta"):
            raise ValueError(
                f"parameter {fqn!r} is on {parameter.device} but the mesh is for "
                f"{mesh.device_type!r} devices; move the module first "
                f"(module.to({mesh.device_type!r})) or build the mesh with "
                f"init_device_mesh({parameter.device.type!r}, ...)"
            )


def check_backends(mesh: DeviceMesh, axes: DeviceMesh) -> None:
    """The devices of ``mesh`` are there, and its data-parallel ``axes`` can communicate on them.

    Raises:
        ValueError: they are not, or cannot.
    """
    device_type = mesh.device_type
    if device_type not in ("cpu", "cuda"):
        raise ValueError(
            f"fully_shard: the mesh is for {device_type!r} devices; expected 'cuda' or 'cpu'. "
            "Build it with init_device_mesh('cuda', ...)"
        )
    if device_type == "cuda" and not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} was built without CUDA; install a CUDA build"
            if torch.version.cuda is None
            else "torch finds no GPU: look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
        raise ValueError(
            f"fully_shard: the mesh is for 'cuda' devices, but there is none: {reason}, or train "
            "on CPU with init_device_mesh('cpu', ...)"
        )
    for axis, name in enumerate(axis_names(axes)):
        group = axes.get_group(axis)
        if not is_fake_group(group):
            check_backend(backend_of(group, device_type), device_type, name)


def check_backend(found: str | None, device_type: str, axis: str | int) -> None:
    """Refuse a mesh axis that communicates by the backend ``found``, or none, on such devices.

    Raises:
        ValueError: it cannot.
    """
    # Other people's backends may serve any device.
    if found is not None and found not in _OF_OTHER_DEVICES[device_type]:
        return
    way_out = "Call init_process_group('cpu:gloo,cuda:nccl', ...) before the mesh is made"
    if device_type == "cuda" and not dist.is_nccl_available():
        way_out = f"torch {torch.__version__} was built without NCCL: install a build that has it"
    raise ValueError(
        f"fully_shard: the mesh is for {device_type!r} devices, on which its axis {axis!r} "
        f"communicates by {'no backend at all' if found is None else repr(found)}; expected "
        f"{'nccl' if device_type == 'cuda' else 'gloo'!r}. {way_out}"
    )
