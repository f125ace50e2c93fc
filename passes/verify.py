"""Prove that a rewritten graph is right, from the graph itself.

The verifier trusts neither the scheduler nor the writers. It compares the graph with the facts
found before the rewrite, and derives order the way a compiler may: from arguments alone. A node
runs after the nodes it takes as arguments, a write to memory after every earlier read and write
of it, a read after every earlier write. Nothing else keeps two nodes in the order they are
printed in, so an order that does not follow from this is there by luck, and is an error.

What is proven:

- no marker is left;
- every gathered buffer is gathered, waited for and released once, in this order;
- every reader reads what it read before, between the wait and the release;
- nothing gathered is returned or written to;
- every gradient is reduced once, each group at most once, and every reduction is waited for;
- flat shards get None for a gradient;
- only what the plan keeps for backward is kept, and only by a forward graph;
- communication stands in the planned order and at the planned places, and arguments keep it there;
- so many gathered bytes are live at each node as the plan says;
- what is gathered into an arena overlaps nothing that is there at the same time, and what is kept
  between forward and backward is where the other graph expects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from compile_fsdp.runtime.group_info import GroupInfo

from .aliases import AliasTree, alias_trees, written_arguments
from .arena_proof import VerificationError, check_places_in_arena
from .dependencies import Dependencies
from .facts import GraphFacts, GraphKind
from .gradients import graph_outputs
from .steps import Schedule, Step, Wait
from .targets import (
    ADD,
    AS_STRIDED,
    GATHER_TOGETHER,
    KEEP,
    REDUCE_INNER,
    REDUCE_OUTER,
    REDUCE_TOGETHER,
    RELEASE,
    UNSHARD,
    WAIT,
    WAIT_REDUCTIONS,
    ParameterKey,
    is_call,
    is_communication,
    is_gradient_marker,
    is_marker,
    op_name,
    parameter_key,
)
from .uses import group_facts

__all__ = ["VerificationError", "verify"]


def verify(
    graph: Graph, facts: GraphFacts, groups: Mapping[str, GroupInfo], schedule: Schedule
) -> None:
    """Check ``graph``, which was rewritten to follow ``schedule``.

    Args:
        graph: the rewritten graph.
        facts: what was found in it before.
        groups: description of every group of the model, by name.
        schedule: the plan.

    Raises:
        VerificationError: names the node and the parameter for which a proof fails.
    """
    rewritten = _Rewritten(graph, facts, groups, schedule)
    _check_no_markers(rewritten)
    _check_lifetimes(rewritten)
    _check_readers(rewritten)
    _check_gradients(rewritten)
    _check_reductions_end(rewritten)
    _check_kept(rewritten)
    _check_sequence(rewritten, schedule)
    _check_places(rewritten, schedule)
    _check_live_bytes(rewritten, schedule)
    _check_order_by_arguments(rewritten)
    check_places_in_arena(graph, facts, group_facts(groups), schedule)


class _Rewritten:
    """A rewritten graph with what all checks ask of it."""

    def __init__(
        self,
        graph: Graph,
        facts: GraphFacts,
        groups: Mapping[str, GroupInfo],
        schedule: Schedule,
    ) -> None:
        self.graph = graph
        self.facts = facts
        self.groups = groups
        self.nodes = list(graph.nodes)
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.communication = [node for node in self.nodes if is_communication(node)]
        self.buffers = alias_trees(graph, self.calls(UNSHARD))
        self.original = self._places_of_nodes_that_stayed(schedule)

    def _places_of_nodes_that_stayed(self, schedule: Schedule) -> dict[str, int]:
        """Position of each node before the rewrite, by name, but of views of parameters that stood
        before the wait and have moved behind it."""
        waits = {step.group: step.anchor for step in schedule.steps if isinstance(step, Wait)}
        first = {
            view.name: waits.get(_group_of(tree.root), 0)
            for tree in self.buffers
            for view in tree.aliases
        }
        return {
            name: position
            for position, name in enumerate(self.facts.names)
            if position >= first.get(name, self.facts.start)
        }

    def calls(self, *targets: object) -> list[Node]:
        """Communication nodes with one of the targets, in graph order."""
        return [node for node in self.communication if is_call(node, *targets)]

    def fqn(self, group: str, index: int) -> str:
        """The names of a parameter; all of them when it is tied."""
        return " = ".join(self.groups[group].fqns[index])


def _group_of(node: Node) -> str:
    """The group that a communication node names, for all but those that name several."""
    return cast(str, node.args[1])


# Gathered parameters ----------------------------------------------------------------------------


def _check_no_markers(graph: _Rewritten) -> None:
    for node in graph.nodes:
        unreduced = graph.facts.kind is GraphKind.BACKWARD and is_gradient_marker(node)
        if is_marker(node) or unreduced:
            fqn = graph.fqn(*parameter_key(node))
            raise VerificationError(f"marker {node.name} of {fqn} is left in the graph")


def _check_lifetimes(graph: _Rewritten) -> None:
    gathers = Counter(_group_of(tree.root) for tree in graph.buffers)
    for tree in graph.buffers:
        full, group = tree.root, _group_of(tree.root)
        if gathers[group] != 1:
            raise VerificationError(f"group {group!r} is gathered {gathers[group]} times")
        life = (full, _only_user(full, WAIT), _only_user(full, RELEASE, KEEP))
        if [graph.position[node] for node in life] != sorted(graph.position[n] for n in life):
            found = sorted(life, key=graph.position.__getitem__)
            raise VerificationError(
                f"buffer {full.name} of group {group!r} must be gathered, waited for and "
                f"released in this order; found {', '.join(node.name for node in found)}"
            )
        for node in life[1:]:
            if _group_of(node) != group:
                raise VerificationError(
                    f"{node.name} works on {full.name}, the buffer of group {group!r}, but "
                    f"names group {_group_of(node)!r}"
                )


def _check_kept(graph: _Rewritten) -> None:
    """What is kept outlives the graph: only a forward graph may, and only as planned."""
    allowed = graph.facts.kept if graph.facts.kind is GraphKind.FORWARD else ()
    for node in graph.calls(KEEP):
        if _group_of(node) not in allowed:
            raise VerificationError(
                f"{node.name} keeps group {_group_of(node)!r} unsharded behind this "
                f"{graph.facts.kind.value} graph, which keeps {list(allowed)}"
            )


def _only_user(full: Node, *targets: object) -> Node:
    """The one node that waits for, or releases, a gathered buffer."""
    found = [user for user in full.users if is_call(user, *targets) and user.args[0] is full]
    if len(found) != 1:
        raise VerificationError(
            f"buffer {full.name} of group {_group_of(full)!r} needs one "
            f"{' or '.join(map(str, targets))}, found "
            f"{[node.name for node in found]}"
        )
    return found[0]


def _check_readers(graph: _Rewritten) -> None:
    """Readers read what they read before, between the wait and the release."""
    found: dict[_Read, None] = {}
    for buffer in graph.buffers:
        full, group = buffer.root, _group_of(buffer.root)
        for user in full.users:
            if not (is_communication(user) or is_call(user, AS_STRIDED)):
                raise VerificationError(
                    f"node {user.name} uses the gathered buffer {full.name} of group {group!r} "
                    "directly, not through a view of one parameter"
                )
        _check_reads_in_lifetime(graph, buffer)
    for view in alias_trees(graph.graph, _parameter_views(graph)):
        place = _place(view.root)
        found.update({_Read(reader.name, place): None for reader in view.readers})
    expected = {
        _Read(reader, _place_of(graph, use.group, use.index)): None
        for use in graph.facts.parameters
        for reader in use.readers
    }
    for read in (*expected, *found):
        if (read in expected) != (read in found):
            was, now = ("read", "does not") if read in expected else ("did not read", "does")
            raise VerificationError(
                f"node {read.reader} {was} {_fqns_at(graph, read.place)} before the rewrite, "
                f"and {now} now"
            )


def _check_reads_in_lifetime(graph: _Rewritten, buffer: AliasTree) -> None:
    full = buffer.root
    wait, release = _only_user(full, WAIT), _only_user(full, RELEASE, KEEP)
    views = dict.fromkeys(buffer.aliases)
    for reader in buffer.readers:
        read = [argument for argument in reader.all_input_nodes if argument in views]
        if not read:
            continue
        if reader.op == "output":
            raise VerificationError(
                f"the graph returns {read[0].name}, a view of {_fqns_behind(graph, read[0])} in "
                f"the gathered buffer {full.name}, which {release.name} releases"
            )
        if not graph.position[wait] < graph.position[reader] < graph.position[release]:
            raise VerificationError(
                f"node {reader.name} reads {_fqns_behind(graph, read[0])} outside of "
                f"{wait.name} .. {release.name}"
            )
        if any(argument in views for argument in written_arguments(reader)):
            raise VerificationError(
                f"node {reader.name} writes to {_fqns_behind(graph, read[0])} in {full.name}"
            )


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a gathered buffer. Empty tensors may share a place."""

    group: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Read:
    """A reader, by name, and what it reads."""

    reader: str
    place: _Place


