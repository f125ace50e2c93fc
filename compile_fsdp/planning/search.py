"""Try modes, meshes, budgets and prefetching, and rank the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compile_fsdp.passes.policy import Policy

from .capture import Captured, cost_model_on, recapture
from .errors import PlanError
from .predict import Prediction, predict
from .sharding import MODES
from .workload import Workload
from .world import MeshShape


@dataclass(frozen=True)
class Found:
    """One plan of a search.

    Attributes:
        mesh, mode, options: what it is a plan of; options as ``torch.compile`` takes them.
        plan: the numbers.
        fits: whether its peak is below the limit.
    """

    mesh: str
    mode: str
    options: str
    plan: Prediction
    fits: bool


def search(
    captured: Captured,
    workload: Workload,
    policy: Policy,
    optimizer: str,
    limit: int | None,
    progress: Callable[[str], None],
) -> list[Found]:
    """Plans of the same model on as many ranks, best first: those that fit, then by speed.

    Args:
        captured: a trace of it, on any mesh.
        workload: builds it for the other meshes.
        policy: its cost model is used.
        optimizer: see `predict`.
        limit: bytes that a rank may hold; None where nobody knows.
        progress: is told what is tried.
    """
    places = list(_places(captured.shape))
    found: list[Found] = []
    for number, (mode, shape) in enumerate(places, start=1):
        progress(f"{number}/{len(places)}: {mode} on {shape}")
        how = replace(captured.sharding, mode=mode)
        try:
            there = recapture(captured, workload, shape, how)
        except PlanError as error:
            progress(f"{mode} on {shape} is left out: {error}")
            continue
        found += _plans(there, policy, optimizer, limit)
    return sorted(found, key=lambda each: (not each.fits, -each.plan.rate))


def _plans(
    captured: Captured, policy: Policy, optimizer: str, limit: int | None
) -> Iterator[Found]:
    """The plans of one mesh and mode; of equal ones the one with fewer options."""
    own = replace(policy, costs=cost_model_on(policy.costs, captured.shape))
    seen: dict[tuple[float, int], None] = {}
    for options, candidate in _policies(own, limit):
        try:
            plan = predict(captured, candidate, optimizer)
        except PlanError:
            continue
        key = (plan.seconds.total, plan.memory.total)
        if key not in seen:
            seen[key] = None
            fits = limit is None or plan.memory.total <= limit
            mode = captured.sharding.mode
            mesh = str(captured.shape) if MODES[mode][0] == 2 else str(captured.shape.ranks)
            yield Found(mesh, mode, options, plan, fits)


def _policies(policy: Policy, limit: int | None) -> Iterator[tuple[str, Policy]]:
    plain = replace(policy, memory_budget="peak", prefetch=None)
    yield "defaults", plain
    if limit is not None:
        yield "keep what fits", replace(plain, memory_budget=limit)
    yield "memory_budget=unlimited", replace(plain, memory_budget="unlimited")
    for ahead in (1, 2):
        yield f"prefetch={ahead}", replace(plain, prefetch=ahead)


def _places(shape: MeshShape) -> Iterator[tuple[str, MeshShape]]:
    """Modes on one axis, then those on two with every way to cut the ranks by whole nodes."""
    ranks, node = shape.ranks, shape.ranks_per_node
    for mode, (axes, _) in MODES.items():
        if axes == 1:
            yield mode, replace(shape, outer=1, inner=ranks)
            continue
        inner = node
        while inner < ranks:
            if ranks % inner == 0:
                yield mode, replace(shape, outer=ranks // inner, inner=inner)
            inner *= 2
