"""Every private torch name that the passes lean on, with the reason.

Inductor is imported inside functions: importing compile_fsdp must not pull it in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule


def op_schema(target: object) -> torch.FunctionSchema | None:
    """The schema of an op in a graph, None when ``target`` is no operator overload.

    Aliasing and mutation are declared in schemas; the class of overloads and the attribute are
    both private, although every FX pass in torch itself reads them.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._schema
    return None


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    config_patches: Mapping[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under the given config.

    ``torch._inductor.compile`` is the documented spelling, but wants an exported graph. This is
    what ``torch.compile(backend="inductor")`` calls; it keeps the config for the backward graph,
    which is compiled later. ``inner_compile`` compiles each graph, None: Inductor does.
    """
    from torch._inductor.compile_fx import compile_fx

    inner = inductor_inner_compile if inner_compile is None else inner_compile
    # The other types of its result are for ahead-of-time compilation.
    return cast(
        Callable[..., Any],
        compile_fx(gm, inputs, inner_compile=inner, config_patches=dict(config_patches)),
    )


def inductor_inner_compile(gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
    """How Inductor compiles one of AOTAutograd's graphs: its passes, then code."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, inputs, **settings)


def custom_graph_pass() -> type[Any]:
    """Base class of a pass that Inductor may cache results of."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def inference_aware_graph_pass() -> type[Any]:
    """As `custom_graph_pass`, for a pass that is also told whether a graph is for inference.

    torch 2.11 does not tell. There the class is one of ours, and the pass is called without.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
    except ImportError:
        return type("InferenceAwareGraphPass", (custom_graph_pass(),), {})
    return CustomInferenceAwareGraphPass


def inductor_config_value(name: str) -> Any:
    """A value of Inductor's global config: a user may have passes of their own there."""
    from torch._inductor import config

    return getattr(config, name)


def aot_autograd_compile(
    gm: GraphModule, inputs: Sequence[Any], **compilers: Any
) -> Callable[..., Any]:
    """Trace a Dynamo graph into forward and backward and hand each to its compiler.

    ``compilers`` are the keyword arguments of ``functorch.compile.aot_module_simplified``. This
    wrapper, which PyTorch's guide to custom backends recommends, also keeps Dynamo out of the
    backward compiler and of what it returns.
    """
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(**compilers)(gm, inputs)
    return compiled


def fixed_inputs_and_results() -> tuple[list[int], int]:
    """Of the forward or inference graph that AOTAutograd compiles now: which inputs stay in one
    place (parameters and buffers), and how many outputs the program gets to see.

    Only AOTAutograd's own record of the graph says so; Inductor reads it for its CUDA graphs.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        raise AssertionError("AOTAutograd compiles without a tracing context")
    metadata = context.fw_metadata
    return list(metadata.static_input_indices), int(metadata.num_forward)


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The table by which Inductor has operators written out before its own passes; no public
    name makes it."""
    from torch._inductor.decomposition import select_decomp_table

    return cast(Mapping[Any, Callable[..., Any]], select_decomp_table())


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``run`` as taking one list of arguments, which it may clear while it runs.

    AOTAutograd asks for it by this attribute. ``functorch.compile.make_boxed_func`` sets it
    too, but holds on to all arguments, so no activation is freed during backward.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def lower_opaque_op(op: Any, lowering: Callable[..., Any]) -> None:
    """Have Inductor call ``lowering(call, ...)`` for ``op``; ``call(...)`` is its default.

    Lowerings are Inductor's only hook with access to its buffers.
    """
    from torch._inductor.lowering import fallback_handler, register_lowering

    call = fallback_handler(op)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return lowering(call, *args, **kwargs)

    register_lowering(op, type_promotion_kind=None)(lower)


def exclude_from_reuse(buffer: Any) -> None:
    """Never give the memory of ``buffer`` to another tensor of the graph that is being lowered.

    Inductor keeps this list for storages that are resized.
    """
    from torch._inductor.virtualized import V

    V.graph.never_reuse_buffers.add(buffer.get_name())


def declare_aligned(buffer: Any) -> None:
    """Let code that reads ``buffer`` count on addresses that are multiples of 16 bytes.

    Inductor takes the result of an opaque op for unaligned when any argument of it may be, also one
    that is there for the order only, and loads from it in smaller pieces. It keeps a list of names.
    """
    from torch._inductor.virtualized import V

    V.graph.unaligned_buffers.discard(buffer.get_name())


def evaluate_reads_of(buffer: Any) -> None:
    """Give every pending read of ``buffer`` its place in the order now.

    Inductor calls this itself for a mutation, but for opaque ops too late.
    """
    from torch._inductor.virtualized import V

    V.graph.mark_buffer_mutated(buffer.get_name())


@functools.cache
def _packed_buffer_type() -> type[Any]:
    from torch._inductor.ir import ConcatKernel

    class PackedBuffer(ConcatKernel):  # type: ignore[misc, unused-ignore]
        def get_inputs_that_alias_output(self) -> Sequence[str]:
            """The pieces are parts of it. Inductor frees what has an alias, and gives its memory
            to no other tensor: who reads this buffer last may go on when the graph does."""
            first: Any = self.inputs[0]
            return [first.get_name()]

    return PackedBuffer


def packed_into_one(
    pieces: Sequence[Any],
    in_place: Sequence[bool],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
) -> Any:
    """One flat buffer of the graph that is being lowered, with each piece at its offset.

    Args:
        pieces: values in Inductor's form; those of another dtype are cast.
        in_place: for each piece whether nobody else reads it, so that its only memory may be here.
        offsets: in elements, one for each piece; contiguous pieces do not overlap.
        numel: elements of the buffer. What no piece covers is uninitialised.
        dtype: of the buffer.

    Such a piece, as long as its memory layout is open, is computed where it belongs; others are
    copied there. That is how Inductor lowers ``torch.cat``, whose pieces must lie side by side and
    agree in all sizes but one; matrices of a flat buffer do not.
    """
    from torch._inductor.ir import (
        ConcatKernel,
        FixedLayout,
        FlexibleLayout,
        Pointwise,
        ReinterpretView,
        StorageBox,
        TensorBox,
    )
    from torch._inductor.lowering import to_dtype
    from torch._inductor.virtualized import V

    device = pieces[0].get_device()
    parts: list[Any] = []
    layout = FixedLayout(device, dtype, [numel], [1])
    kernel = _packed_buffer_type()(name=None, layout=layout, inputs=parts)
    whole = StorageBox(kernel)
    for piece, alone, offset in zip(pieces, in_place, offsets, strict=True):
        size = piece.get_size()
        strides = FlexibleLayout.contiguous_strides(size)
        place = ReinterpretView(
            data=whole, layout=FixedLayout(device, dtype, size, strides, offset)
        )
        value = to_dtype(piece, dtype)
        if value is piece and not alone:
            loader = piece.make_loader()
            value = Pointwise.create(device=device, dtype=dtype, inner_fn=loader, ranges=size)
        parts.append(ConcatKernel.realize_into(value, place))
    kernel.name = V.graph.register_buffer(kernel)
    kernel.inputs = ConcatKernel.unwrap_storage(parts)
    V.graph.register_operation(kernel)
    return TensorBox(whole)


def arguments_being_lowered() -> tuple[Any, ...]:
    """Arguments, as they are in the graph, of the node that a lowering is called for."""
    from torch._inductor.virtualized import V

    return cast("tuple[Any, ...]", V.graph.current_node.args)


SIZE_HINT = 512
"""What a symbolic size counts as where an estimate needs a number; see `hinted_size`."""


def hinted_size(size: int | torch.SymInt) -> int:
    """``size``, or for a symbolic one its value with every symbol at `SIZE_HINT`.

    torch's own hint is the size that this process saw first, which may differ between ranks. The
    expression behind a SymInt is reachable by its node only.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    value = expression.xreplace(dict.fromkeys(expression.free_symbols, SIZE_HINT))
    try:
        return max(int(value), 0)
    except TypeError:
        return SIZE_HINT


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text to the trace that ``TORCH_TRACE`` asks for; ``payload`` is called only then.

    Args:
        name: of the file that ``tlparse`` makes of it.
        encoding: ``"string"`` or ``"json"``.
        payload: makes the text.

    Structured traces have no public writer. Where a graph is rewritten outside of a compilation,
    as in a test, the text goes to no compilation.
    """
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )
