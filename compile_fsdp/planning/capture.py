"""Trace one training step of a sharded model and keep what plans are made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule

from compile_fsdp.passes.costs import CostModel
from compile_fsdp.passes.facts import GroupFacts
from compile_fsdp.passes.trace import StepFacts, trace_step
from compile_fsdp.passes.uses import group_facts
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from compile_fsdp.runtime.registry import registry

from ..backend import groups_in
from ..explanation import ParameterGroup
from ..moves import parameter_group
from ..torch_internals import (
    compiling_aside,
    graph_break_errors,
    place_of,
)
from .errors import PlanError, one_line
from .sharding import Sharding, shard
from .sizes import GroupSizes, sizes_of
from .workload import Built, Workload
from .world import MeshShape, pretended


@dataclass(frozen=True)
class Captured:
    """A traced step on a mesh. Plain data: the model is gone.

    Attributes:
        name: of the workload.
        shape, sharding: what it was traced for.
        facts: of the graphs.
        groups: the groups as the scheduler sees them, by name.
        described: the same, as an explanation shows them.
        sizes: bytes of a rank, by name.
        samples, unit: what a rank works on in a step.
    """

    name: str
    shape: MeshShape
    sharding: Sharding
    facts: StepFacts
    groups: Mapping[str, GroupFacts]
    described: Mapping[str, ParameterGroup]
    sizes: Mapping[str, GroupSizes]
    samples: int
    unit: str


def capture_step(
    workload: Workload, shape: MeshShape, how: Sharding, *, decompose: bool = True
) -> Captured:
    """Build, shard and trace ``workload`` on a mesh that is not there.

    Args:
        workload: what to plan.
        shape, how: on which ranks and how.
        decompose: see `trace_step`.

    Raises:
        PlanError: the model cannot be built of fake tensors, sharded, or traced as one graph.
    """
    with pretended(shape, axes=how.axes) as mesh:
        built = workload.build(mesh)
        shard(built, mesh, how)
        facts, names = _trace(built, decompose)
        samples, unit = built.samples
        return Captured(
            workload.name, shape, how, facts, *_groups(names), samples=samples, unit=unit
        )


def recapture(captured: Captured, workload: Workload, shape: MeshShape, how: Sharding) -> Captured:
    """``captured`` on another mesh or in another mode: sharded anew, not traced anew, for the
    graphs of a rank know nothing of other ranks."""
    with pretended(shape, axes=how.axes) as mesh:
        built = workload.build(mesh)
        shard(built, mesh, how)
        live = {_below_root(name): name for name in _live_names(built)}
        known = {_below_root(name): name for name in captured.groups}
        if live.keys() != known.keys():
            raise PlanError("the model has other parameter groups on another mesh")
        parts = _groups([live[each] for each in known], tuple(known.values()))
        groups, described, sizes = parts
        return replace(
            captured, shape=shape, sharding=how, groups=groups, described=described, sizes=sizes
        )


def _below_root(name: str) -> str:
    """A group's name without the number of its root."""
    return name.partition("/")[2]


def _live_names(built: Built) -> list[str]:
    from ..module import FsdpModule

    return [
        group.name
        for module in built.model.modules()
        if isinstance(module, FsdpModule)
        for group in module.fsdp_parameter_groups
    ]


def _groups(
    names: Sequence[str], known_as: Sequence[str] | None = None
) -> tuple[dict[str, GroupFacts], dict[str, ParameterGroup], dict[str, GroupSizes]]:
    """The live groups of these names as plain data, under the names ``known_as``."""
    live = [cast(FsdpParameterGroup, registry.lookup(name)) for name in names]
    keys = list(known_as or names)
    infos = {key: replace(group.info, name=key) for key, group in zip(keys, live, strict=True)}
    described = {
        key: replace(parameter_group(group.info), name=key)
        for key, group in zip(keys, live, strict=True)
    }
    sizes = {key: sizes_of(group) for key, group in zip(keys, live, strict=True)}
    return group_facts(infos), described, sizes


class _Traced(Exception):
    """The graph has been traced: do not run it."""


def _trace(built: Built, decompose: bool) -> tuple[StepFacts, list[str]]:
    found: list[tuple[StepFacts, list[str]]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        groups = groups_in(gm)
        names = _live_names(built)
        whole = set(names) == set(groups)
        every = {name: registry.lookup(name).info for name in names}
        facts = trace_step(gm, inputs, every, whole_model=whole, decompose=decompose)
        found.append((facts, names))

        def stop(*_: Any) -> Any:
            raise _Traced

        return stop

    # Fake tensors have warnings of their own, about what their users do not do.
    with compiling_aside() as aside, _explained(), warnings.catch_warnings(action="ignore"):
        torch.compiler.reset()
        run = torch.compile(built.model, backend=backend, fullgraph=True, dynamic=False, **aside)
        try:
            run(*built.args, **built.kwargs)
        except _Traced:
            pass
        finally:
            torch.compiler.reset()
    if not found:
        raise PlanError("the model computes nothing that could be compiled")
    return found[0]


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of the model itself in one line."""
    try:
        yield
    except _Traced:
        raise
    except PlanError:
        raise
    except graph_break_errors() as error:
        place = place_of(error)
        at = f" at {place.filename}:{place.lineno} ({place.line})" if place else ""
        raise PlanError(
            f"the model breaks its graph{at}: {one_line(error)}; a plan needs one graph. "
            "`torch.compile(model, fullgraph=True)` tells all of it; compile_fsdp.explain shows "
            "models with graph breaks on the ranks that are there"
        ) from error
    except Exception as error:
        raise PlanError(
            f"the model cannot run on these arguments: {type(error).__name__}: {one_line(error)}"
        ) from error


def cost_model_on(costs: CostModel, shape: MeshShape) -> CostModel:
    """``costs`` with the nodes of ``shape``."""
    return replace(costs, ranks_per_node=shape.ranks_per_node)
