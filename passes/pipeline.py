"""The order of the passes, and the two compilers that they are plugged into.

                joint graph              forward, backward or inference graph
    what        mark_recompute           find_uses -> plan -> write_schedule -> verify
    Inductor    joint_custom_pre_pass    post_grad_custom_post_pass
    aot_eager   before the partitioner   as the compiler

A rewritten graph is a pure function of (graph, groups, policy), and so is the key under which a
compiler may cache it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch.fx import Graph, GraphModule, Interpreter

from compile_fsdp.runtime import group_info, ops
from compile_fsdp.runtime.group_info import GroupInfo

from .artifacts import publish
from .capturable import CaptureFacts, capture_facts
from .emit import write_schedule
from .facts import GraphKind
from .joint import decide_keeping, keeping_noted
from .listing import listing
from .policy import Policy
from .recompute import mark_recompute
from .schedule import plan
from .steps import Schedule
from .tally import check_gradients, note_gradients
from .torch_internals import aot_autograd_compile, boxed, inductor_compile
from .unshard import clone_escaping_views
from .uses import find_uses, graph_kind, group_facts
from .verify import verify as verify_graph


class Observer(Protocol):
    """Is told about every graph that is rewritten; for tests and for people."""

    def __call__(self, kind: GraphKind, before: str, schedule: Schedule, after: Graph) -> None:
        """``before`` is the `listing` of the graph before the rewrite; ``after`` is the graph
        itself, which the compiler goes on to change: read it now."""


class Captures(Protocol):
    """Captures what graphs do on the device."""

    device_type: str
    """Of the parameters: what all inputs of a graph must be on."""

    def take(self, facts: CaptureFacts, run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        """What to call instead of ``run``, which takes a list that it may clear."""


@dataclass(frozen=True)
class PassOptions:
    """Everything that the passes of one compilation depend on beside the graph.

    Attributes:
        groups: description of every group that the graph may read, by name.
        policy: what the user asked of the schedule.
        verify: whether to prove each rewritten graph right.
        observer: told about each rewritten graph.
        whole_model: ``groups`` are all groups of the model: nothing else of it runs between a
            forward and its backward.
        captures: takes the compiled graphs over, to capture and repeat their runs.
        packs_in_place: the compiler has gradients computed in the buffer that is reduced.
    """

    groups: Mapping[str, GroupInfo]
    policy: Policy
    verify: bool = False
    observer: Observer | None = None
    whole_model: bool = False
    captures: Captures | None = None
    packs_in_place: bool = False

    def prepare(self, joint: Graph) -> None:
        """`prepare_joint_graph` with these options."""
        prepare_joint_graph(joint, self.groups, self.policy, whole_model=self.whole_model)

    def rewrite(self, graph: Graph, kind: GraphKind) -> None:
        """`rewrite` one graph with these options."""
        before = "" if self.observer is None else listing(graph)
        schedule = rewrite(
            graph,
            self.groups,
            self.policy,
            kind=kind,
            verify=self.verify,
            packs_in_place=self.packs_in_place,
        )
        publish(before, schedule, graph)
        if self.observer is not None:
            self.observer(kind, before, schedule, graph)

    @functools.cached_property
    def cache_key(self) -> str:
        """Changes whenever the passes could write another graph: with their sources, the policy,
        and each group's layout, mesh shape and dtypes. Equal in every run."""
        digest = hashlib.sha256()
        for path in _sources():
            digest.update(path.read_bytes())
        groups = sorted(self.groups.items())
        shared = [group.mergeable for group in group_facts(self.groups).values()]
        # A graph that is to be captured must come through the compiler: not out of AOTAutograd's
        # cache, which holds graphs that nobody has taken over.
        captured = self.captures is not None
        digest.update(repr((self.policy, self.whole_model, groups, shared, captured)).encode())
        return digest.hexdigest()


