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

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.parameter_group import FsdpParameterGroup, Phase

from .quantized import linear_forward
from .torch_internals import (
    inlined_or_skipped,
    never_compiled_alone,
    without_compile_wrapper,
)
from .unit import FsdpUnit

if TYPE_CHECKING:
    from .context import FsdpContext

SLOTS_ATTRIBUTE = "_fsdp_slots"
UNIT_ATTRIBUTE = "_fsdp_unit"
METHODS_ATTRIBUTE = "_fsdp_methods"

_COMPILE_PARAMETERS = inspect.signature(torch.compile).parameters


class ParameterSlot:
    """Where the property for one parameter name of one module finds its parameter.

    Dynamo guards on exactly the plain attributes that tracing reads: the group's flat leaf (one
    graph input for the whole group), its name, the tensor's index and whether it is trainable.
    """

    __slots__ = (
        "count",
        "flat_leaf",
        "group",
        "group_name",
        "index",
        "planes",
        "scaled_matmul",
        "trainable",
    )

    def __init__(self, group: FsdpParameterGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.flat_leaf = group.flat_leaf
        self.group_name = group.name
        self.trainable = group.trainable[index]
        # The flat leaves of rowwise and columnwise planes; none where nothing is quantised.
        self.planes = tuple(planes.flat_leaf for planes in group.planes)
        self.count = len(group.parameters)
        self.scaled_matmul = group.scaled_matmul
        group.when_trainable_changes(self._follow)

    def _follow(self) -> None:
        self.trainable = self.group.trainable[self.index]

    def read(self, registered: nn.Parameter | None) -> torch.Tensor:
        """The full parameter inside a forward or backward of its root, else the sharded one.

        ``registered`` is what the module has under the name: another tensor for the time of a
        ``torch.func.functional_call``, and that is what compute must see then.

        Raises:
            RuntimeError: it is another DTensor, with which a forward cannot compute.
        """
        parameter = self.group.parameters[self.index]
        if registered is not parameter.sharded:
            return self._replaced(registered)
        if self.group.is_readable:
            return parameter.unsharded
        context = cast("FsdpContext", self.group.context)
        if context.is_computing:
            context.unshard_on_demand(self.group)
            return parameter.unsharded
        return parameter.sharded

    def _replaced(self, registered: nn.Parameter | None) -> torch.Tensor:
        if registered is None or isinstance(registered, DTensor):
            raise RuntimeError(
                f"parameter {self.fqn!r} of a sharded module was replaced by "
                f"{'None' if registered is None else 'another DTensor'}; functional_call needs "
                "full tensors (parameter.full_tensor())"
            )
        return registered

    def read_rowwise(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of the rowwise planes, in a forward."""
        return self._read_planes(columnwise=False)

    def read_columnwise(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of the columnwise planes, in a backward."""
        return self._read_planes(columnwise=True)

    def _read_planes(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        planes = self.group.planes[columnwise]
        if not planes.is_readable:
            cast("FsdpContext", self.group.context).unshard_on_demand(planes)
        return planes.full_planes(self.index)

    @property
    def fqn(self) -> str:
        """The parameter's first name below the module that owns it."""
        return self.group.parameters[self.index].fqns[0]

    def as_sharded(self, full: torch.Tensor) -> torch.Tensor:
        """``full`` as a DTensor that can be copied into the sharded parameter.

        A value of another shape comes back as it is: nn.Module reports those by name.
        """
        main = self.group.main_weight
        if tuple(full.shape) != main.tensor_shapes[self.index] or full.is_meta:
            return full
        return main.shard_tensor(self.index, full)


class _Sharded:
    """How modules with state of their own in flat buffers are copied and pickled."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        from .copying import copy_sharded, copy_unsharded, is_copying

        module = cast(nn.Module, self)
        if is_copying(memo):
            return copy_unsharded(module, memo)
        if isinstance(self, FsdpModule):
            return copy_sharded(module, memo)
        raise RuntimeError(
            f"this {type(self).__name__} cannot be deep-copied alone: an FSDP module above it owns "
            "its parameters; copy that one, or call fully_shard on this module itself"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"a sharded {type(self).__name__} cannot be pickled, for it holds process groups; use "
            "save_checkpoint, or pickle the module before fully_shard"
        )


class FsdpModule(_Sharded):
    """Mixin of every module that ``fully_shard`` was called on."""

    _fsdp_unit: FsdpUnit

    @property
    def fsdp_parameter_groups(self) -> tuple[FsdpParameterGroup, ...]:
        """The parameter groups this module owns."""
        return self._fsdp_unit.groups

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        _check_conversion(cast(nn.Module, self), fn)
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``nn.Module.compile``, with recompilations counted for this module alone.

        A graph is for certain parameter groups, so blocks that are compiled one by one share code
        and no graphs; Dynamo's limit for recompilations of one function must not count them
        together. (torch before 2.13 cannot: raise ``torch._dynamo.config.recompile_limit`` there.)
        """
        module = cast(nn.Module, self)
        original = type(module)._fsdp_original_class.compile  # type: ignore[attr-defined]
        if original is nn.Module.compile and "isolate_recompiles" in _COMPILE_PARAMETERS:
            kwargs.setdefault("isolate_recompiles", True)
        super().compile(*args, **kwargs)  # type: ignore[misc]


class ManagedParameters(_Sharded):
    """Mixin of every module that directly holds a managed parameter."""

    _fsdp_slots: dict[str, ParameterSlot]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``nn.Module._apply`` for everything except managed parameters.

        Managed parameters are views of flat buffers; replacing them would silently disconnect
        them. Conversions that keep dtype and device (``to_empty`` or ``.to`` on the same
        device) leave them as they are.

        Raises:
            RuntimeError: ``fn`` changes dtype or device. Nothing has been converted then.
        """
        module = cast(nn.Module, self)
        _check_conversion(module, fn)
        managed = {name: module._parameters.pop(name) for name in self._fsdp_slots}
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            module._parameters.update(managed)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module`` does, which assigning a Parameter to an attribute calls too.

        Raises:
            RuntimeError: ``name`` is a managed parameter.
        """
        slot = self._fsdp_slots.get(name)
        if slot is None:
            super().register_parameter(name, param)  # type: ignore[misc]
        elif param is not slot.group.parameters[slot.index].sharded:
            raise RuntimeError(
                f"parameter {slot.fqn!r} is sharded: assigning to it would not reach the shards, "
                "nor the optimizer. Change its values (load_state_dict({name: full_tensor}, "
                "strict=False)), or replace it before fully_shard"
            )

    def __delattr__(self, name: str) -> None:
        if name in self._fsdp_slots:
            raise RuntimeError(
                f"parameter {self._fsdp_slots[name].fqn!r} is sharded and cannot be deleted; "
                "delete it, or register its parametrization, before fully_shard"
            )
        super().__delattr__(name)

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


def _check_conversion(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse a conversion of ``module`` that changes a managed parameter, before it begins."""
    for child in module.modules():
        slots: dict[str, ParameterSlot] = child.__dict__.get(SLOTS_ATTRIBUTE, {})
        for name, slot in slots.items():
            shard = slot.group.main_weight
            probe = fn(torch.empty(0, dtype=shard.dtype, device=shard.device))
            if probe.dtype != shard.dtype or probe.device.type != shard.device.type:
                raise RuntimeError(
                    f"parameter {name!r} of a sharded {type(child).__name__} is {shard.dtype} on "
                    f"{shard.device.type} and cannot be converted to {probe.dtype} on "
                    f"{probe.device.type} after fully_shard; convert the module before sharding"
                )


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
        return cast(torch.Tensor, slot.read(self._parameters.get(name)))

    read.__doc__ = f"Parameter {name!r}: full inside a forward or backward, sharded at rest."
    return property(read)


def _computing_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, a method of a module's class, as one that computes with full parameters.

    Where the module's hooks have run (it was called, below a forward) they do not run again.
    """

    @inlined_or_skipped
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        unit = _resting_unit(self)
        if unit is None:
            return original(self, *args, **kwargs)
        return unit.run_as_forward(unit, original, (self, *args), kwargs)

    return functools.wraps(original)(method)


@inlined_or_skipped
def _resting_unit(module: nn.Module) -> FsdpUnit | None:
    """The unit whose hooks must run before ``module`` computes, None where they have."""
    unit: FsdpUnit | None = module.__dict__.get(UNIT_ATTRIBUTE)
    if unit is not None:
        return unit if unit.phase is Phase.RESTING else None
    for slot in module.__dict__[SLOTS_ATTRIBUTE].values():
        if not cast("FsdpContext", slot.group.context).is_computing:
            return cast(FsdpUnit, slot.group.owning_module._fsdp_unit)
        break
    return None


def swap_class(module: nn.Module) -> None:
    """Give ``module`` the generated subclass for what it holds: parameters, a unit, methods."""
    original = getattr(type(module), "_fsdp_original_class", type(module))
    module.__class__ = class_cache.subclass(
        original,
        tuple(module.__dict__.get(SLOTS_ATTRIBUTE, ())),
        UNIT_ATTRIBUTE in module.__dict__,
        module.__dict__.get(METHODS_ATTRIBUTE, ()),
        any(slot.planes for slot in module.__dict__.get(SLOTS_ATTRIBUTE, {}).values()),
    )


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` compute with the parameters of a sharded module.

    Calling it then gathers, releases and reduces as calling the module does. Dynamo traces
    through it, so ``torch.compile(module.encode, backend="compile_fsdp")`` works too.

    Args:
        module: a module that ``fully_shard`` was called on.
        name: of a method that its class defines.

    Raises:
        TypeError: ``module`` is no module or ``name`` no string.
        AttributeError: ``module`` has no such attribute.
        ValueError: ``module`` is not sharded, or the attribute is not a plain method.
    """
    if not isinstance(module, nn.Module) or not isinstance(name, str):
        raise TypeError(
            "register_forward_method needs a module and the name of a method, got "
            f"{type(module).__name__} and {type(name).__name__}"
        )
    module = without_compile_wrapper(module)
    if not isinstance(module, FsdpModule):
        raise ValueError(
            f"register_forward_method: this {type(module).__name__} is not sharded; call "
            "fully_shard on it first"
        )
    original = getattr(type(module), "_fsdp_original_class")  # noqa: B009
    if not hasattr(module, name):
        raise AttributeError(
            f"register_forward_method: {original.__name__} has no attribute {name!r}"
        )
    method = inspect.getattr_static(original, name, None)
    if (
        not inspect.isfunction(method)
        or name in module.__dict__
        or name.startswith("__")
        or inspect.isgeneratorfunction(method)
        or inspect.iscoroutinefunction(method)
    ):
        raise ValueError(
            f"register_forward_method: {name!r} of {original.__name__} must be a plain method "
            "that its class defines, which returns when it has computed: not a property, a static "
            "or class method, a generator, a coroutine, or an attribute of the instance"
        )
    methods = module.__dict__.get(METHODS_ATTRIBUTE, ())
    if name != "forward" and name not in methods:
        module.__dict__[METHODS_ATTRIBUTE] = (*methods, name)
        swap_class(module)


class ClassCache:
    """Subclasses by (original class, parameter names, is an FSDP module, registered methods).

    One class object for equal keys keeps Dynamo's guards on types stable between modules.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...], bool, tuple[str, ...], bool], type] = {}

    def subclass(
        self,
        cls: type,
        names: tuple[str, ...],
        is_fsdp_module: bool,
        methods: tuple[str, ...],
        quantized: bool = False,
    ) -> type:
        """The subclass of ``cls`` with a property for each of ``names``."""
        key = (cls, names, is_fsdp_module, methods, quantized)
        if key not in self._classes:
            bases: tuple[type, ...] = (cls,)
            if names:
                bases = (ManagedParameters, *bases)
            if is_fsdp_module:
                bases = (FsdpModule, *bases)
            namespace: dict[str, Any] = {name: _parameter_property(name) for name in names}
            for method in ("forward", *methods):
                namespace[method] = _computing_method(getattr(cls, method))
            if quantized:
                namespace["forward"] = _computing_method(linear_forward)
            namespace["__module__"] = cls.__module__
            namespace["__doc__"] = cls.__doc__
            namespace["_fsdp_original_class"] = cls
            self._classes[key] = type(f"Fsdp{cls.__name__}", bases, namespace)
        return self._classes[key]


class_cache = ClassCache()
"""Shared by all models: its classes carry no state."""
