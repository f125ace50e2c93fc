"""FsdpParameter: the two forms of one parameter, and how they lead to their group.

    sharded      a Parameter over this rank's rows of the main weight     at rest
    unsharded    the user's Parameter, a view of the gathered buffer      while computing

Both carry the user's attributes and a weak reference to the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .weights import GroupWeights

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup

_CONTAINING_PARAMETER_GROUP_ATTR = "_mfsdp_parameter_group"


class _Nothing:
    """What a reference without a group refers to: nothing keeps it alive."""


class _GroupReference(weakref.ref):  # type: ignore[type-arg]
    """A parameter's weak reference to its group. Copies of the parameter belong to no group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupReference:
        return _no_group()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_group, ()


def _no_group() -> _GroupReference:
    return _GroupReference(_Nothing())


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One logical parameter of a group; compared by identity.

    Attributes:
        fqns: its fully qualified names below the owning module, several when tied.
        sharded: a Parameter over the DTensor of this rank's main weight; what optimizers see.
        unsharded: the user's original Parameter (materialised if it was on meta), a view of the
            gathered buffer; what compute sees.
    """

    fqns: tuple[str, ...]
    sharded: nn.Parameter
    unsharded: nn.Parameter


def bind_parameter(
    group: FsdpParameterGroup,
    original: nn.Parameter,
    fqns: tuple[str, ...],
    full: torch.Tensor,
    shard: DTensor,
) -> FsdpParameter:
    """Make the two forms of ``original``, with the user's attributes.

    Args:
        group: what both forms will lead to.
        original: the user's Parameter. It becomes the unsharded form, unless it is on another
            device than ``full`` (on meta) or an inference tensor: then a new Parameter does.
        fqns: all its names.
        full: its view of the gathered buffer.
        shard: this rank's rows of the main weight.
    """
    attributes = dict(original.__dict__)
    if original.device != full.device or original.is_inference():
        empty = torch.empty(0, dtype=full.dtype, device=full.device)
        unsharded = nn.Parameter(empty, requires_grad=original.requires_grad)
        unsharded.__dict__.update(attributes)
    else:
        unsharded = original
    # Not a Parameter made of the view: that would share its version counter, and every gather
    # would look like an in-place change of what autograd saved.
    unsharded.data = full
    sharded = nn.Parameter(shard, requires_grad=original.requires_grad)
    sharded.__dict__.update(attributes)
    for parameter in (sharded, unsharded):
        setattr(parameter, _CONTAINING_PARAMETER_GROUP_ATTR, _GroupReference(group))
    return FsdpParameter(fqns, sharded, unsharded)


def rebind_sharded(parameter: FsdpParameter, shard: DTensor) -> None:
    """Make the sharded form a Parameter over ``shard``, of any dtype; it stays the same object.

    Raises:
        RuntimeError: somebody holds a weak reference to it, or its autograd node.
    """
    sharded = parameter.sharded
    replacement = nn.Parameter(shard, requires_grad=sharded.requires_grad)
    replacement.__dict__.update(sharded.__dict__)
    try:
        torch.utils.swap_tensors(sharded, replacement)
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {parameter.fqns[0]!r} was frozen when fully_shard was called and is "
            f"trainable now, so it must become {shard.dtype} with placements {shard.placements}, "
            "but somebody holds a weak reference to it or uses it in a graph; make it trainable "
            "before fully_shard, or before anything else refers to it"
        ) from error


def bind_parameters(
    group: FsdpParameterGroup,
    originals: Mapping[nn.Parameter, Sequence[str]],
    weights: GroupWeights,
) -> tuple[FsdpParameter, ...]:
    """Both forms of each of ``originals``, over ``weights``; ``full`` has no memory afterwards.

    Args:
        group: what they will lead to.
        originals: the user's Parameters in tensor order, each with all of its names.
        weights: the group's buffers.
    """
    bound = tuple(
        bind_parameter(
            group,
            original,
            tuple(fqns),
            weights.full.get_local_tensor(index),
            weights.main.get_dtensor(index),
        )
        for index, (original, fqns) in enumerate(originals.items())
    )
    if weights.gathers:
        # Not before: a view cannot be made of released memory.
        weights.full.release_storage()
    return bound


def get_containing_parameter_group(parameter: torch.Tensor) -> FsdpParameterGroup | None:
    """The live group that ``parameter`` (its sharded or its unsharded form) belongs to."""
    reference = getattr(parameter, _CONTAINING_PARAMETER_GROUP_ATTR, None)
    return None if reference is None else reference()


def sync_model_weights_from_main_weights(parameters: Sequence[torch.Tensor]) -> None:
    """Bring the model weights of all groups that ``parameters`` belong to up to date.

    Each group is refreshed once; parameters that belong to no group are ignored. Call it after
    writing main weights outside of an optimizer prepared by ``fully_shard_optimizer``.
    """
    groups: dict[FsdpParameterGroup, None] = {}
    for parameter in parameters:
        group = get_containing_parameter_group(parameter)
        if group is not None:
            groups[group] = None
    for group in groups:
        group.sync_model_weight_from_main_weight()