def rewrite(
    graph: Graph,
    groups: Mapping[str, GroupInfo],
    policy: Policy,
    *,
    kind: GraphKind | None = None,
    verify: bool = True,
    packs_in_place: bool = False,
) -> Schedule:
    """Replace the parameter markers of ``graph`` by scheduled communication, in place.

    Args:
        graph: a forward, backward or inference graph of AOTAutograd's, with fake values.
        groups: description of every group that the graph may read, by name.
        policy: what the user asked of the schedule.
        kind: which graph it is; None looks at its inputs, and takes inference for forward.
        verify: prove the result right.
        packs_in_place: see `PassOptions`.

    Returns:
        The schedule that the graph follows now; without steps, the graph is as before.

    Raises:
        RuntimeError: the graph uses a parameter in a way that has no meaning (see `find_uses`).
        VerificationError: the proof failed.
    """
    kind = graph_kind(graph, is_inference=False) if kind is None else kind
    clone_escaping_views(graph)
    uses = find_uses(graph, groups, kind)
    check_gradients(graph, uses)
    facts = replace(uses.facts, packs_in_place=packs_in_place)
    schedule = plan(facts, group_facts(groups), policy, keeping_noted(graph))
    write_schedule(graph, uses, groups, schedule)
    if verify:
        verify_graph(graph, facts, groups, schedule)
    graph.lint()
    return schedule


def prepare_joint_graph(
    graph: Graph, groups: Mapping[str, GroupInfo], policy: Policy, *, whole_model: bool = False
) -> None:
    """What must be known before a joint graph is split into forward and backward.

    Arguments as of `PassOptions`.
    """
    parameters = mark_recompute(graph)
    note_gradients(graph)
    decide_keeping(graph, parameters, groups, policy, whole_model=whole_model)


def compile_with_inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    groups: Mapping[str, GroupInfo],
    policy: Policy,
    verify: bool = False,
    observer: Observer | None = None,
    whole_model: bool = False,
    captures: Captures | None = None,
    config_patches: Mapping[str, Any] | None = None,
    plan_only: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, communication included.

    Args:
        gm: the graph, with parameter markers.
        inputs: fake or real inputs, as Dynamo passes them to a backend.
        groups, policy, verify, observer, whole_model, captures: see `PassOptions`.
        config_patches: Inductor config values for this compilation. Custom passes given here, or
            in Inductor's global config, run before these passes.
        plan_only: stop when the graphs are planned, for people who want to see them. The result
            computes the same, operator by operator, and follows no schedule: it gathers and
            frees each parameter where it is read.

    Returns:
        A callable with the graph's signature.
    """
    from . import lowerings
    from .inductor import CapturedGraphs, PlanOnly, with_passes

    lowerings.register()
    options = PassOptions(
        groups, policy, verify, observer, whole_model, captures, packs_in_place=True
    )
    plan_only_compiler = PlanOnly() if plan_only else None
    patches = with_passes(options, config_patches or {}, plan_only_compiler)
    if captures is not None and not plan_only:
        return inductor_compile(gm, inputs, patches, CapturedGraphs(captures))
    return inductor_compile(gm, inputs, patches, plan_only_compiler)


def compile_with_aot_eager(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    groups: Mapping[str, GroupInfo],
    policy: Policy,
    verify: bool = False,
    observer: Observer | None = None,
    whole_model: bool = False,
    captures: Captures | None = None,
    plan_only: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph into forward and backward graphs that run op by op.

    Ops are not decomposed, so results are bitwise equal to eager mode. Arguments and result as
    of `compile_with_inductor`.
    """
    from functorch.compile import (  # type: ignore[import-untyped]
        min_cut_rematerialization_partition,
    )

    options = PassOptions(groups, policy, verify, observer, whole_model, captures)

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        options.prepare(joint.graph)
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    def compiler(kind: GraphKind) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Any:
            module = with_graph_of_its_own(gm) if plan_only else gm
            facts = None
            if captures is not None:
                facts = capture_facts(gm, kind, captures.device_type)
            options.rewrite(gm.graph, kind)
            module.recompile()
            run = boxed(lambda arguments: Interpreter(module).boxed_run(arguments))
            return run if captures is None or facts is None else boxed(captures.take(facts, run))

        return compile_graph

    return aot_autograd_compile(
        gm,
        inputs,
        fw_compiler=compiler(GraphKind.FORWARD),
        bw_compiler=compiler(GraphKind.BACKWARD),
        inference_compiler=compiler(GraphKind.INFERENCE),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def with_graph_of_its_own(gm: GraphModule) -> GraphModule:
    """A module that computes what ``gm`` computes now, whatever becomes of its graph."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def _sources() -> list[Path]:
    """The files that decide what a rewritten graph says and means."""
    passes = sorted(Path(__file__).resolve().parent.glob("*.py"))
    return [*passes, Path(str(ops.__file__)), Path(str(group_info.__file__))]
