"""Which nodes share the memory of a parameter, and which read it.

A view costs nothing and reads nothing: whoever consumes it does. So a parameter is read not
where its marker's users stand but where the chains of views that start there end.

    marker -> t -> view -> mm        read by mm
           -> _to_copy -> mm         read by _to_copy, which has memory of its own

What is a view is asked of the op's schema, not of a list of names: ``Tensor(a)`` in both an
argument and a return. Ops that alias in fact but not by schema (``aten._unsafe_view``) are
recognised by the storage of their fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument
from torch.multiprocessing.reductions import StorageWeakRef

from .torch_internals import op_schema


@dataclass
class AliasTree:
    """A root node and everything that shares its memory.

    Attributes:
        root: the node that owns the memory.
        aliases: views of it, directly or through other views, in graph order.
        readers: nodes that take the root or an alias and are no view of it, in graph order.
    """

    root: Node
    aliases: list[Node] = field(default_factory=list)
    readers: list[Node] = field(default_factory=list)

    @property
    def members(self) -> Iterator[Node]:
        """The root and its aliases, in graph order."""
        yield self.root
        yield from self.aliases


def alias_trees(graph: Graph, roots: Iterable[Node]) -> list[AliasTree]:
    """The alias tree of each of ``roots``, in one walk over ``graph``.

    Roots must not be views of each other. A node with two roots among its arguments is listed
    in both trees.
    """
    trees = {root: AliasTree(root) for root in roots}
    owners: dict[Node, tuple[AliasTree, ...]] = {root: (tree,) for root, tree in trees.items()}
    for node in graph.nodes:
        if node in trees:
            continue
        shared: dict[Node, AliasTree] = {}
        for argument in node.all_input_nodes:
            for tree in owners.get(argument, ()):
                if is_view_of(node, argument):
                    shared[tree.root] = tree
                elif not tree.readers or tree.readers[-1] is not node:
                    tree.readers.append(node)
        for tree in shared.values():
            tree.aliases.append(node)
        if shared:
            owners[node] = tuple(shared.values())
    return list(trees.values())


def is_view_of(node: Node, argument: Node) -> bool:
    """Whether the result of ``node``, or a part of it, shares memory with ``argument``."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    return argument in _arguments_viewed(node) or _share_storage(node, argument)


def written_arguments(node: Node) -> tuple[Node, ...]:
    """The arguments that ``node`` writes to, by its schema."""
    return tuple(
        argument
        for schema, value in _bound_arguments(node)
        if schema.alias_info is not None and schema.alias_info.is_write
        for argument in _nodes_in(value)
    )


def _arguments_viewed(node: Node) -> tuple[Node, ...]:
    """The arguments that the schema of ``node`` lets a result alias."""
    schema = op_schema(node.target)
    if schema is None:
        return ()
    names = {
        name
        for result in schema.returns
        if result.alias_info is not None
        for name in result.alias_info.before_set
    }
    return tuple(
        argument
        for parameter, value in _bound_arguments(node)
        if (info := parameter.alias_info) is not None
        # Ops that return a list of views (split, unbind) say "*" instead of a name.
        and (names & info.before_set or "*" in info.after_set)
        for argument in _nodes_in(value)
    )


def _bound_arguments(node: Node) -> Iterator[tuple[torch.Argument, Argument]]:
    """The arguments of a call with what the schema says about each; none for other nodes."""
    schema = op_schema(node.target)
    if node.op != "call_function" or schema is None:
        return
    for number, parameter in enumerate(schema.arguments):
        if number < len(node.args):
            yield parameter, node.args[number]
        elif parameter.name in node.kwargs:
            yield parameter, node.kwargs[parameter.name]


def _nodes_in(value: Argument) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _nodes_in(item)


def _share_storage(node: Node, argument: Node) -> bool:
    return bool(_storages(node) & _storages(argument))


def _storages(node: Node) -> set[StorageWeakRef]:
    """The storages behind the fake results of ``node``; none when it was not traced."""
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else (value,)
    return {
        StorageWeakRef(result.untyped_storage())
        for result in results
        if isinstance(result, torch.Tensor) and result.layout is torch.strided
    }
