"""Read a graph: which parameters it reads, which gradients it produces. Changes nothing.

Before the passes a graph speaks of parameters in markers:

    weight = parameter(shard, group, index)              a full parameter, from nowhere
    part = parameter_grad(gradient, group, index)        a full gradient, to nowhere

Who reads a parameter is found by `aliases`, what is a gradient of it by `gradients`; this module
makes facts of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch.fx import Graph, Node

from compile_fsdp.runtime.group_info import GroupInfo

from .aliases import AliasTree, alias_trees
from .facts import GradientUse, GraphFacts, GraphKind, GroupFacts, ParameterUse
from .gradients import (
    GradientSum,
    find_gradient_sums,
    gradients_by_parameter,
    marked_gradient,
)
from .targets import ParameterKey, has_tangents, is_kept, is_marker, is_primal, parameter_key
from .workload import node_facts


@dataclass(frozen=True)
class GraphUses:
    """What the passes found in a graph: facts for the scheduler, nodes for the writers.

    Attributes:
        facts: the plain part.
        nodes: the graph's nodes by position.
        position: the inverse of ``nodes``.
        shards: the graph input that holds a group's flat shard, by group.
        markers: alias trees of the parameter markers in graph order, by group.
        gradients: nodes of the gradients of each parameter, in the order in which autograd adds
            them up; a node may occur twice.
        sums: the sums that stand for gradients of flat shards.
    """

    facts: GraphFacts
    nodes: tuple[Node, ...]
    position: Mapping[Node, int]
    shards: Mapping[str, Node]
    markers: Mapping[str, tuple[AliasTree, ...]]
    gradients: Mapping[ParameterKey, tuple[Node, ...]]
    sums: tuple[GradientSum, ...]


def find_uses(graph: Graph, groups: Mapping[str, GroupInfo], kind: GraphKind) -> GraphUses:
    """Find every use of a parameter group in ``graph``.

    Args:
        graph: a forward, backward or inference graph of AOTAutograd's. No view of a marker may
            leave it (see `unshard.clone_escaping_views`).
        groups: description of every group of the model, by name.
        kind: which graph this is.

    Raises:
        RuntimeError: a marker names an unknown group or tensor, its shard is no graph input, or
            a gradient is used for something else than the sum that autograd makes of it.
    """
    nodes = tuple(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    trees = alias_trees(graph, [node for node in nodes if is_marker(node)])
    sums = find_gradient_sums(graph) if kind is GraphKind.BACKWARD else []
    for marker in (*(tree.root for tree in trees), *(part for s in sums for part in s.parts)):
        _check_marker(marker, groups)

    parameters = [_parameter_use(tree, position) for tree in trees if tree.readers]
    gradients = [
        GradientUse(*parameter_key(part), gradient.name, position[gradient])
        for total in sums
        for part in total.parts
        for gradient in (marked_gradient(part),)
    ]
    facts = GraphFacts(
        kind=kind,
        names=tuple(node.name for node in nodes),
        start=next(number for number, node in enumerate(nodes) if node.op != "placeholder"),
        parameters=tuple(sorted(parameters, key=lambda use: use.first)),
        gradients=tuple(gradients),
        gradient_outputs=tuple(total.output for total in sums if not total.rest),
        nodes=node_facts(
            nodes, held_inputs(nodes, kind), until=_waiting(gradients, gradients_by_parameter(sums))
        ),
        kept=_kept_groups(trees, kind),
    )
    return GraphUses(
        facts=facts,
        nodes=nodes,
        position=position,
        shards=_shards(trees),
        markers=_by_group(trees),
        gradients=gradients_by_parameter(sums),
        sums=tuple(sums),
    )


def held_inputs(nodes: Sequence[Node], kind: GraphKind) -> dict[Node, None]:
    """The graph inputs that the caller holds on to while the graph runs: all but what a backward
    graph is given of its forward's results, and tangents."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    return {node: None for node in inputs if kind is not GraphKind.BACKWARD or is_primal(node)}


def graph_kind(graph: Graph, is_inference: bool) -> GraphKind:
    """Which of AOTAutograd's graphs ``graph`` is."""
    if has_tangents(graph):
        return GraphKind.BACKWARD
    return GraphKind.INFERENCE if is_inference else GraphKind.FORWARD


