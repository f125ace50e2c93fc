"""Compiled end to end, in one process, on groups that hold NaN where nothing may be read.

Inductor takes seconds for what aot_eager does in a moment, so it runs where it could differ.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from compile_fsdp.passes import pipeline
from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.pipeline import PassOptions
from compile_fsdp.passes.schedule import Policy
from compile_fsdp.passes.steps import GroupStep, Schedule, WaitReductions
from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.ops import recorded_steps
from tests.passes_support import (
    VOCABULARY,
    WIDTH,
    Observed,
    StubGroup,
    TwoBlocks,
    registered,
    tokens,
)

INNER = {
    "aot_eager": pipeline.compile_with_aot_eager,
    "inductor": pipeline.compile_with_inductor,
}
both = pytest.mark.parametrize("inner", INNER)


def compiled(
    function: Callable[..., Any], inner: str, *groups: StubGroup, **options: Any
) -> Callable[..., Any]:
    """``function`` compiled in one graph, every rewritten graph verified."""
    options = {"policy": Policy(), "verify": True, "observer": Observed(), **options}
    options["groups"] = {group.info.name: group.info for group in groups}
    if inner == "inductor":  # a graph from the cache is not rewritten, so not observed
        options["config_patches"] = {"fx_graph_cache": False, **options.get("config_patches", {})}
    backend = functools.partial(INNER[inner], **options)
    wrapped: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)
    return wrapped


def assert_equal(found: Any, expected: Any, inner: str) -> None:
    """Bitwise for aot_eager, which runs the same kernels; within rounding for Inductor."""
    exact = {"rtol": 0.0, "atol": 0.0} if inner == "aot_eager" else {}
    torch.testing.assert_close(found, expected, **exact)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> Iterator[TwoBlocks]:
    two_blocks = TwoBlocks()
    with registered(*two_blocks.groups):
        yield two_blocks


def planned(schedule: Schedule) -> list[tuple[str, str | list[str]]]:
    """The steps of a schedule as `recorded_steps` lists executed ones."""
    steps: list[tuple[str, str | list[str]]] = []
    for step in schedule.steps:
        if isinstance(step, GroupStep):
            steps.append((step.op, step.group))
        elif isinstance(step, WaitReductions):
            steps.append((step.op, list(step.groups)))
    return steps


@pytest.mark.compat
@pytest.mark.parametrize(
    ("inner", "prefetch"), [("aot_eager", 0), ("aot_eager", 1), ("aot_eager", 2), ("inductor", 1)]
)
def test_training_computes_what_the_plain_model_computes(
    inner: str, prefetch: int, model: TwoBlocks
) -> None:
    loss, gradients = model.reference(tokens())
    run = compiled(model, inner, *model.groups, policy=Policy(prefetch=prefetch))
    found = run(tokens(), *(group.shard for group in model.groups))
    found.backward()
    assert_equal(found.detach(), loss, inner)
    assert_equal(model.gradients(), gradients, inner)
    assert all(group.holders == 0 for group in model.groups)
    assert all(group.shard.grad is None for group in model.groups)


@pytest.mark.compat
@both
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_steps_run_in_the_planned_order(inner: str, mesh_shape: tuple[int, ...]) -> None:
    model = TwoBlocks(mesh_shape=mesh_shape)
    seen = Observed()
    with registered(*model.groups), recorded_steps() as executed:
        run = compiled(model, inner, *model.groups, observer=seen)
        run(tokens(), *(group.shard for group in model.groups)).backward()
    expected = planned(seen.schedule(GraphKind.FORWARD))
    expected += planned(seen.schedule(GraphKind.BACKWARD))
    assert [(step.op, step.group) for step in executed] == expected
    reduced = 1 if len(mesh_shape) > 1 else 0
    assert [group.outer_reductions for group in model.groups] == [reduced] * 3


@both
def test_inference(inner: str, model: TwoBlocks) -> None:
    loss, _ = model.reference(tokens())
    seen = Observed()
    run = compiled(model, inner, *model.groups, observer=seen)
    shards = [group.shard for group in model.groups]
    with torch.no_grad():
        assert_equal(run(tokens(), *shards), loss, inner)
    assert seen.kinds == [GraphKind.INFERENCE]
    with torch.inference_mode():
        assert_equal(run(tokens(), *shards), loss, inner)
    run(tokens(), *shards).backward()
    assert all(group.holders == 0 for group in model.groups)


@both
def test_two_sequence_lengths_share_a_graph(inner: str, model: TwoBlocks) -> None:
    seen = Observed()
    run = compiled(model, inner, *model.groups, observer=seen)
    for length in (6, 10, 14):
        batch = torch.arange(2 * length).remainder(VOCABULARY).view(2, length)
        torch._dynamo.mark_dynamic(batch, 1)
        loss, gradients = model.reference(batch)
        for group in model.groups:
            group.gradients = [None] * len(group.gradients)
        found = run(batch, *(group.shard for group in model.groups))
        found.backward()
        assert_equal(found.detach(), loss, inner)
        assert_equal(model.gradients(), gradients, inner)
    assert seen.kinds == [GraphKind.FORWARD, GraphKind.BACKWARD]


# One parameter, several reads -------------------------------------------------------------------


@pytest.fixture
def square() -> Iterator[StubGroup]:
    group = StubGroup("a", {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)})
    with registered(group):
        yield group


def gradients_by_autograd(
    group: StubGroup, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What plain tensors give; ``function`` takes the inputs, then each tensor of the group."""
    plain = [group.copy_full_parameter(n).requires_grad_() for n in range(len(group.info.shapes))]
    output = function(*inputs, *plain)
    return output.detach(), list(torch.autograd.grad(output, plain, allow_unused=True))


def run_marked(
    group: StubGroup,
    function: Callable[..., torch.Tensor],
    inner: str,
    *inputs: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Forward and backward of ``function`` on markers; every read gets a marker of its own."""
    marked: Any = torch.ops.compile_fsdp.parameter

    def read(*arguments: torch.Tensor) -> torch.Tensor:
        *given, shard = arguments
        parameters = (marked(shard, group.info.name, n) for n in range(len(group.info.shapes)))
        return function(*given, *parameters)

    output: torch.Tensor = compiled(read, inner, group, **options)(*inputs, group.shard)
    output.backward()
    return output.detach()


REUSES: dict[str, Callable[..., torch.Tensor]] = {
    "in a chain": lambda x, w, b: (((x @ w).sin() @ w).sin() @ w + b).sum(),
    "with equal gradients": lambda x, w, b: (x @ (w + w) + b).sum() + w.sum() + w.sum(),
    "as a factor of itself": lambda x, w, b: (w * w).sum() + (x * b).sum(),
    "and the bias not at all": lambda x, w, b: (x @ w).cos().sum(),
    "as each other's gradient": lambda x, w, b: (w * b).sum() + x.sum(),
    "with gradients that go on": lambda x, w, b: ((x.T @ x) * b + w).cos().sum() + (x + b).sum(),
}


@pytest.mark.parametrize(
    ("inner", "reuse"),
    [
        *(("aot_eager", name) for name in REUSES),
        ("inductor", "in a chain"),
        *(
            pytest.param("inductor", name, marks=pytest.mark.slow)
            for name in REUSES
            if name != "in a chain"
        ),
    ],
)
def test_gradients_of_all_reads_are_reduced_once(inner: str, reuse: str, square: StubGroup) -> None:
    function = REUSES[reuse]
    x = torch.randn(3, WIDTH)
    output, gradients = gradients_by_autograd(square, function, x)
    assert_equal(run_marked(square, function, inner, x), output, inner)
    assert_equal(square.gradients, gradients, inner)
    assert len(square.reductions) == 1


def test_a_gradient_that_goes_on_is_not_overwritten_where_it_is_reduced() -> None:
    """The gradient of the first weight is a product, is reduced, and only then multiplied by
    something for the last time: where Inductor would write the result into its memory."""
    groups = [StubGroup(name, {"w": torch.randn(WIDTH, WIDTH)}) for name in ("a", "b", "c")]
    marked: Any = torch.ops.compile_fsdp.parameter

    def function(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        a, b, c = (
            marked(shard, group.info.name, 0) for shard, group in zip(shards, groups, strict=True)
        )
        return (((x @ c).sin() + a) @ b).sin().sum()

    x = torch.randn(WIDTH, WIDTH)
    plain = [group.copy_full_parameter(0).requires_grad_() for group in groups]
    a, b, c = plain
    expected = torch.autograd.grad((((x @ c).sin() + a) @ b).sin().sum(), plain)
    with registered(*groups):
        run = compiled(function, "inductor", *groups)
        run(x, *(group.shard for group in groups)).backward()
    for group, gradient in zip(groups, expected, strict=True):
        assert_equal(group.gradients, [gradient], "inductor")
        ((packed, before),) = group.handed_over
        assert torch.equal(packed, before)


@both
def test_two_markers_whose_gradients_are_equal_count_twice(inner: str, square: StubGroup) -> None:
    """They are merged before the backward graph is made, and must not be halved."""

    def function(shard: torch.Tensor) -> torch.Tensor:
        first = torch.ops.compile_fsdp.parameter(shard, square.info.name, 0)
        second = torch.ops.compile_fsdp.parameter(shard, square.info.name, 0)
        return first.sum() + second.sum()

    compiled(function, inner, square)(square.shard).backward()
    assert_equal(square.gradients[0], torch.full((WIDTH, WIDTH), 2.0), inner)


def test_where_inductor_plans_memory_nothing_is_packed_in_place(square: StubGroup) -> None:
    """Its planner would give the memory of what is being reduced to others."""
    x = torch.randn(3, WIDTH)
    function = REUSES["in a chain"]
    output, gradients = gradients_by_autograd(square, function, x)
    with inductor_config.patch(memory_planning=True):
        assert_equal(run_marked(square, function, "inductor", x), output, "inductor")
    assert_equal(square.gradients, gradients, "inductor")
    assert not square.handed_over


@both
def test_a_gradient_that_two_parameters_share_is_reduced_for_both(inner: str) -> None:
    group = StubGroup("a", {name: torch.randn(WIDTH, WIDTH) for name in ("a", "b")})
    x = torch.randn(WIDTH, WIDTH)

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a + b) @ x).sin().sum()

    output, gradients = gradients_by_autograd(group, function, x)
    with registered(group):
        assert_equal(run_marked(group, function, inner, x), output, inner)
    assert_equal(group.gradients, gradients, inner)


# What leaves the graph --------------------------------------------------------------------------


@both
def test_parameters_that_are_returned_are_copies(inner: str, square: StubGroup) -> None:
    """Their memory outlives the release, which fills the buffer with NaN."""

    def function(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = torch.ops.compile_fsdp.parameter(shard, square.info.name, 0)
        b = torch.ops.compile_fsdp.parameter(shard, square.info.name, 1)
        return w, w.t(), b[1:], (w + b).sum()

    w, t, b, total = compiled(function, inner, square)(square.shard)
    expected = square.copy_full_parameter(0), square.copy_full_parameter(1)
    assert_equal((w, t, b), (expected[0], expected[0].t(), expected[1][1:]), inner)
    (total + w.sum() + b.sum()).backward()
    # By w: the total and w itself; by b: WIDTH rows, and b itself but for its first element.
    assert_equal(square.gradients[0], torch.full((WIDTH, WIDTH), 2.0), inner)
    assert_equal(square.gradients[1], torch.tensor([4.0, 5.0, 5.0, 5.0]), inner)
    assert square.holders == 0


@both
def test_a_frozen_group_is_gathered_and_not_reduced(inner: str) -> None:
    frozen = StubGroup("f", {"w": torch.randn(WIDTH, WIDTH)}, requires_grad=False)
    trained = StubGroup("t", {"w": torch.randn(WIDTH, WIDTH)})

    def function(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for group, shard in zip((trained, frozen), shards, strict=True):
            x = x @ torch.ops.compile_fsdp.parameter(shard, group.info.name, 0)
        return x.sum()

    seen = Observed()
    with registered(frozen, trained):
        run = compiled(function, inner, frozen, trained, observer=seen)
        run(torch.ones(2, WIDTH), trained.shard, frozen.shard).backward()
    assert frozen.reductions == [] and trained.reductions == [[0]]
    backward = planned(seen.schedule(GraphKind.BACKWARD))
    assert ("unshard", frozen.info.name) in backward
    assert ("reduce_inner", frozen.info.name) not in backward


# What is saved ----------------------------------------------------------------------------------


@contextlib.contextmanager
def shapes_saved() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of all tensors that are saved for backward while the context is open."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield shapes


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b).sin()


def _in_bf16(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w, b).sin()


def _checkpointed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(_linear, x, w, b, use_reentrant=False)
    return out


LAYERS = {"plain": _linear, "autocast": _in_bf16, "checkpointed": _checkpointed}


@pytest.mark.parametrize(
    ("inner", "name"), [*(("aot_eager", name) for name in LAYERS), ("inductor", "autocast")]
)
def test_no_parameter_is_saved_for_backward(inner: str, name: str, square: StubGroup) -> None:
    """Two layers share a weight: its one marker serves both checkpointed regions."""
    layer = LAYERS[name]

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, w, b), w, b).float().sum()

    x = torch.randn(7, WIDTH)
    _, gradients = gradients_by_autograd(square, function, x)
    with shapes_saved() as shapes:
        run_marked(square, function, inner, x)
    assert (WIDTH, WIDTH) not in shapes and (WIDTH,) not in shapes
    assert (square.info.local_numel,) in shapes
    if inner == "inductor":  # rounds to bf16 at other places
        torch.testing.assert_close(square.gradients, gradients, rtol=2e-2, atol=2e-2)
    else:
        assert_equal(square.gradients, gradients, inner)


@both
def test_a_rank_that_owns_nothing_loses_no_gradient(inner: str) -> None:
    """Passes that fold operations on empty tensors must not fold away gradients."""
    group = StubGroup("a", {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)})
    group.info = replace(group.info, local_numel=0)
    group.shard = torch.zeros(0, requires_grad=True)
    x = torch.randn(3, WIDTH)
    function = REUSES["in a chain"]
    _, gradients = gradients_by_autograd(group, function, x)
    with registered(group):
        run_marked(group, function, inner, x)
    assert_equal(group.gradients, gradients, inner)


@both
def test_parameters_in_a_branch_are_gathered_in_the_branch(inner: str, square: StubGroup) -> None:
    def function(flag: torch.Tensor, x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        def yes(x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ops.compile_fsdp.parameter(shard, square.info.name, 0)

        result: torch.Tensor = torch.cond(flag, yes, lambda x: x.sin(), (x,))
        return result

    run = compiled(function, inner, square)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        for flag, expected in ((True, x @ square.copy_full_parameter(0)), (False, x.sin())):
            assert_equal(run(torch.tensor(flag), x, square.shard), expected, "inductor")
    assert square.holders == 0


@both
@pytest.mark.parametrize("read_outside", [False, True])
def test_gradients_that_a_branch_reduces_are_not_reduced_again(
    read_outside: bool, inner: str, square: StubGroup
) -> None:
    """The branch returns a gradient of the flat shard, which is added to those made outside."""

    def function(flag: torch.Tensor, x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        def yes(x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ops.compile_fsdp.parameter(shard, square.info.name, 0)

        y = torch.cond(flag, yes, lambda x: x.sin(), (x,))
        if read_outside:
            y = y * torch.ops.compile_fsdp.parameter(shard, square.info.name, 1)
        return y.sum()  # type: ignore[no-any-return]

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((x @ w) * b).sum() if read_outside else (x @ w).sum() + 0 * b.sum()

    x = torch.randn(3, WIDTH)
    _, gradients = gradients_by_autograd(square, plain, x)
    compiled(function, inner, square)(torch.tensor(True), x, square.shard).backward()
    torch.testing.assert_close(square.gradients[0], gradients[0])
    if read_outside:
        torch.testing.assert_close(square.gradients[1], gradients[1])
    assert square.holders == 0


# Inductor's side --------------------------------------------------------------------------------


def test_a_users_passes_run_before_ours(model: TwoBlocks) -> None:
    """And, having no key to cache under, turn the cache off."""
    seen: list[str] = []

    def mine(graph: torch.fx.Graph) -> None:
        seen.append(str(graph))

    patches = {"post_grad_custom_post_pass": mine, "joint_custom_pre_pass": mine}
    run = compiled(model, "inductor", *model.groups, config_patches=patches)
    run(tokens(), *(group.shard for group in model.groups)).backward()
    assert len(seen) == 3, "joint, forward, backward"
    assert all("compile_fsdp.parameter" in text for text in seen)
    assert not any("compile_fsdp.unshard" in text for text in seen)


def test_a_warm_cache_hits_and_a_changed_layout_misses(
    model: TwoBlocks, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    patches = {"fx_graph_cache": True}

    def compile_and_count() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        seen = Observed()
        run = compiled(model, "inductor", *model.groups, observer=seen, config_patches=patches)
        run(tokens(), *(group.shard for group in model.groups)).backward()
        return counters["inductor"]["fxgraph_cache_hit"], len(seen.kinds)

    assert compile_and_count() == (0, 2)
    hits, rewritten = compile_and_count()
    assert hits == 2 and rewritten == 0
    root = model.root
    root.info = replace(root.info, offsets=(root.info.offsets[1], 0))
    root._values = root._values.view(2, -1).flip(0).flatten()
    assert compile_and_count() == (0, 2)


def test_the_cache_key_covers_policy_and_groups(square: StubGroup) -> None:
    info = square.info

    other = replace(info, name="0/b/0")

    def key(
        policy: Policy | None = None,
        *,
        whole: bool = False,
        other: GroupInfo = other,
        **changes: Any,
    ) -> str:
        groups = {info.name: replace(info, **changes), other.name: other}
        return PassOptions(groups, policy or Policy(), whole_model=whole).cache_key

    keys = [
        key(),
        key(whole=True),
        key(Policy(prefetch=2)),
        key(Policy(memory_budget="unlimited")),
        key(Policy(memory_budget=1 << 30)),
        key(Policy(memory_budget=1 << 30, activation_bytes=1)),
        key(Policy(reshard_after_forward=True)),
        key(Policy(reshard_after_forward=(("a", True),))),
        key(Policy(merge_below=None)),
        key(Policy(equal_shapes=True)),
        key(Policy(costs=cost_model("h100"))),
        key(Policy(costs=replace(cost_model("h100"), tokens=1))),
        key(offsets=(4, 0)),
        key(mesh_shape=(1, 2)),
        key(dtype=torch.bfloat16),
        key(grad_comm_dtype=torch.bfloat16),
        key(gathers=False),
        key(other=replace(other, ranks=(0, 2))),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    shared = {"ranks": (1, 3), "other": replace(other, ranks=(1, 3))}
    assert key(**shared) == keys[0], "which ranks they are differs between ranks that share a cache"


def test_a_gradient_that_a_graph_pass_drops_is_missed(square: StubGroup) -> None:
    """A pass between the joint and the backward graph that takes one summand away."""

    def drop(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.add.Tensor and all(
                argument.target is torch.ops.compile_fsdp.parameter_grad.default
                for argument in node.all_input_nodes
            ):
                node.replace_all_uses_with(node.args[0])

    patches = {"post_grad_custom_pre_pass": drop}
    with pytest.raises(Exception, match=r"joint graph has 1 gradients of tensor 0 .* graph 0"):
        run_marked(
            square,
            REUSES["in a chain"],
            "inductor",
            torch.randn(3, WIDTH),
            config_patches=patches,
        )
