"""A small explanation made by hand: what the tests of its forms show.

Forward of an embedding and one block: the block is gathered while the embedding computes.
"""

from __future__ import annotations

from compile_fsdp.explanation import (
    CollectiveTotal,
    Decision,
    Explanation,
    GraphBreak,
    GraphExplanation,
    MemoryPoint,
    ModelledTime,
    ParameterGroup,
    PlannedStep,
    Recompile,
    Span,
)

KIB = 1024


def _group(label: str, fqns: tuple[str, ...], kib: int) -> ParameterGroup:
    return ParameterGroup(
        name=f"0/{label}/0",
        label=label,
        fqns=tuple((fqn,) for fqn in fqns),
        shapes=tuple((16, 8) for _ in fqns),
        dtype="float32",
        gradient_dtype="float32",
        trainable=True,
        gather_bytes=kib * KIB,
        reduce_bytes=kib * KIB,
        shard_bytes=kib * KIB // 2,
        gather_axis="dp",
        inner_axis="dp",
        inner_kind="reduce_scatter",
    )


ROOT = _group("root", ("embedding.weight",), 2)
BLOCK = _group("block", ("block.up.weight", "block.down.weight", "block.<odd>.weight"), 6)
BLOCK_FQNS = tuple(names[0] for names in BLOCK.fqns)

STEPS = (
    PlannedStep(
        *(0, "unshard", "root", ("embedding.weight",), 2 * KIB, "dp", "at the start", 2),
        reason="gathered first: nothing computes before it",
        end=40.0,
    ),
    PlannedStep(
        *(1, "unshard", "block", BLOCK_FQNS, 6 * KIB, "dp", "before embedding", 2),
        names=(0,),
        overlaps=("root",),
        reason="prefetched 1 group ahead",
        start=40.0,
        end=90.0,
    ),
    PlannedStep(
        *(2, "wait", "root", ("embedding.weight",), 0, "", "before embedding", 2),
        names=(1,),
        reason="read from here on",
        exposed=40.0,
    ),
    PlannedStep(
        *(3, "release", "root", ("embedding.weight",), 0, "", "after embedding", 3),
        issued=60.0,
        start=60.0,
        end=60.0,
    ),
    PlannedStep(
        *(4, "wait", "block", BLOCK_FQNS, 0, "", "before mm", 3),
        names=(3,),
        reason="read from here on",
        issued=60.0,
        start=60.0,
        end=60.0,
        exposed=30.0,
    ),
    PlannedStep(
        *(5, "release", "block", BLOCK_FQNS, 0, "", "after mm", 4),
        issued=120.0,
        start=120.0,
        end=120.0,
    ),
)

FORWARD = GraphExplanation(
    number=0,
    kind="forward",
    compile_id="0/0",
    where="model.py:7 in forward: return self.block(self.embedding(x))",
    calls=2,
    schedule="forward: 2 unshard (8.0 KiB)",
    steps=STEPS,
    spans=(
        Span("compute", 40.0, 60.0, "root", "embedding", None, 0, ("embedding.weight",)),
        Span("compute", 90.0, 120.0, "block", "mm", None, 0, BLOCK_FQNS),
        Span("gather", 0.0, 40.0, "root", "at the start", 0, 2 * KIB, ("embedding.weight",)),
        Span("gather", 40.0, 90.0, "block", "before embedding", 1, 6 * KIB, BLOCK_FQNS),
    ),
    collectives=(CollectiveTotal("all_gather", "gather", "dp", 2, 8 * KIB),),
    memory=(
        MemoryPoint(0.0, 0, 2 * KIB, 0),
        MemoryPoint(40.0, KIB, 8 * KIB, 0),
        MemoryPoint(60.0, KIB, 6 * KIB, 0),
        MemoryPoint(120.0, KIB, 0, 0),
    ),
    decisions=(Decision("block", "released: keeping it would raise the peak"),),
    time=ModelledTime("cpu+gloo", 50.0, 90.0, 70.0, 120.0),
    time_unit="us",
    state_bytes=8 * KIB,
    budget=64 * KIB,
    node_count=5,
    before="primals_1: f32[64]\nembedding: f32[2, 8] = aten.embedding(parameter, primals_2)",
    after="primals_1: f32[64]\nfull_root: f32[128] = compile_fsdp.unshard(primals_1, '0//0', [])",
    communication="full_root = unshard(primals_1)\n    embedding",
)

HAND_MADE = Explanation(
    torch_version="2.13.0",
    world_size=2,
    groups=(ROOT, BLOCK),
    graphs=(FORWARD,),
    breaks=(
        GraphBreak(
            "Call to `print`\n  Explanation: <b>not</b> traced.\n",
            "/home/me/model.py",
            9,
            "forward",
            'print("loss & more")',
            "0/0",
        ),
    ),
    recompiles=(Recompile("0/1", "0/0: tensor 'x' size mismatch", "model.py:7 in forward: x"),),
)
