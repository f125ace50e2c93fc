"""The communication of a two-block model, in the graphs that AOTAutograd makes of it."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.pipeline import rewrite
from compile_fsdp.passes.schedule import Policy
from compile_fsdp.passes.show import show
from tests.passes_support import TwoBlocks, registered, tokens, traced


def rewritten(model: TwoBlocks, kind: GraphKind, **policy: int) -> tuple[str, GraphModule]:
    with registered(*model.groups) as infos:
        module = traced(model, tokens(), *(group.shard for group in model.groups))[kind]
        schedule = rewrite(module.graph, infos, Policy(**policy), kind=kind)
    return str(schedule), module


def test_forward() -> None:
    schedule, module = rewritten(TwoBlocks(), GraphKind.FORWARD)
    assert_expected_inline(
        schedule,
        """\
forward: 3 unshard (800 B)
#  step     group     where             bytes  names  behind
0  unshard  root      at the start      256 B
1  unshard  blocks.0  before embedding  272 B  0      root
2  unshard  blocks.1  before embedding  272 B  1      root blocks.0
3  wait     root      before embedding         2
4  wait     blocks.0  before mul_1             3
5  release  blocks.0  after mm_1
6  wait     blocks.1  before mul_3             5
7  keep     blocks.1  after mm_3
8  keep     root      after mm_4""",
    )
    assert_expected_inline(
        show(module.graph),
        """\
full_root = unshard(primals_2)
full_blocks_0 = unshard(primals_3)  after full_root
full_blocks_1 = unshard(primals_4)  after full_blocks_0
wait(full_root)                     after full_blocks_1
    embedding ... mul (6)
wait(full_blocks_0)                 after full_root
    mul_1 ... mm_1 (4)
release(full_blocks_0)
    add_1 ... mul_2 (6)
wait(full_blocks_1)                 after full_blocks_0
    mul_3 ... mm_3 (4)
keep(full_blocks_1)
    add_3 ... mm_4 (2)
keep(full_root)
    logsumexp ... mean_2 (2)""",
    )


def test_backward() -> None:
    schedule, module = rewritten(TwoBlocks(), GraphKind.BACKWARD)
    assert_expected_inline(
        schedule,
        """\
backward: 1 unshard (272 B), 3 reduce (800 B)
 #  step             group     where                           bytes  names    behind
 0  unshard          root      at the start
 1  unshard          blocks.1  before mm_6                            0        root
 2  wait             root      before mm_6                            1
 3  release          root      after mm_6
 4  unshard          blocks.0  before mm_8                     272 B  3        blocks.1
 5  wait             blocks.1  before mm_8                            4
 6  release          blocks.1  after mul_6
 7  reduce_inner     blocks.1  after view_11                   272 B  6
 8  wait             blocks.0  before mm_12                           7
 9  release          blocks.0  after mul_14
10  reduce_inner     blocks.0  after view_16                   272 B  9
11  reduce_inner     root      after embedding_dense_backward  256 B  10
12  wait_reductions            at the end                             7 10 11""",
    )
    assert_expected_inline(
        show(module.graph),
        """\
full_root = unshard(primals_2)
    div ... mm_5 (5)
full_blocks_1 = unshard(primals_4)                              after full_root
wait(full_root)                                                 after full_blocks_1
    mm_6
release(full_root)
    mm_7
full_blocks_0 = unshard(primals_3)                              after full_root
wait(full_blocks_1)                                             after full_blocks_0
    mm_8 ... mul_6 (8)
release(full_blocks_1)
    sum_1
token_blocks_1 = reduce_inner(0: view_11, 1: t_16, 2: t_12)     after full_blocks_1
    mul_7 ... mm_11 (13)
wait(full_blocks_0)                                             after token_blocks_1
    mm_12 ... mul_14 (7)
release(full_blocks_0)
    sum_3
token_blocks_0 = reduce_inner(0: view_16, 1: t_24, 2: t_20)     after full_blocks_0
    mul_15 ... embedding_dense_backward (13)
token_root = reduce_inner(0: embedding_dense_backward, 1: t_8)  after token_blocks_0
wait_reductions(token_blocks_1, token_blocks_0, token_root)""",
    )


def test_backward_on_a_mesh_with_two_axes() -> None:
    _, module = rewritten(TwoBlocks(mesh_shape=(2, 2)), GraphKind.BACKWARD)
    assert_expected_inline(
        show(module.graph),
        """\
full_root = unshard(primals_2)
    div ... mm_5 (5)
full_blocks_1 = unshard(primals_4)                              after full_root
wait(full_root)                                                 after full_blocks_1
    mm_6
release(full_root)
    mm_7
full_blocks_0 = unshard(primals_3)                              after full_root
wait(full_blocks_1)                                             after full_blocks_0
    mm_8 ... mul_6 (8)
release(full_blocks_1)
    sum_1
token_blocks_1 = reduce_inner(0: view_11, 1: t_16, 2: t_12)     after full_blocks_1
    mul_7 ... mm_11 (13)
wait(full_blocks_0)                                             after token_blocks_1
    mm_12 ... mul_14 (7)
release(full_blocks_0)
    sum_3
token_blocks_0 = reduce_inner(0: view_16, 1: t_24, 2: t_20)     after full_blocks_0
outer_token_blocks_1 = reduce_outer(token_blocks_1)             after token_blocks_0
    mul_15 ... embedding_dense_backward (13)
token_root = reduce_inner(0: embedding_dense_backward, 1: t_8)  after outer_token_blocks_1
outer_token_blocks_0 = reduce_outer(token_blocks_0)             after token_root
outer_token_root = reduce_outer(token_root)                     after outer_token_blocks_0
wait_reductions(outer_token_blocks_1, outer_token_blocks_0, outer_token_root)""",
    )


def test_parameters_become_views_of_the_gathered_buffer() -> None:
    _, module = rewritten(TwoBlocks(), GraphKind.FORWARD)
    views = [
        f"{node.name} = {node.args[0].name}: {list(node.args[1])} at {node.args[3]}"
        for node in module.graph.nodes
        if node.target is torch.ops.aten.as_strided.default
    ]
    assert_expected_inline(
        "\n".join(views),
        """\
embedding_weight = full_root: [8, 4] at 0
head_weight = full_root: [8, 4] at 32
blocks_0_norm_weight = full_blocks_0: [4] at 0
blocks_0_up_weight = full_blocks_0: [8, 4] at 4
blocks_0_down_weight = full_blocks_0: [4, 8] at 36
blocks_1_norm_weight = full_blocks_1: [4] at 0
blocks_1_up_weight = full_blocks_1: [8, 4] at 4
blocks_1_down_weight = full_blocks_1: [4, 8] at 36""",
    )


def test_flat_shards_get_no_gradient_from_the_graph() -> None:
    _, module = rewritten(TwoBlocks(), GraphKind.BACKWARD)
    (returned,) = module.graph.output_node().args
    assert list(returned) == [None] * 4, "tokens and three flat shards"


def test_nothing_unsharded_is_saved_for_backward() -> None:
    """Backward takes the flat shards, which are the graph's inputs anyhow, and activations."""
    model = TwoBlocks()
    _, module = rewritten(model, GraphKind.FORWARD)
    shapes = [shape for group in model.groups for shape in group.info.shapes]
    (returned,) = module.graph.output_node().args
    saved = {node.name: tuple(node.meta["val"].shape) for node in returned[1:]}
    weights = {name: shape for name, shape in saved.items() if len(shape) > 1 and shape in shapes}
    assert not weights
