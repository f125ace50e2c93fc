"""Which parameters compute in MXFP8, what is said about it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.tensor import Shard

import compile_fsdp
from compile_fsdp import BlockAtomic, Explanation, MixedPrecisionPolicy, fully_shard
from compile_fsdp.report import text
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from tests.explaining import compiled, fake_world
from tests.quantized import MXFP8, Block, Model, batches, shard
from tests.training import cpu_mesh


def policy(patterns: Mapping[str, str | None]) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(compute_weights=patterns)


def quantized_in(module: nn.Module) -> list[str]:
    groups = module.fsdp_parameter_groups
    return [fqn for group in groups if group.planes for fqn in group.fqns]


# Choosing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_weights", "expected"),
    [
        (None, []),
        ("mxfp8", ["up.weight", "down.weight"]),
        ({"up.weight": "mxfp8"}, ["up.weight"]),
        ({"*own.weight": "mxfp8"}, ["down.weight"]),
        ({"up.*": None, "[ud]*.weight": "mxfp8"}, ["down.weight"]),
        ({"*": None}, []),
        ({}, []),
    ],
)
def test_a_policy_says_which(compute_weights: Any, expected: list[str]) -> None:
    with fake_world(2):
        block = Block()
        fully_shard(block, cpu_mesh(), None, MixedPrecisionPolicy(compute_weights=compute_weights))
        assert quantized_in(block) == expected


def test_what_is_tied_to_an_embedding_is_not_quantised() -> None:
    with fake_world(2):
        model = Model()
        model.head.weight = model.embedding.weight
        fully_shard(model, cpu_mesh(), None, MXFP8)
        assert quantized_in(model) == [
            f"blocks.{number}.{name}.weight" for number in range(2) for name in ("up", "down")
        ]
        assert model._fsdp_unit.unquantized["embedding.weight"] == (
            "it is the weight of Embedding, as 'embedding.weight', not the weight of an nn.Linear"
        )


@pytest.mark.parametrize("pattern", ["0.weight", "1.weight"])
def test_each_name_of_a_tied_weight_names_it(pattern: str) -> None:
    with fake_world(2):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
        model[1].weight = model[0].weight
        fully_shard(model, cpu_mesh(), None, policy({pattern: "mxfp8"}))
        assert quantized_in(model) == ["0.weight"]


def test_a_matrix_without_elements_is_left_alone() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(0, 32, bias=False), nn.Linear(32, 32, bias=False))
        fully_shard(model, cpu_mesh(), None, MXFP8)
        assert quantized_in(model) == ["1.weight"]


def test_a_parameter_that_came_later_is_one_of_the_class_as_written() -> None:
    with fake_world(2):
        linear = nn.Linear(32, 32, bias=False)
        fully_shard(linear, cpu_mesh(), None, MXFP8)
        linear.bias = nn.Parameter(torch.zeros(32))
        fully_shard(linear, cpu_mesh(), None, MXFP8)
        assert quantized_in(linear) == ["weight"]
        reasons = {"bias": "it is the bias of Linear, not the weight of an nn.Linear"}
        assert linear._fsdp_unit.unquantized == reasons


def test_linear_layers_that_compute_otherwise_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    with fake_world(2):
        model = nn.Sequential(Scaled(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        fully_shard(model, cpu_mesh(), None, MXFP8)
        assert quantized_in(model) == ["1.weight"]


def test_a_layer_with_a_forward_of_its_own_is_left_alone() -> None:
    """Libraries wrap single modules so, and call what was there before."""
    with fake_world(2):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
        wrapped = model[0].forward
        model[0].forward = lambda input: 2.0 * wrapped(input)
        fully_shard(model, cpu_mesh(), None, MXFP8)
        assert quantized_in(model) == ["1.weight"]
        reasons = {"0.weight": "its Linear has got a forward of its own"}
        assert model._fsdp_unit.unquantized == reasons


def test_what_attention_reads_itself_is_left_alone() -> None:
    with fake_world(2):
        attention = nn.MultiheadAttention(32, 4)
        fully_shard(attention, cpu_mesh(), None, MXFP8)
        assert quantized_in(attention) == []
        reason = attention._fsdp_unit.unquantized["out_proj.weight"]
        assert reason == "nn.MultiheadAttention reads it itself"


@pytest.mark.parametrize("shard_placement", [Shard(0), BlockAtomic(7), BlockAtomic(48)])
@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_every_layout_holds_blocks_of_32_rows(shard_placement: Shard, ranks: int) -> None:
    with fake_world(ranks):
        block = Block()
        placements = compile_fsdp.Placements(("dp",), *[(shard_placement,)] * 3)
        fully_shard(block, cpu_mesh(), placements, MXFP8)
        (group,) = (each for each in block.fsdp_parameter_groups if each.planes)
        for index, (rows, _) in enumerate(group.layout.tensor_shapes):
            held = [group.layout.rows(index, segment, ranks)[1] for segment in range(ranks)]
            assert sum(held) == rows
            assert all(count % 32 == 0 for count in held)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fqn", "found"),
    [
        ("norm.weight", "norm.weight", "it is the weight of LayerNorm"),
        ("up.*", "up.bias", "it is the bias of Linear"),
        ("narrow.weight", "narrow.weight", r"its shape is \(8, 32\)"),
    ],
)
def test_a_parameter_that_is_named_must_be_one_that_can_be(
    pattern: str, fqn: str, found: str
) -> None:
    with fake_world(2):
        block = Block()
        before = dict(block.named_parameters())
        message = (
            rf"parameter '{fqn}' cannot compute in MXFP8, .*with '{pattern.replace('*', '.')}"
            rf".*{found}.*[Ll]eave it out of compute_weights"
        )
        with pytest.raises(ValueError, match=message):
            fully_shard(block, cpu_mesh(), None, policy({pattern: "mxfp8"}))
        assert type(block) is Block
        assert all(before[name] is each for name, each in block.named_parameters())
        fully_shard(block, cpu_mesh(), None, MXFP8)


def test_a_dtype_that_is_not_quantised() -> None:
    with fake_world(2):
        block = Block().double()
        message = r"'up.weight'.*dtype is torch.float64, not one of torch.float32, torch.bfloat16"
        with pytest.raises(ValueError, match=message):
            fully_shard(block, cpu_mesh(), None, policy({"up.weight": "mxfp8"}))
        fully_shard(block, cpu_mesh(), None, MXFP8)
        assert quantized_in(block) == []


def test_main_weights_of_a_dtype_that_is_not_quantised() -> None:
    asked = MixedPrecisionPolicy(main_params_dtype=torch.float64, compute_weights="mxfp8")
    with fake_world(2), pytest.raises(ValueError, match=r"main_params_dtype=torch.float64.*MXFP8"):
        fully_shard(Block(), cpu_mesh(), None, asked)


def test_a_pattern_that_names_nothing() -> None:
    message = r"pattern 'blocks.0.up.weight', which is the name of no parameter .*up.weight, up.bi"
    with fake_world(2), pytest.raises(ValueError, match=message):
        fully_shard(Block(), cpu_mesh(), None, policy({"blocks.0.up.weight": "mxfp8"}))


def test_a_group_by_itself_names_the_parameter() -> None:
    with fake_world(2), pytest.raises(ValueError, match=r"'weight' has shape \(8, 32\).*2-D"):
        linear = nn.Linear(32, 8, bias=False)
        FsdpParameterGroup(
            linear,
            dict(linear.named_parameters()),
            cpu_mesh(),
            [Shard(0)],
            [Shard(0)],
            [Shard(0)],
            MXFP8,
        )


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({3: "mxfp8"}, TypeError, "expected patterns of parameter names, got 3"),
        ("mxfp4", ValueError, "expected None or \"mxfp8\", got 'mxfp4'"),
        ({"up.weight": "fp8"}, ValueError, "got 'fp8'"),
        (["up.weight"], TypeError, r"a mapping of patterns to these, got \['up.weight'\]"),
        (True, TypeError, "got True"),
    ],
)
def test_values_of_the_policy(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixedPrecisionPolicy(compute_weights=value)


# Explanations -------------------------------------------------------------------------------------


def explained(ranks: int = 2) -> Explanation:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    shard(model, MixedPrecisionPolicy(compute_weights="mxfp8"), shape=(ranks,))
    return compile_fsdp.explain(compiled(model), batches(1)[0])


def test_an_explanation_says_which_and_why() -> None:
    with fake_world(2):
        found = explained()
    assert_expected_inline(
        "\n".join(text.format_lines(found)),
        """\
