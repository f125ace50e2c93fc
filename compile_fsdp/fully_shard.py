"""fully_shard and microbatch: what turns an nn.Module into a sharded one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from compile_fsdp.runtime import process_groups
from compile_fsdp.runtime.agreement import agreement_of
from compile_fsdp.runtime.group_arguments import mesh_device
from compile_fsdp.runtime.mixed_precision import MixedPrecisionPolicy
from compile_fsdp.runtime.parameter_group import (
    FsdpParameterGroup,
    get_containing_parameter_group,
)
from compile_fsdp.runtime.placement import Placements, ShardLayout
from compile_fsdp.runtime.registry import registry
from compile_fsdp.runtime.torch_internals import move_hooks

from .argument_checks import (
    check_backends,
    check_devices,
    check_kinds,
    check_options,
    check_types,
    check_wrappers,
)
from .context import FsdpContext
from .eager import install_hooks, watch_gradients
from .module import (
    SLOTS_ATTRIBUTE,
    UNIT_ATTRIBUTE,
    FsdpModule,
    ParameterSlot,
    swap_class,
)
from .quantized import quantization
from .torch_internals import without_compile_wrapper
from .unit import FsdpUnit


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    use_symm_mem: bool | Literal["if_available"] = False,
    *,
    grad_scale: float = 1.0,
    shard_layout: ShardLayout = ShardLayout.PADDED,
    parameter_to_owner: Mapping[nn.Parameter, int] | None = None,
    unify_communication_stream: bool = False,
) -> None:
    """Shard ``module`` in place: it owns every parameter below it that no FSDP child owns.

    Apply it bottom-up, children first, then their parents::

        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)

    Each call makes parameter groups, one for each (dtype, requires_grad), which are gathered,
    released and reduced as one flat buffer. Every rank must make the same calls in the same
    order, with the same weights. Modules that get new parameters later (adapters) are sharded
    again: the call takes in what is new.

    Args:
        module: the module to shard. Its parameters are on the mesh's device or on meta. What
            ``torch.compile(module)`` returned is taken for the module inside.
        mesh: the device mesh; ``placements.dp_axes`` name its data-parallel axes.
        placements: what is sharded over which axis. None: ZeRO-3 on a 1-D mesh, HSDP on a 2-D one.
        mixed_precision_policy: dtypes of main weights and gradients, and which weights compute in
            MXFP8. None: fp32 main weights, gradients in the parameter's dtype, no MXFP8.
        use_symm_mem: stage communication in NCCL's symmetric memory (True), where that can be had
            (``"if_available"``), or not. A model uses it where all of its calls say so.
        grad_scale: factor on every gradient contribution of these parameters.
        shard_layout: ``PADDED`` gives every rank a segment of equal size where that takes at most
            3 % of padding, ``PACKED`` has no padding and segments that differ.
        parameter_to_owner: for ``TensorAtomic``: which rank holds which parameter.
        unify_communication_stream: put all-gathers and reductions on one stream, in one
            communicator: they then overlap with compute and not with each other. Of nested calls
            that of the root counts; the others make communicators that the root does not use
            unless they say so too.

    Raises:
        TypeError: an argument has the wrong type, or a DistributedDataParallel is in ``module``.
        ValueError: ``module`` is sharded already and nothing below it is new, has no parameters
            at all, one of its parameters is owned by another FSDP module, is lazy, sparse or a
            DTensor, or is on another device type than the mesh, the placements do not fit the
            mesh, the mesh's devices are not there or its process groups cannot communicate on
            them, there is no symmetric memory, or a parameter cannot compute in MXFP8 that the
            policy names. The module is then exactly as before.
    """
    check_types(module, mesh, placements, mixed_precision_policy)
    check_wrappers(module)
    check_options(
        grad_scale, shard_layout, parameter_to_owner, use_symm_mem, unify_communication_stream
    )
    module = without_compile_wrapper(module)
    placements = placements if placements is not None else _default_placements(mesh)
    dp_mesh = _data_parallel_mesh(mesh, placements)
    owned = _owned_parameters(module)
    _check_not_sharded(module, owned)
    check_kinds(owned)
    check_backends(mesh, dp_mesh)
    check_devices(owned, mesh)

    policy = mixed_precision_policy or MixedPrecisionPolicy()
    quantized = quantization(module, owned, policy, mesh_device(mesh))
    partition = _partition(owned, quantized.parameters)
    of_groups = [_group_placements(placements, members, dp_mesh) for members in partition]
    _make_communicators(dp_mesh, of_groups, unified=unify_communication_stream)

    before = {parameter: (parameter.data, dict(parameter.__dict__)) for parameter in owned.values()}
    try:
        groups = tuple(
            FsdpParameterGroup(
                module,
                members,
                dp_mesh,
                *of_group,
                policy.of_group(quantized=first in quantized.parameters),
                grad_scale,
                use_symm_mem,
                parameter_to_owner,
                shard_layout,
            )
            for members, of_group in zip(partition, of_groups, strict=True)
            for first in (next(iter(members.values())),)
        )
    except BaseException:
        for parameter, (data, attributes) in before.items():
            parameter.data = data
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)
        raise
    device = groups[0].device if groups else torch.device(mesh.device_type)
    commit(module, groups, device, unified=unify_communication_stream)
    cast(FsdpUnit, module.__dict__[UNIT_ATTRIBUTE]).unquantized.update(quantized.others)


@contextlib.contextmanager
def microbatch(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Say whether the backwards inside belong to the last microbatch of an optimizer step.

    Gradients accumulate over microbatches; reductions over axes whose gradient placement is
    partial (DDP, ZeRO-1, the outer axis of HSDP) run on the last one only. Outside of this
    context every backward counts as the last. The previous setting comes back on exit.

    Args:
        module: a sharded module, or one that has sharded modules below it.
        is_last: True for the microbatch after which the optimizer steps.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: no module at or below ``module`` is sharded.
    """
    contexts = contexts_of(module, "microbatch")
    previous = [context.is_last_microbatch for context in contexts]
    for context in contexts:
        context.is_last_microbatch = bool(is_last)
    try:
        yield
    finally:
        for context, value in zip(contexts, previous, strict=True):
            context.is_last_microbatch = value


def zero_missing_gradients(module: nn.Module, enabled: bool = True) -> None:
    """Let ranks have gradients of different parameters: a rank contributes zeros for the others.

    Without it, ranks whose backwards yield gradients of different parameters (experts that only
    some ranks route tokens to) get an error. With it, every backward reduces all trainable groups
    at its end, in one order, and a parameter that got no gradient anywhere has one of zeros instead
    of None (so weight decay and momentum act on it). Reductions then overlap with nothing, and all
    full gradients of a backward exist at the same time.

    It is about gradients alone: every rank must still gather the same groups, so modules that only
    some ranks use must not be sharded by a ``fully_shard`` of their own.

    Args:
        module: a sharded module, or one that has sharded modules below it.
        enabled: False turns it off again.

    Raises:
        ValueError: no module at or below ``module`` is sharded.
    """
    for context in contexts_of(module, "zero_missing_gradients"):
        context.zeros_missing_gradients = bool(enabled)


def contexts_of(module: nn.Module, caller: str) -> list[FsdpContext]:
    """The contexts at and below ``module``, each once, in order.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: there is none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: module must be a Module, got {type(module).__name__}")
    contexts = list({unit.context: None for _, unit in units_of(module)})
    if not contexts:
        raise ValueError(
            f"{caller}: nothing at or below this {type(module).__name__} is sharded; call "
            "fully_shard first"
        )
    return contexts


# Checks ---------------------------------------------------------------------------------------


def _check_not_sharded(module: nn.Module, owned: Mapping[str, nn.Parameter]) -> None:
    if isinstance(module, FsdpModule) and not owned and not _has_new_units(module):
        raise ValueError(
            f"this {type(module).__name__} is sharded already and has no new parameters; call "
            "fully_shard once for each module, children before their parents"
        )


def _has_new_units(module: nn.Module) -> bool:
    """Whether a module below the sharded ``module`` was sharded later than it."""
    return len({unit.context for _, unit in units_of(module)}) > 1


def _default_placements(mesh: DeviceMesh) -> Placements:
    if mesh.ndim == 1:
        return Placements.zero3(mesh)
    if mesh.ndim == 2:
        return Placements.hsdp(mesh)
    raise ValueError(
        f"fully_shard: placements=None needs a 1-D mesh (ZeRO-3) or a 2-D mesh (HSDP), got a "
        f"{mesh.ndim}-D mesh {mesh}; pass placements=Placements(dp_axes, ...) naming the "
        "data-parallel axes"
    )


def _data_parallel_mesh(mesh: DeviceMesh, placements: Placements) -> DeviceMesh:
    axes = cast("tuple[int, ...]", placements.resolve(mesh).dp_axes)
    if axes == tuple(range(mesh.ndim)):
        return mesh
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"fully_shard: placements use axes {axes} of a {mesh.ndim}-D mesh that has no axis "
            "names; build it with init_device_mesh(..., mesh_dim_names=(...))"
        )
    return mesh[tuple(names[axis] for axis in axes)]


def _owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """FQN -> parameter for everything below ``module`` that no FSDP child owns, ties included.

    Raises:
        ValueError: a parameter is owned by a module outside, or there is nothing to shard.
    """
    owned: dict[str, nn.Parameter] = {}
    children: dict[str, nn.Module] = {}
    _collect(module, "", owned, children, set())
    for fqn, parameter in list(owned.items()):
        group = get_containing_parameter_group(parameter)
        if group is not None and group.owning_module is module:
            del owned[fqn]
        elif group is not None:
            raise ValueError(
                f"parameter {fqn!r} is already owned by the FSDP module at "
                f"{group.label!r} (as {group.parameters_by_tensor[parameter].fqns[0]!r}): a tied "
                "or shared parameter must have one owner, and children are sharded before their "
                "parents. Call fully_shard on a common parent "
                "instead of on the module that owns it now"
            )
    if not owned and not children and not isinstance(module, FsdpModule):
        raise ValueError(
            f"fully_shard: this {type(module).__name__} has no parameters and no sharded "
            "modules below it, so there is nothing to shard; call it on a module with parameters"
        )
    return owned


def _collect(
    module: nn.Module,
    prefix: str,
    owned: dict[str, nn.Parameter],
    children: dict[str, nn.Module],
    seen: set[nn.Module],
) -> None:
    if module in seen:
        return
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            owned[prefix + name] = parameter
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, FsdpModule):
            children[prefix + name] = child
        else:
            _collect(child, f"{prefix}{name}.", owned, children, seen)


# Grouping -------------------------------------------------------------------------------------


def _partition(
    owned: Mapping[str, nn.Parameter], quantized: Collection[nn.Parameter]
) -> list[dict[str, nn.Parameter]]:
    """Split into groups that share dtype and requires_grad, in order of first appearance.

    0-D parameters have no dim 0 to shard: they form replicated groups of their own.
    """
    groups: dict[tuple[torch.dtype, bool, bool, bool], dict[str, nn.Parameter]] = {}
    for fqn, parameter in owned.items():
        kind = parameter.ndim == 0, parameter in quantized
        key = (parameter.dtype, parameter.requires_grad, *kind)
        groups.setdefault(key, {})[fqn] = parameter
    return list(groups.values())


def _group_placements(
    placements: Placements, members: Mapping[str, nn.Parameter], mesh: DeviceMesh
) -> tuple[Sequence[Placement], Sequence[Placement], Sequence[Placement]]:
    if next(iter(members.values())).ndim > 0:
        return placements.parameter, placements.gradient, placements.optimizer
    replicated = [Replicate()] * mesh.ndim
    return replicated, [Partial("avg")] * mesh.ndim, replicated


# Communicators --------------------------------------------------------------------------------


def _make_communicators(
    mesh: DeviceMesh,
    placements: Sequence[tuple[Sequence[Placement], Sequence[Placement], Sequence[Placement]]],
    *,
    unified: bool,
) -> None:
    """Make what groups of these placements communicate in, unless it is there. Collective."""
    device = mesh_device(mesh)
    for each in placements:
        uses = process_groups.lanes_over(mesh, *each)
        if not unified:
            process_groups.separate(mesh, uses)
        if device.type == "cuda":
            used = process_groups.groups_in_use(mesh, uses, unified=unified)
            process_groups.check_bound_device(used, device)
            process_groups.connect(used, device)


# Committing -----------------------------------------------------------------------------------


def commit(
    module: nn.Module,
    groups: tuple[FsdpParameterGroup, ...],
    device: torch.device,
    *,
    unified: bool = False,
) -> None:
    """Make ``module`` an FSDP module that owns ``groups``: everything that changes it.

    Nothing here fails for what a user passed.
    """
    unit: FsdpUnit | None = module.__dict__.get(UNIT_ATTRIBUTE)
    if unit is not None:
        _extend(module, unit, groups, unified=unified)
        return
    context = FsdpContext(device, unified=unified)
    unit = FsdpUnit(groups, context)
    module.__dict__[UNIT_ATTRIBUTE] = unit
    _place_shards(module, groups)
    swap_class(module)
    _adopt(module, context)
    for group in groups:
        _install_slots(module, group)
    install_hooks(module, unit)


def _extend(
    module: nn.Module, unit: FsdpUnit, groups: tuple[FsdpParameterGroup, ...], *, unified: bool
) -> None:
    """Take ``groups`` of new parameters, and units that are new below, into a sharded module."""
    _place_shards(module, groups)
    known = len(unit.groups)
    unit.groups += groups
    if _has_new_units(module):
        unified = unified or unit.context.unified
        _adopt(module, FsdpContext(unit.context.device, unified=unified))
    else:
        model = _model_number(module)
        for number, group in enumerate(groups, start=known):
            _take_in(unit, group, number, model)
    for group in groups:
        _install_slots(module, group)
        watch_gradients(unit, group)


def _place_shards(module: nn.Module, groups: Sequence[FsdpParameterGroup]) -> None:
    for group in groups:
        for parameter in group.parameters:
            move_hooks(parameter.unsharded, parameter.sharded)
            for fqn in parameter.fqns:
                owner_fqn, _, name = fqn.rpartition(".")
                module.get_submodule(owner_fqn)._parameters[name] = parameter.sharded


def _adopt(module: nn.Module, context: FsdpContext) -> None:
    """Put ``module``'s unit and all units below it into ``context``, named from this root."""
    context.root = registry.next_root()
    model = _model_number(module)
    for fqn, unit in units_of(module):
        unit.fqn = fqn
        unit.context = context
        for number, group in enumerate(unit.groups):
            _take_in(unit, group, number, model)
    for child in module.modules():
        for slot in child.__dict__.get(SLOTS_ATTRIBUTE, {}).values():
            slot.group_name = slot.group.name
    context.set_orders([unit for _, unit in units_of(module)], _backward_order(module, set()))


