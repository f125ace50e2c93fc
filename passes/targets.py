"""The ops that the passes look for and write, and how to recognise them in a graph."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

import compile_fsdp.runtime.ops  # noqa: F401  (defines the ops)

ParameterKey = tuple[str, int]
"""Group name and index of the tensor in the group."""

_ops = torch.ops.compile_fsdp

PARAMETER: Any = _ops.parameter.default
PARAMETER_GRAD: Any = _ops.parameter_grad.default

GATHER_TOGETHER: Any = _ops.gather_together.default
UNSHARD: Any = _ops.unshard.default
WAIT: Any = _ops.wait.default
RELEASE: Any = _ops.release.default
KEEP: Any = _ops.keep.default
REDUCE_INNER: Any = _ops.reduce_inner.default
REDUCE_TOGETHER: Any = _ops.reduce_together.default
REDUCE_OUTER: Any = _ops.reduce_outer.default
WAIT_REDUCTIONS: Any = _ops.wait_reductions.default

COMMUNICATION = (
    GATHER_TOGETHER,
    UNSHARD,
    WAIT,
    RELEASE,
    KEEP,
    REDUCE_INNER,
    REDUCE_TOGETHER,
    REDUCE_OUTER,
    WAIT_REDUCTIONS,
)

AS_STRIDED: Any = torch.ops.aten.as_strided.default
CLONE: Any = torch.ops.aten.clone.default
ADD: Any = torch.ops.aten.add.Tensor


def is_call(node: Node, *targets: Any) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return node.op == "call_function" and node.target in targets


def op_name(node: Node) -> str:
    """Name of the op that a communication node calls: ``"unshard"``, ``"wait"``, ..."""
    return str(node.target).split(".")[1]


def is_marker(node: Node) -> bool:
    """Whether ``node`` stands for a full parameter that nobody has gathered yet."""
    return is_call(node, PARAMETER)


def is_gradient_marker(node: Node) -> bool:
    """Whether ``node`` stands for a full gradient that nobody has reduced yet."""
    return is_call(node, PARAMETER_GRAD)


def parameter_key(marker: Node) -> ParameterKey:
    """The parameter that a marker, or a gradient marker, stands for."""
    _, group, index, *_ = marker.args
    return cast(str, group), cast(int, index)


def is_kept(marker: Node) -> bool:
    """Whether the joint graph decided to keep the group of a marker for the backward graph."""
    return bool(marker.args[3]) if len(marker.args) > 3 else False


def is_communication(node: Node) -> bool:
    """Whether ``node`` is scheduled communication."""
    return is_call(node, *COMMUNICATION)


def is_tangent(node: Node) -> bool:
    """Whether ``node`` is a gradient that comes into a joint or backward graph.

    AOTAutograd says so by the placeholder's name alone, and its own partitioner asks it so.
    """
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_primal(node: Node) -> bool:
    """Whether ``node`` is an input of the forward graph, in whatever graph it has come into; by its
    name, as `is_tangent`."""
    return node.op == "placeholder" and "primals" in str(node.target)


def has_tangents(graph: Graph) -> bool:
    """Whether ``graph`` is AOTAutograd's joint graph or a backward graph of it.

    False for the bodies of higher-order ops, also for those that compute gradients.
    """
    return any(is_tangent(node) for node in graph.find_nodes(op="placeholder"))