in MXFP8, gathered for each phase: 14.4 KiB instead of 28.0 KiB in bfloat16:
  blocks.0.up.weight
  blocks.0.down.weight
  blocks.1.up.weight
  blocks.1.down.weight
  head.weight
not in MXFP8:
  embedding.weight: it is the weight of Embedding, not the weight of an nn.Linear
  blocks.0.norm.weight blocks.1.norm.weight: it is the weight of LayerNorm, not the weight of an nn.Linear
  blocks.0.norm.bias blocks.1.norm.bias: it is the bias of LayerNorm, not the weight of an nn.Linear
  blocks.0.up.bias blocks.0.narrow.bias blocks.1.up.bias blocks.1.narrow.bias: it is the bias of Linear, not the weight of an nn.Linear
  blocks.0.narrow.weight blocks.1.narrow.weight: its shape is (8, 32), not multiples of 32""",  # noqa: E501
    )
    assert "compute weights\n  in MXFP8" in str(found)
    assert "Compute weights" in found.to_html()
    assert Explanation.from_json(found.to_json()) == found


def test_a_schedule_shows_the_planes_and_their_bytes() -> None:
    with fake_world(2):
        found = explained()
    forward, backward = found.graphs
    planes = {step.group: step.bytes for step in forward.steps if step.op == "unshard"}
    up_and_down = 2 * 3 * 32 * 32
    assert planes["blocks.0[1]:rowwise"] == up_and_down * 33 // 32
    assert not any("columnwise" in label for label in planes)
    gathered = {step.group for step in backward.steps if step.op == "unshard"}
    assert "blocks.0[1]:columnwise" in gathered
    assert not any("rowwise" in label for label in gathered)
    reduced = {step.group: step.bytes for step in backward.steps if step.op == "reduce_inner"}
    assert reduced["blocks.0[1]"] == 2 * up_and_down  # in bf16
    (rowwise,) = (each for each in found.groups if each.label == "blocks.0[1]:rowwise")
    assert rowwise.shard_bytes == up_and_down * 33 // 32 // 2
    assert (rowwise.gather_axis, rowwise.gradient_dtype) == ("inner", "bfloat16")
    assert rowwise.trainable and rowwise.reduce_bytes == 0
    assert rowwise.fqns[:2] == (("blocks.0.up.weight.data",), ("blocks.0.down.weight.data",))
    (gathers,) = forward.collectives
    assert gathers.count == sum(
        2 if ":" in step.group else 1 for step in forward.steps if step.op == "unshard"
    ), "data and scales are gathered one after the other"


def test_nothing_is_saved_where_nothing_is_gathered() -> None:
    with fake_world(1):
        found = explained(1)
    assert next(iter(text.format_lines(found))) == "in MXFP8:"
    assert not any(each.gather_axis for each in found.groups)


def test_nothing_is_said_where_nothing_was_asked_for() -> None:
    with fake_world(2):
        model = shard(Model(), None)
        found = compile_fsdp.explain(compiled(model), batches(1)[0])
    assert found.formats == ()
    assert "compute weights" not in str(found)
