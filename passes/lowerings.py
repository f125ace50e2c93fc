"""How Inductor must treat buffers of the runtime: gathered weights, and packed gradients.

Inductor takes the result of an opaque op for a fresh allocation, and moves reads of it freely
unless it sees a mutation. Lowerings tell it what it cannot know:

``unshard``
    The buffer belongs to the runtime, which takes its memory away at ``release``. Inductor must
    never give that memory to another tensor after the last read. It is aligned, as whole
    allocations are, and parameters in it start at multiples of 16 bytes.

``wait``, ``release``, ``keep``
    Pointwise reads are kept unevaluated until something needs them. Before a buffer is mutated
    Inductor evaluates the pending reads of it, but for an opaque op it does so when that op has
    its place in the order already (seen on torch 2.13): a LayerNorm's read of its weight came
    after the weight's release. Evaluating them first puts them where the graph has them.

``reduce_inner``
    What it reduces is one flat buffer. Inductor gets to make it, and has each gradient that nobody
    else reads computed in its place there: a matrix product writes it once, and nobody copies it.
    The graph lets go of the buffer after the operator, and the runtime holds it until it has been
    reduced.

Importing this module imports Inductor, so only a compilation imports it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from compile_fsdp.runtime.registry import registry

from .torch_internals import (
    arguments_being_lowered,
    declare_aligned,
    evaluate_reads_of,
    exclude_from_reuse,
    inductor_config_value,
    lower_opaque_op,
    op_schema,
    packed_into_one,
)


@functools.cache
def register() -> None:
    """Register the lowerings with Inductor; idempotent."""

    def unshard(call: Any, *args: Any, **where: Any) -> Any:
        full = call(*args, **where)
        exclude_from_reuse(full)
        declare_aligned(full)
        return full

    def mutate(call: Any, full: Any, *args: Any) -> Any:
        evaluate_reads_of(full)
        return call(full, *args)

    def reduce_inner(call: Any, gradients: Any, group: str, indices: Any, after: Any) -> Any:
        if inductor_config_value("memory_planning"):
            # An allocator that is off by default, and gives freed memory away whosever it was.
            return call(gradients, group, indices, after)
        info = registry.lookup(group).info
        offsets = [info.offsets[index] for index in indices]
        in_place = [_has_one_reader(node) for node in arguments_being_lowered()[0]]
        numel, dtype = info.full_numel, info.grad_comm_dtype
        packed = packed_into_one(gradients, in_place, offsets, numel, dtype)
        return call([packed], group, indices, after, True)

    ops = torch.ops.compile_fsdp
    lower_opaque_op(ops.reduce_inner.default, reduce_inner)
    lower_opaque_op(ops.unshard.default, unshard)
    lower_opaque_op(ops.wait.default, mutate)
    lower_opaque_op(ops.release.default, mutate)
    lower_opaque_op(ops.keep.default, mutate)


def _has_one_reader(node: Node) -> bool:
    """Whether ``node`` computes a value of its own that one node reads. (Where two parameters have
    the same gradient that one reads it twice: it is computed in one of its places, and copied.)"""
    schema = op_schema(node.target)
    if schema is None or len(node.users) != 1:
        return False
    return all(result.alias_info is None for result in schema.returns)
