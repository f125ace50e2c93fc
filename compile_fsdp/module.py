"""FsdpModule and the parameter properties: how compute reaches a sharded module's parameters.

At rest ``module._parameters`` holds sharded DTensors, so optimizers, ``state_dict`` and
``named_parameters()`` see shards under unchanged names. ``fully_shard`` swaps the class of every
module that directly holds a managed parameter for a subclass with one property per parameter
name. Reading the property gives

- the marker op's result while Dynamo traces,
- the full parameter while a forward or backward runs in eager,
- the sharded parameter otherwise.

All state lives on the instance, in a `ParameterSlot` for each name: two wraps of one class with
different meshes share the class and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.parameter_group import FsdpParameterGroup, Phase

from .torch_internals import never_compiled_alone

if TYPE_CHECKING:
    from .context import FsdpContext

SLOTS_ATTRIBUTE = "_fsdp_slots"
UNIT_ATTRIBUTE = "_fsdp_unit"


class ParameterSlot:
    """Where the property for one parameter name of one module finds its parameter.

    Dynamo guards on exactly the plain attributes that tracing reads: the group's flat leaf (one
    graph input for the whole group), its name, the tensor's index and whether it is trainable.
    """

    __slots__ = ("flat_leaf", "group", "group_name", "index", "trainable")

    def __init__(self, group: FsdpParameterGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.flat_leaf = group.flat_leaf
        self.group_name = group.name
        self.trainable = group.trainable[index]
        group.when_trainable_changes(self._follow)

    def _follow(self) -> None:
        self.trainable = self.group.trainable[self.index]

    def read(self) -> nn.Parameter:
        """The full parameter inside a forward or backward of its root, else the sharded one."""
        parameter = self.group.parameters[self.index]
        if self.group.is_held:
            return parameter.unsharded
        context = cast("FsdpContext", self.group.context)
        if context.is_computing:
            context.unshard_on_demand(self.group)
            return parameter.unsharded
        return parameter.sharded

    def as_sharded(self, full: torch.Tensor) -> torch.Tensor:
        """``full`` as a DTensor that can be copied into the sharded parameter.

        A value of another shape comes back as it is: nn.Module reports those by name.
        """
        main = self.group.main_weight
        if tuple(full.shape) != main.tensor_shapes[self.index] or full.is_meta:
            return full
        return main.shard_tensor(self.index, full)


class FsdpUnit:
    """State of one FSDP module: its groups, its phase, and what it holds.

    Attributes:
        fqn: name below the root ("" for the root itself).
        groups: the parameter groups it owns; empty for a root without parameters.
        context: what the units of one root share.
        phase: RESTING, FORWARD or BACKWARD.
        forwards: how many of its forwards are on the Python stack.
    """

    def __init__(self, groups: tuple[FsdpParameterGroup, ...], context: FsdpContext) -> None:
        self.fqn = ""
        self.groups = groups
        self.context = context
        self.phase = Phase.RESTING
        self.forwards = 0
        self._held: dict[FsdpParameterGroup, None] = {}

    def move_to(self, phase: Phase) -> None:
        """Enter ``phase``.

        Raises:
            RuntimeError: a direct step between FORWARD and BACKWARD.
        """
        if Phase.RESTING not in (self.phase, phase) and self.phase is not phase:
            raise RuntimeError(
                f"FSDP module {self.fqn or '<root>'!r} cannot go from {self.phase.value} to "
                f"{phase.value}: a forward must end before its backward begins. If an exception "
                "interrupted a step, run the forward again from the root"
            )
        self.phase = phase

    def hold_all(self) -> None:
        """Unshard and hold every group, and let compute wait for the gathers."""
        for group in self.groups:
            if group not in self._held:
                group.acquire(self.phase)
                self._held[group] = None
        for group in self.groups:
            group.wait_for_unshard(self.phase)

    def drop(self, group: FsdpParameterGroup) -> None:
        """Give the hold on ``group`` back, if this unit has one."""
        if group in self._held:
            del self._held[group]
            group.drop()

    def drop_all(self) -> None:
        """Give every hold back."""
        for group in list(self._held):
            self.drop(group)

    def forget(self) -> None:
        """Back to RESTING after an exception; the groups themselves have been released."""
        self._held.clear()
        self.phase = Phase.RESTING
        self.forwards = 0

    def prefetch(self, phase: Phase) -> None:
        """Start this unit's gathers for somebody who will hold them soon."""
        for group in self.groups:
            group.unshard_parameters(phase)


class _NotCopyable:
    """A sharded module holds process groups, and its copy would share flat buffers with it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be deep-copied or pickled; copy or pickle the "
            "module before fully_shard, keep copies of state_dict() (an EMA), or use "
            "save_checkpoint"
        )


class FsdpModule(_NotCopyable):
    """Mixin of every module that ``fully_shard`` was called on."""

    _fsdp_unit: FsdpUnit

    @property
    def fsdp_parameter_groups(self) -> tuple[FsdpParameterGroup, ...]:
        """The parameter groups this module owns."""
        return self._fsdp_unit.groups


class ManagedParameters(_NotCopyable):
    """Mixin of every module that directly holds a managed parameter."""

    _fsdp_slots: dict[str, ParameterSlot]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``nn.Module._apply`` for everything except managed parameters.

        Managed parameters are views of flat buffers; replacing them would silently disconnect
        them. Conversions that keep dtype and device (``to_empty`` or ``.to`` on the same
        device) leave them as they are.

        Raises:
            RuntimeError: ``fn`` changes dtype or device.
        """
        module = cast(nn.Module, self)
        for name, slot in self._fsdp_slots.items():
            shard = slot.group.main_weight
            probe = fn(torch.empty(0, dtype=shard.dtype, device=shard.device))
            if probe.dtype != shard.dtype or probe.device.type != shard.device.type:
                raise RuntimeError(
                    f"parameter {name!r} of a sharded {type(self).__name__} is {shard.dtype} on "
                    f"{shard.device.type} and cannot be converted to {probe.dtype} on "
                    f"{probe.device.type} after fully_shard; convert the module before sharding"
                )
        managed = {name: module._parameters.pop(name) for name in self._fsdp_slots}
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            module._parameters.update(managed)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """As ``nn.Module`` does, with DTensors that know which rows each rank holds.

        A detached DTensor forgets that on torch 2.14.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, slot in self._fsdp_slots.items():
            if not keep_vars:
                destination[prefix + name] = slot.group.shard_for_saving(slot.index)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Refuse ``assign=True``, then load, then refresh the compute copies.

        Values may be DTensors or full tensors; of a full tensor each rank takes its part.
        """
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                f"load_state_dict(assign=True) on a sharded {type(self).__name__} would replace "
                f"its shards ({', '.join(prefix + name for name in self._fsdp_slots)}); use "
                "load_state_dict(..., assign=False), or assign before fully_shard"
            )
        for name, slot in self._fsdp_slots.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = slot.as_sharded(value)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, *args
        )
        for group in {slot.group: None for slot in self._fsdp_slots.values()}:
            group.sync_model_weight_from_main_weight()


def _parameter_property(name: str) -> property:
    @never_compiled_alone
    def read(self: Any) -> torch.Tensor:
        slot = self._fsdp_slots[name]
        if torch.compiler.is_compiling():
            full = torch.ops.compile_fsdp.parameter(slot.flat_leaf, slot.group_name, slot.index)
            if not slot.trainable and full.requires_grad:
                # Never: the op knows. Dynamo guards on what the condition reads.
                raise AssertionError(f"{name!r} is frozen and wants a gradient")
            return cast(torch.Tensor, full)
        return cast(torch.Tensor, slot.read())

    read.__doc__ = f"Parameter {name!r}: full inside a forward or backward, sharded at rest."
    return property(read)


class ClassCache:
    """Subclasses by (original class, parameter names, is an FSDP module).

    One class object for equal keys keeps Dynamo's guards on types stable between modules.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...], bool], type] = {}

    def subclass(self, cls: type, names: tuple[str, ...], is_fsdp_module: bool) -> type:
        """The subclass of ``cls`` with a property for each of ``names``."""
        key = (cls, names, is_fsdp_module)
        if key not in self._classes:
            bases: tuple[type, ...] = (cls,)
            if names:
                bases = (ManagedParameters, *bases)
            if is_fsdp_module:
                bases = (FsdpModule, *bases)
            namespace: dict[str, Any] = {name: _parameter_property(name) for name in names}
            namespace["__module__"] = cls.__module__
            namespace["__doc__"] = cls.__doc__
            namespace["_fsdp_original_class"] = cls
            self._classes[key] = type(f"Fsdp{cls.__name__}", bases, namespace)
        return self._classes[key]


class_cache = ClassCache()
"""Shared by all models: its classes carry no state."""