def group_facts(groups: Mapping[str, GroupInfo]) -> dict[str, GroupFacts]:
    """What a schedule may depend on, of each group."""
    # Equal on all ranks, which the ranks themselves are not.
    meshes: dict[object, int] = {}
    numbers = {
        name: meshes.setdefault((info.ranks, info.mesh_shape), len(meshes))
        for name, info in groups.items()
    }
    return {
        name: GroupFacts(
            name=name,
            label=info.label,
            gather_bytes=info.full_bytes if info.gathers else 0,
            reduce_bytes=info.full_numel * info.grad_comm_dtype.itemsize,
            finishes_later=info.finishes_later,
            reduces_inner=info.gathers or not info.finishes_later,
            numel=info.full_numel,
            dtype=str(info.dtype).removeprefix("torch."),
            mesh_shape=info.mesh_shape,
            state_bytes=_state_bytes(info),
            mergeable=f"{info.dtype} {numbers[name]}",
            reduces_with=_reduces_with(info, numbers[name]),
        )
        for name, info in groups.items()
    }


def _reduces_with(info: GroupInfo, mesh: int) -> str | None:
    if info.reduced_axis is None:
        return None
    model = info.name.partition("/")[0]
    return f"{info.grad_comm_dtype} {model} {mesh} {info.reduced_axis}"


def _state_bytes(info: GroupInfo) -> int:
    """An even share of weight and gradient: what a rank really holds may differ between ranks."""
    ranks = info.mesh_shape[-1] if info.gathers else 1
    gradient = info.grad_comm_dtype.itemsize if info.requires_grad else 0
    return -(-info.full_numel // ranks) * (info.dtype.itemsize + gradient)


def _waiting(
    uses: Sequence[GradientUse], nodes: Mapping[ParameterKey, tuple[Node, ...]]
) -> dict[Node, int]:
    """Until when each gradient waits to be packed: right after the last one of its group."""
    last: dict[str, int] = {}
    for use in uses:
        last[use.group] = max(last.get(use.group, 0), use.position)
    return {node: last[group] + 1 for (group, _), each in nodes.items() for node in each}


def _kept_groups(trees: Sequence[AliasTree], kind: GraphKind) -> tuple[str, ...]:
    """Nothing comes after an evaluation."""
    if kind is GraphKind.INFERENCE:
        return ()
    kept = (parameter_key(tree.root)[0] for tree in trees if is_kept(tree.root))
    return tuple(dict.fromkeys(kept))


def _parameter_use(tree: AliasTree, position: Mapping[Node, int]) -> ParameterUse:
    group, index = parameter_key(tree.root)
    return ParameterUse(
        group=group,
        index=index,
        readers=tuple(reader.name for reader in tree.readers),
        first=position[tree.readers[0]],
        last=position[tree.readers[-1]],
    )


def _shards(trees: Sequence[AliasTree]) -> dict[str, Node]:
    """The flat shard of each group, which must be a graph input: gathers may go anywhere."""
    shards: dict[str, Node] = {}
    for tree in trees:
        group, _ = parameter_key(tree.root)
        shard = cast(Node, tree.root.args[0])
        if shard.op != "placeholder":
            raise RuntimeError(
                f"the flat shard of parameter group {group!r} is computed in the graph by node "
                f"{shard.name} ({shard.format_node()}); it must be a graph input"
            )
        shards.setdefault(group, shard)
    return shards


def _by_group(trees: Sequence[AliasTree]) -> dict[str, tuple[AliasTree, ...]]:
    groups: dict[str, list[AliasTree]] = {}
    for tree in trees:
        groups.setdefault(parameter_key(tree.root)[0], []).append(tree)
    return {group: tuple(members) for group, members in groups.items()}


def _check_marker(marker: Node, groups: Mapping[str, GroupInfo]) -> None:
    group, index = parameter_key(marker)
    if group not in groups:
        known = ", ".join(sorted(groups)) or "none"
        raise RuntimeError(
            f"node {marker.name} names the parameter group {group!r}, which the compiled model "
            f"does not have (groups: {known}); compile the module that was sharded"
        )
    if not 0 <= index < len(groups[group].shapes):
        raise RuntimeError(
            f"node {marker.name} names tensor {index} of parameter group {group!r}, which has "
            f"{len(groups[group].shapes)} tensors; was the model sharded again after compiling?"
        )
