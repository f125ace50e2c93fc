"""Which collective over which mesh axis a live parameter group uses, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Placement, Replicate

from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from compile_fsdp.runtime.placement import axis_names, is_sharded
from compile_fsdp.runtime.planes import PlaneUnit
from compile_fsdp.runtime.registry import registry

from .explanation import ParameterGroup, WeightFormat
from .module import UNIT_ATTRIBUTE
from .unit import FsdpUnit


def parameter_group(info: GroupInfo) -> ParameterGroup:
    """A group as an explanation shows it; its collectives are read off the live group."""
    live = registry.lookup(info.name)
    if isinstance(live, PlaneUnit):
        return _planes(info, live)
    axes = ("", "", "")
    kinds = ("", "")
    prefix = ""
    if isinstance(live, FsdpParameterGroup):
        inner = _inner(live)
        outer = _outer(live) if info.finishes_later else {}
        axes = (_gathered(live, info), "+".join(inner), "+".join(outer))
        kinds = (_kind(inner), _kind(outer))
        prefix = _prefix(live)
    return ParameterGroup(
        name=info.name,
        label=info.label,
        fqns=tuple(tuple(prefix + name for name in names) for names in info.fqns),
        shapes=info.shapes,
        dtype=_dtype(info.dtype),
        gradient_dtype=_dtype(info.grad_comm_dtype),
        trainable=info.requires_grad,
        gather_bytes=info.full_bytes if info.gathers else 0,
        reduce_bytes=info.full_numel * info.grad_comm_dtype.itemsize if info.requires_grad else 0,
        shard_bytes=info.local_numel * info.dtype.itemsize,
        gather_axis=axes[0],
        inner_axis=axes[1],
        outer_axis=axes[2],
        inner_kind=kinds[0],
        outer_kind=kinds[1],
    )


def _planes(info: GroupInfo, live: PlaneUnit) -> ParameterGroup:
    prefix = _prefix(live.group)
    return ParameterGroup(
        name=info.name,
        label=info.label,
        fqns=tuple(tuple(prefix + name for name in names) for names in info.fqns),
        shapes=info.shapes,
        dtype="mxfp8",
        gradient_dtype=_dtype(live.group.grad_comm_dtype),
        trainable=live.group.requires_grad,
        gather_bytes=info.full_bytes if info.gathers else 0,
        reduce_bytes=0,
        shard_bytes=info.local_numel,
        gather_axis=_gathered(live.group, info),
        planes="columnwise" if live.columnwise else "rowwise",
        planes_of=live.group.name,
    )


def weight_formats(infos: Iterable[GroupInfo]) -> tuple[WeightFormat, ...]:
    """What became of ``compute_weights``, of the modules that own these groups."""
    found: list[WeightFormat] = []
    owners: dict[FsdpUnit, None] = {}
    for info in infos:
        live = registry.lookup(info.name)
        if not isinstance(live, FsdpParameterGroup):
            continue
        unit: FsdpUnit = live.owning_module.__dict__[UNIT_ATTRIBUTE]
        prefix = _prefix(live)
        if live.planes:
            found += [WeightFormat(prefix + fqn, "mxfp8") for fqn in live.fqns]
        if unit not in owners:
            owners[unit] = None
            found += [
                WeightFormat(prefix + fqn, "", reason) for fqn, reason in unit.unquantized.items()
            ]
    return tuple(found)


def _prefix(group: FsdpParameterGroup) -> str:
    owner = group.owning_module.__dict__[UNIT_ATTRIBUTE].fqn
    return f"{owner}." if owner else ""


def _gathered(group: FsdpParameterGroup, info: GroupInfo) -> str:
    """The mesh axes of its gathers."""
    names = zip(axis_names(group.mesh), group.model_weight.placements, strict=True)
    sharded = [str(name) for name, placement in names if is_sharded(placement)]
    return "+".join(sharded) if info.gathers else ""


def _inner(group: FsdpParameterGroup) -> dict[str, str]:
    """Collectives of the inner reduction, by axis: from partial to the gradient placements."""
    if group.main_grad is None:
        return {}
    return _reductions(group, [None] * group.mesh.ndim, group.main_grad.placements)


def _outer(group: FsdpParameterGroup) -> dict[str, str]:
    """Collectives of the outer reduction: from the gradient to the optimizer's placements."""
    if group.main_grad is None or group.pre_optimizer_main_grad is None:
        return {}
    return _reductions(group, group.main_grad.placements, group.pre_optimizer_main_grad.placements)


def _reductions(
    group: FsdpParameterGroup,
    before: Sequence[Placement | None],
    after: Sequence[Placement],
) -> dict[str, str]:
    found = {}
    for name, old, new in zip(axis_names(group.mesh), before, after, strict=True):
        if (old is None or old.is_partial()) and not new.is_partial():
            found[str(name)] = "all_reduce" if isinstance(new, Replicate) else "reduce_scatter"
    return found


def _kind(reductions: dict[str, str]) -> str:
    return "+".join(dict.fromkeys(reductions.values()))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