def _parameter_views(graph: _Rewritten) -> list[Node]:
    buffers = {tree.root: None for tree in graph.buffers}
    return [node for node in graph.nodes if is_call(node, AS_STRIDED) and node.args[0] in buffers]


def _place(view: Node) -> _Place:
    """What the ``as_strided`` node ``view`` views."""
    full, shape, stride, offset = cast(tuple[Any, ...], view.args)
    return _Place(_group_of(full), tuple(shape), tuple(stride), offset)


def _place_of(graph: _Rewritten, group: str, index: int) -> _Place:
    info = graph.groups[group]
    shape = tuple(info.shapes[index])
    stride = torch.empty(shape, device="meta").stride()
    return _Place(group, shape, stride, info.offsets[index])


def _fqns_behind(graph: _Rewritten, view: Node) -> str:
    """The parameter at the start of a chain of views."""
    while not is_call(cast(Node, view.args[0]), UNSHARD):
        view = cast(Node, view.args[0])
    return _fqns_at(graph, _place(view))


def _fqns_at(graph: _Rewritten, place: _Place) -> str:
    names = [
        graph.fqn(place.group, index)
        for index in range(len(graph.groups[place.group].shapes))
        if _place_of(graph, place.group, index) == place
    ]
    return " or ".join(names) or f"no parameter ({place})"


