"""How Inductor must treat a gathered buffer: memory that is not its own, and that goes away.

Inductor takes the result of an opaque op for a fresh allocation, and moves reads of it freely
unless it sees a mutation. Two lowerings tell it what it cannot know:

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
    What it reduces is one flat buffer. Inductor gets to make it, and has each gradient computed in
    its place there: a matrix product writes it once, and nobody copies it.

Importing this module imports Inductor, so only a compilation imports it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from compile_fsdp.runtime.registry import registry

from .torch_internals import (
    declare_aligned,
    evaluate_reads_of,
    exclude_from_reuse,
    lower_opaque_op,
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
        info = registry.lookup(group).info
        offsets = [info.offsets[index] for index in indices]
        numel, dtype = info.full_numel, info.grad_comm_dtype
        packed = packed_into_one(gradients, offsets, numel, dtype)
        # The reduction reads it for longer than the graph knows.
        exclude_from_reuse(packed)
        return call([packed], group, indices, after, True)

    ops = torch.ops.compile_fsdp
    lower_opaque_op(ops.reduce_inner.default, reduce_inner)
    lower_opaque_op(ops.unshard.default, unshard)
    lower_opaque_op(ops.wait.default, mutate)
    lower_opaque_op(ops.release.default, mutate)
    lower_opaque_op(ops.keep.default, mutate)