def _take_in(unit: FsdpUnit, group: FsdpParameterGroup, number: int, model: int) -> None:
    """Name ``group``, the unit's ``number``-th, and let it share the root's context."""
    label = unit.fqn or "root"
    group.rename(
        f"{unit.context.root}/{unit.fqn}/{number}",
        label if len(unit.groups) == 1 else f"{label}[{number}]",
        model,
    )
    unit.context.add_group(group)


def _model_number(module: nn.Module) -> int:
    """A number that no other model over these ranks has; the units below keep theirs."""
    groups = [group for _, unit in units_of(module) for group in unit.groups]
    named = [group.model for group in groups if group.name]
    if named or not groups:
        return min(named, default=0)
    agreement = agreement_of(groups[0].mesh.get_group(groups[0].mesh.ndim - 1))
    return 0 if agreement is None else agreement.number_model()


def units_of(module: nn.Module) -> Iterator[tuple[str, FsdpUnit]]:
    """The FSDP modules at and below ``module`` by name, as ``named_modules`` lists them."""
    for fqn, child in module.named_modules():
        unit = child.__dict__.get(UNIT_ATTRIBUTE)
        if unit is not None:
            yield fqn, unit


def _backward_order(module: nn.Module, seen: set[nn.Module]) -> list[FsdpUnit]:
    """Parent first, children reversed."""
    if module in seen:
        return []
    seen.add(module)
    own = module.__dict__.get(UNIT_ATTRIBUTE)
    order = [] if own is None else [own]
    for child in reversed(list(module.children())):
        order.extend(_backward_order(child, seen))
    return order


def _install_slots(module: nn.Module, group: FsdpParameterGroup) -> None:
    names_by_owner: dict[nn.Module, dict[str, ParameterSlot]] = {}
    for index, parameter in enumerate(group.parameters):
        for fqn in parameter.fqns:
            owner_fqn, _, name = fqn.rpartition(".")
            owner = module.get_submodule(owner_fqn)
            names_by_owner.setdefault(owner, {})[name] = ParameterSlot(group, index)
    for owner, slots in names_by_owner.items():
        owner.__dict__.setdefault(SLOTS_ATTRIBUTE, {}).update(slots)
        swap_class(owner)