# Gradients --------------------------------------------------------------------------------------


def _check_gradients(graph: _Rewritten) -> None:
    """Every gradient is reduced once, as the parameter's that it belongs to."""
    expected = Counter(((use.group, use.index), use.gradient) for use in graph.facts.gradients)
    found: Counter[tuple[ParameterKey, str]] = Counter()
    known = dict.fromkeys(graph.facts.names)
    reduced: dict[str, Node] = {}
    for node, group, gradients, indices in _contributions(graph):
        if group in reduced:
            raise VerificationError(
                f"group {group!r} is reduced twice, by {reduced[group].name} and {node.name}"
            )
        reduced[group] = node
        if len(gradients) != len(indices) or len(set(indices)) != len(indices):
            raise VerificationError(
                f"{node.name} takes {len(gradients)} gradients for the tensors {list(indices)}"
            )
        for index, gradient in zip(indices, gradients, strict=True):
            found.update(((group, index), leaf) for leaf in _summands(gradient, known))
    for (key, name), count in ((expected - found) | (found - expected)).items():
        wanted = expected[key, name]
        raise VerificationError(
            f"gradient {name} of {graph.fqn(*key)} must be reduced {wanted} times, is "
            f"reduced {found[key, name]} times (difference {count})"
        )


def _contributions(graph: _Rewritten) -> Iterator[tuple[Node, str, list[Node], list[int]]]:
    """For each inner reduction and each of its groups the gradients and their indices."""
    for node in graph.calls(REDUCE_INNER, REDUCE_TOGETHER):
        if is_call(node, REDUCE_INNER):
            gradients, group, indices, _ = cast(tuple[Any, ...], node.args)
            yield node, group, gradients, indices
            continue
        gradients, names, counts, indices, _ = cast(tuple[Any, ...], node.args)
        if len(names) != len(counts) or not sum(counts) == len(gradients) == len(indices):
            raise VerificationError(
                f"{node.name} deals {len(gradients)} gradients for the tensors {list(indices)} "
                f"out to {names} by {counts}"
            )
        stops = list(accumulate(counts))
        for name, start, stop in zip(names, [0, *stops], stops, strict=False):
            yield node, name, gradients[start:stop], indices[start:stop]


def _summands(gradient: Node, known: Mapping[str, None]) -> list[str]:
    """The gradients of the original graph that the rewrite added up to ``gradient``."""
    names: list[str] = []
    stack = [gradient]
    while stack:
        node = stack.pop()
        if node.name not in known and is_call(node, ADD) and not node.kwargs:
            stack.extend(argument for argument in node.args if isinstance(argument, Node))
        else:
            names.append(node.name)
    return names


def _check_reductions_end(graph: _Rewritten) -> None:
    """Tokens go from the inner to the outer reduction, if there is one, to the final wait."""
    waits = graph.calls(WAIT_REDUCTIONS)
    inner = [(node, name) for node, name, _, _ in _contributions(graph)]
    if len(waits) != (1 if inner else 0):
        raise VerificationError(
            f"{len(inner)} reductions need {1 if inner else 0} wait_reductions, found {len(waits)}"
        )
    waited = [] if not waits else list(cast(list[Node], waits[0].args[0]))
    named = [] if not waits else list(cast(list[str], waits[0].args[1]))
    expected = {group: _last_token(graph, token, group) for token, group in inner}
    for group, token in expected.items():
        if token not in waited:
            raise VerificationError(
                f"{token.name}, a reduction of group {group!r}, is not waited for"
            )
    if len(waited) != len(set(expected.values())) or Counter(named) != Counter(expected.keys()):
        raise VerificationError(
            f"{waits[0].name} waits for {[token.name for token in waited]} in the name of {named}"
        )
    for number in graph.facts.gradient_outputs:
        if graph_outputs(graph.graph)[number] is not None:
            raise VerificationError(
                f"graph output {number} is the gradient of a flat shard and must be None, found "
                f"{graph_outputs(graph.graph)[number]}"
            )


