"""Read the facts of a training step off its graphs and change nothing: for plans without a run.

The graphs are those that are compiled, up to Inductor's own passes on the forward and backward
graph. What is kept between them is not decided here: it changes no fact but ``kept`` (see
`joint`), so plans with any options, and with groups of any mesh, can be made of one trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from compile_fsdp.runtime.group_info import GroupInfo

from .facts import GraphFacts, GraphKind
from .joint import joint_facts
from .keep import JointFacts
from .recompute import mark_recompute
from .torch_internals import aot_autograd_compile, boxed, inductor_decompositions
from .unshard import clone_escaping_views
from .uses import find_uses


@dataclass(frozen=True)
class StepFacts:
    """Everything that is known about the graphs of one forward and its backward.

    Attributes:
        joint: of both in one; None where nothing is differentiated.
        graphs: forward and backward, or inference alone; with no group kept.
    """

    joint: JointFacts | None
    graphs: tuple[GraphFacts, ...]


def trace_step(
    gm: GraphModule,
    inputs: Sequence[Any],
    groups: Mapping[str, GroupInfo],
    *,
    whole_model: bool = True,
    decompose: bool = True,
) -> StepFacts:
    """The facts of a Dynamo graph with parameter markers.

    Backward graphs must be asked for with the forward graph (see
    ``compile_fsdp.torch_internals.compiling_aside``).

    Args:
        gm: the graph.
        inputs: fake or real inputs, as Dynamo passes them to a backend.
        groups: description of every group that the graph may read, by name.
        whole_model: ``groups`` are all groups of the model.
        decompose: write operators out as Inductor does; False: as the inner compiler aot_eager.
    """
    from functorch.compile import (  # type: ignore[import-untyped]
        min_cut_rematerialization_partition,
    )

    joints: list[JointFacts] = []
    graphs: list[GraphFacts] = []

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        parameters = mark_recompute(joint.graph)
        joints.append(joint_facts(joint.graph, parameters, whole_model=whole_model))
        if decompose:
            kwargs["compiler"] = "inductor"
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    def reader(kind: GraphKind) -> Any:
        def read(graph_module: GraphModule, _: Sequence[Any]) -> Any:
            clone_escaping_views(graph_module.graph)
            facts = find_uses(graph_module.graph, groups, kind).facts
            graphs.append(replace(facts, packs_in_place=decompose))
            return boxed(_not_to_be_run)

        return read

    aot_autograd_compile(
        gm,
        inputs,
        fw_compiler=reader(GraphKind.FORWARD),
        bw_compiler=reader(GraphKind.BACKWARD),
        inference_compiler=reader(GraphKind.INFERENCE),
        partition_fn=partition,
        keep_inference_input_mutations=True,
        decompositions=inductor_decompositions() if decompose else None,
    )
    order = list(GraphKind)
    graphs.sort(key=lambda facts: order.index(facts.kind))
    return StepFacts(joints[0] if joints else None, tuple(graphs))


def _not_to_be_run(_: list[Any]) -> Any:
    raise RuntimeError("this graph was traced to be planned; it cannot be run")
