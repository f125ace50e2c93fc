"""Hypothesis strategies for `tests.configurations.Configuration`."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis
import torch
from hypothesis import strategies as st

from tests.configurations import DRIVERS, Configuration, ModuleSpec, ParameterSpec

MESHES = ((2,), (3,), (2, 2), (4,), (1,), (1, 2), (2, 1))

_MOST_ELEMENTS = 48
_DIMS = (4, 5, 1, 2, 3, 7, 8, 11, 5, 2, 0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """0-D to 4-D: primes, single rows, fewer rows than ranks, nothing at all."""
    shape: list[int] = []
    for _ in range(draw(st.sampled_from((2, 1, 2, 3, 1, 2, 4, 3, 0)))):
        dim = draw(st.sampled_from(_DIMS))
        shape.append(dim if math.prod(shape) * dim <= _MOST_ELEMENTS else 1)
    return tuple(shape)


def parameters(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[ParameterSpec]:
    """A parameter of one of ``dtypes``, mostly trainable and used."""
    return st.builds(
        ParameterSpec,
        shape=shapes(),
        dtype=st.sampled_from(dtypes),
        trainable=st.sampled_from((True, True, True, False)),
        use=st.sampled_from(("always", "always", "always", "always", "last microbatch", "never")),
        transposed=st.sampled_from((False, False, False, True)),
    )


def modules(
    dtypes: tuple[torch.dtype, ...], children: st.SearchStrategy[ModuleSpec] | None, is_root: bool
) -> st.SearchStrategy[ModuleSpec]:
    """A module of up to four parameters."""
    return st.builds(
        ModuleSpec,
        parameters=st.lists(parameters(dtypes), min_size=1, max_size=4).map(tuple),
        children=st.just(()) if children is None else st.lists(children, max_size=2).map(tuple),
        sharded=st.just(True) if is_root else st.sampled_from((True, True, True, False)),
        checkpointed=st.just("no")
        if is_root
        else st.sampled_from(("no", "no", "nonreentrant", "reentrant")),
        times=st.just(1) if is_root else st.sampled_from((1, 1, 1, 2)),
        grad_scale=st.sampled_from((1.0, 1.0, 0.5, 2.0)),
    )


@st.composite
def models(draw: st.DrawFn) -> ModuleSpec:
    """A root with up to two blocks, each with up to two modules in it; one dtype, or two mixed."""
    fp32, bf16 = torch.float32, torch.bfloat16
    dtypes = draw(st.sampled_from(((fp32,), (fp32,), (bf16,), (fp32, bf16))))
    leaves = modules(dtypes, None, is_root=False)
    blocks = modules(dtypes, leaves, is_root=False)
    return draw(modules(dtypes, blocks, is_root=True))


def sharded_axes(axes: int) -> st.SearchStrategy[tuple[int, int, int]]:
    """Any legal row of the placement table: the optimizer is sharded most. ZeRO-3 and HSDP are
    the simplest."""
    rows = [
        (parameter, gradient, optimizer)
        for optimizer in range(axes + 1)
        for parameter in range(optimizer + 1)
        for gradient in range(optimizer + 1)
    ]
    return st.sampled_from(sorted(rows, key=lambda row: row != (1, 1, 1)))


@st.composite
def ties(draw: st.DrawFn, model: ModuleSpec) -> tuple[tuple[str, str], ...]:
    """At most one tie, between two parameters of one owner."""
    if draw(st.sampled_from((False, False, True))):
        by_owner: dict[str, list[str]] = {}
        owners: dict[str, str] = {}
        for fqn, module in model.modules():
            above = fqn.rpartition(".children_.")[0] if fqn.count("children_") > 1 else ""
            owners[fqn] = fqn if module.sharded else owners[above]
            start = f"{fqn}." if fqn else ""
            names = [f"{start}p{number}" for number in range(len(module.parameters))]
            by_owner.setdefault(owners[fqn], []).extend(names)
        candidates = [names for names in by_owner.values() if len(names) > 1]
        if candidates:
            first, second = draw(
                st.permutations(draw(st.sampled_from(candidates))).map(lambda names: names[:2])
            )
            return ((first, second),)
    return ()


def toggled(model: ModuleSpec) -> st.SearchStrategy[tuple[str, ...]]:
    """Mostly nothing, or some of the parameters."""
    some = st.lists(st.sampled_from(Configuration(model).fqns()), unique=True, max_size=4)
    return st.one_of(st.just(()), st.just(()), some.map(tuple))


dtypes_of_policy = st.sampled_from((None, None, torch.float32, torch.bfloat16, torch.float64))


@st.composite
def configurations(
    draw: st.DrawFn,
    drivers: tuple[str, ...] = DRIVERS,
    meshes: tuple[tuple[int, ...], ...] = MESHES,
) -> Configuration:
    """Any legal configuration whose sums are exact."""
    mesh = draw(st.sampled_from(meshes))
    axes = draw(sharded_axes(len(mesh)))
    promises = ["row", "row", "2 rows", "3 rows"]
    if len(mesh) == 1 and axes[2] > 0:
        promises += ["tensor", "tensor on rank 0"]
    model = draw(models())
    drawn = Configuration(
        model=model,
        mesh=mesh,
        sharded_axes=axes,
        promise=draw(st.sampled_from(promises)),
        packed=draw(st.booleans()),
        ties=draw(ties(model)),
        toggled=draw(toggled(model)),
        main_params=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, None))),
        main_grads=draw(dtypes_of_policy),
        grad_comm=draw(dtypes_of_policy),
        driver=draw(st.sampled_from(drivers)),
        prefetch=draw(st.integers(0, 2)),
        optimizer=draw(st.sampled_from(("sgd", "adamw"))),
        prepared=draw(st.booleans()),
        zero=draw(st.sampled_from(("drop", "in place", "never"))),
        microbatches=draw(st.integers(1, 3)),
        flagged=draw(st.booleans()),
        samples=draw(st.integers(1, 2)),
        input_gradient=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return legalised(drawn)


def without_reentrant_checkpoints(model: ModuleSpec) -> ModuleSpec:
    """``model`` with the other kind of activation checkpointing."""
    kind = "no" if model.checkpointed == "no" else "nonreentrant"
    children = tuple(without_reentrant_checkpoints(child) for child in model.children)
    return replace(model, checkpointed=kind, children=children)


def without_eager_checkpoints(model: ModuleSpec, is_compiled: bool = False) -> ModuleSpec:
    """``model`` without checkpoints of modules that are compiled alone: torch itself recomputes
    with another graph there (https://github.com/pytorch/pytorch/issues/166926)."""
    children = (
        replace(child, checkpointed=child.checkpointed if is_compiled else "no")
        for child in model.children
    )
    return replace(
        model,
        children=tuple(
            without_eager_checkpoints(child, is_compiled or child.sharded) for child in children
        ),
    )


def spread(
    count: int, seed: int, drivers: tuple[str, ...] = DRIVERS, apart: int = 3
) -> list[Configuration]:
    """``count`` configurations that do not resemble one another: hypothesis varies what it has
    drawn before, so every so many-th of a longer sequence is taken."""
    drawn: list[Configuration] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count * apart,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(configurations(drivers))
    def collect(configuration: Configuration) -> None:
        drawn.append(configuration)

    collect()
    return list(dict.fromkeys(drawn[::-apart]))[:count]


def legalised(configuration: Configuration) -> Configuration:
    """The nearest configuration that is exact and that PyTorch allows."""
    kinds = {module.checkpointed for _, module in configuration.model.modules()}
    if "reentrant" in kinds:
        # Its inputs must require gradients, and Dynamo does not trace it.
        if configuration.driver == "eager":
            configuration = replace(configuration, input_gradient=True)
        else:
            model = without_reentrant_checkpoints(configuration.model)
            configuration = replace(configuration, model=model)
    if configuration.driver == "compiled blocks":
        model = without_eager_checkpoints(configuration.model)
        configuration = replace(configuration, model=model)
    if not configuration.prepared and not configuration.can_step_unprepared:
        configuration = replace(configuration, prepared=True)
    for change in (
        {"zero": "drop"},
        {"samples": 1},
        {"microbatches": 2},
        {"microbatches": 1},
        {"ties": ()},
        {"main_grads": torch.float32, "grad_comm": torch.float32},
    ):
        if configuration.is_exact:
            break
        if change != {"zero": "drop"} or configuration.zero == "never":
            configuration = replace(configuration, **change)
    return configuration