def _last_token(graph: _Rewritten, token: Node, group: str) -> Node:
    """What stands for a finished reduction: the outer one's token where there are two axes."""
    users = [user for user in token.users if is_call(user, REDUCE_OUTER) and user.args[0] is token]
    outer = [user for user in users if _group_of(user) == group]
    wanted = 1 if graph.groups[group].finishes_later else 0
    strangers = [user for user in users if _group_of(user) not in _groups_of_node(token)]
    if len(outer) != wanted or strangers:
        raise VerificationError(
            f"{token.name} of group {group!r} needs {wanted} outer reductions of its group, found "
            f"{[node.name for node in users]}"
        )
    return outer[0] if outer else token


# Order ------------------------------------------------------------------------------------------


def _check_sequence(graph: _Rewritten, schedule: Schedule) -> None:
    planned = [(step.op, _groups_of_step(step)) for step in schedule.steps]
    written = [(op_name(node), _groups_of_node(node)) for node in graph.communication]
    for number, (plan, found) in enumerate(zip_longest(planned, written)):
        if plan != found:
            raise VerificationError(
                f"step {number} of the schedule is {plan}, the graph has {found}"
            )


def _check_places(graph: _Rewritten, schedule: Schedule) -> None:
    """Each step stands between the nodes that it was planned between."""
    steps = iter(schedule.steps)
    last = -1
    open_steps: list[tuple[Node, int]] = []
    for node in graph.nodes:
        if is_communication(node):
            anchor = next(steps).anchor
            if last >= anchor:
                raise VerificationError(
                    f"{node.name} stands behind {graph.facts.names[last]}, it was planned before "
                    f"{graph.facts.names[anchor]}"
                )
            open_steps.append((node, anchor))
        elif (position := graph.original.get(node.name)) is not None:
            for step, anchor in open_steps:
                if position < anchor:
                    raise VerificationError(
                        f"{step.name} stands before {node.name}, it was planned behind it, before "
                        f"{graph.facts.names[anchor]}"
                    )
            open_steps.clear()
            last = max(last, position)


def _check_live_bytes(graph: _Rewritten, schedule: Schedule) -> None:
    """As many bytes are gathered while each node runs as the plan's curve says."""
    known = {name: group.gather_bytes for name, group in schedule.groups.items()}
    taken_over = graph.facts.kept if graph.facts.is_backward else ()
    live = {name: known[name] for name in taken_over if name in known}
    for node in graph.nodes:
        if is_call(node, UNSHARD):
            live[_group_of(node)] = known[_group_of(node)]
        elif is_call(node, RELEASE):
            live.pop(_group_of(node), None)
        elif (position := graph.original.get(node.name)) is not None:
            planned = schedule.memory.gathered[position]
            if sum(live.values()) != planned:
                raise VerificationError(
                    f"{sum(live.values())} gathered bytes are live at {node.name} "
                    f"({', '.join(live)}), the plan says {planned}"
                )


def _groups_of_step(step: Step) -> tuple[str, ...]:
    return step.names


def _groups_of_node(node: Node) -> tuple[str, ...]:
    if is_call(node, GATHER_TOGETHER, REDUCE_TOGETHER, WAIT_REDUCTIONS):
        return tuple(cast(list[str], node.args[1]))
    return (_group_of(node),)


def _check_order_by_arguments(graph: _Rewritten) -> None:
    """Each step depends on the one before it, whatever order a compiler chooses.

    A release takes no order arguments: reads hold it back, and the next step must depend on it.
    The last ``wait_reductions`` is held back by its tokens, checked above.
    """
    earlier_steps = Dependencies(graph.nodes, graph.communication, graph.buffers)
    pending: list[Node] = []
    for node in graph.communication:
        if is_call(node, WAIT_REDUCTIONS):
            continue
        if not is_call(node, RELEASE, KEEP):
            for earlier in pending:
                if not earlier_steps.of(node, earlier):
                    raise VerificationError(
                        f"{node.name} of group {_group_of(node)!r} follows {earlier.name} of "
                        f"group {_group_of(earlier)!r} by luck: no argument keeps it there"
                    )
            pending.clear()
        pending.append(node)
