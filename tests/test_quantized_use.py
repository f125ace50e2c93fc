"""What users do with a model, with MXFP8 compute weights: each as the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    microbatch,
)
from compile_fsdp.runtime.collectives import recorded
from tests.distributed import distributed
from tests.explaining import fake_world
from tests.quantized import (
    MXFP8,
    Block,
    Model,
    Pair,
    adamw,
    assert_nothing_left,
    batches,
    gathered,
    mesh_for,
    pair,
    reference_of,
    shard,
)
from tests.training import cpu_mesh, drive, full

DRIVERS = ["eager", "aot_eager"]
SLOW_AOT_EAGER = pytest.param("aot_eager", marks=pytest.mark.slow)
BF16 = torch.bfloat16


# Gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
@distributed(2)
def test_microbatches(mode: str) -> None:
    both = pair(mode=mode)
    for _ in range(2):
        for number, tokens in enumerate(batches(2)):
            with microbatch(both.model, number == 1):
                both.backward(tokens)
        both.step()
    both.assert_parameters_equal()


@distributed(2)
def test_backwards_after_all_forwards() -> None:
    """Each backward may be followed by a step that nobody announces: planes are quantised anew,
    which is no change of what the forwards before it have saved."""
    both = pair("aot_eager", announced=False)
    both.train(batches(1))
    losses = [(both.call(tokens), both.reference(tokens)) for tokens in batches(3)]
    for loss, expected in reversed(losses):
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    both.step()
    both.assert_parameters_equal()


@distributed(4)
def test_microbatches_on_two_axes() -> None:
    both = pair("aot_eager", mode="hfsdp", shape=(2, 2))
    for _ in range(2):
        for number, tokens in enumerate(batches(2)):
            with microbatch(both.model, number == 1):
                both.backward(tokens)
        both.step()
    both.assert_parameters_equal()


@pytest.mark.parametrize("driver", ["eager", SLOW_AOT_EAGER])
@distributed(2)
def test_gradients_accumulate_over_backwards(driver: str) -> None:
    both = pair(driver)
    for _ in range(2):
        for tokens in batches(3):
            both.backward(tokens)
        both.step()
    both.assert_parameters_equal()


@distributed(2)
def test_one_reduction_for_all_matrices_of_a_block() -> None:
    model = shard(Model())
    loss = model(batches(1)[0])
    with recorded() as records:
        loss.backward()
    reductions = [each.label for each in records if each.kind == "reduce_scatter"]
    assert len(reductions) == len(set(reductions)) == len(list(own_groups(model)))


def own_groups(model: nn.Module) -> list[Any]:
    return [group for group in model._fsdp_unit.context.groups() if group.gradient is not None]


@distributed(2)
def test_gradients_of_inputs_alone_leave_the_others() -> None:
    block = Block()
    reference = reference_of(block)
    fully_shard(block, mesh_for("zero3", (2,))[0], None, MXFP8)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (found,) = torch.autograd.grad(block(x).sum(), x)
    (expected,) = torch.autograd.grad(reference(x).sum(), x)
    assert torch.equal(found, expected)
    assert all(parameter.grad is None for parameter in block.parameters())


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_freezing_and_unfreezing(driver: str) -> None:
    both = pair(driver)
    for flag in (False, True):
        for model in (both.model, both.reference):
            model.get_submodule("blocks.0").requires_grad_(flag)
        both.train(batches(2))


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
@distributed(2)
def test_a_frozen_layer_is_quantised_and_may_become_trainable(mode: str) -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    reference = reference_of(model)
    both = Pair(shard(model, mode=mode), model, reference)
    both.train(batches(1))
    for each in (model, reference):
        weight = each.get_submodule("blocks.0.up").weight
        with torch.no_grad():
            weight.mul_(0.5)
        weight.requires_grad_(True)
    both.train(batches(2))


class Tied(nn.Module):
    """Two linear layers with one weight, and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.twice = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens % 32, 32).float()
        x = self.second(self.first(x).relu()).relu()
        return self.twice(self.twice(x)).square().mean()


@pytest.mark.parametrize("driver", ["eager", SLOW_AOT_EAGER])
@distributed(2)
def test_a_weight_that_is_used_twice(driver: str) -> None:
    both = pair(driver, make=Tied)
    both.train(batches(3))
    assert_nothing_left(both.model)


@pytest.mark.parametrize("driver", ["eager", SLOW_AOT_EAGER])
@distributed(2)
def test_an_input_without_a_batch(driver: str) -> None:
    linear = nn.Linear(32, 64)
    fully_shard(linear, mesh_for("zero3", (2,))[0], None, MXFP8)
    call = drive(linear, driver)
    x = torch.randn(32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = call(x)
    with torch.no_grad():
        torch.testing.assert_close(y, linear(x.unsqueeze(0)).squeeze(0))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(full(linear.weight.grad), x.detach().expand(64, 32))
    assert torch.equal(full(linear.bias.grad), torch.ones(64))


# Dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_input_that_is_no_floating_point_tensor(dtype: torch.dtype, driver: str) -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(32, 64, bias=False))
        fully_shard(model, cpu_mesh(), None, MXFP8)
        with pytest.raises(TypeError, match=r"layer of '0.weight' .* floating-point.* found torch"):
            drive(model, driver)(torch.ones(4, 32, dtype=dtype))


class ReferenceInBf16(nn.Module):
    """A model in bf16 over fp32 weights that an optimizer updates: what is quantised is fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = reference_of(model).to(BF16)
        self.main = reference_of(model).float()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        main = dict(self.main.named_parameters())
        weights = {
            name: main[name] if is_quantised(self.inner, name) else main[name].to(BF16)
            for name, _ in self.inner.named_parameters()
        }
        return torch.func.functional_call(self.inner, weights, (tokens,))


def is_quantised(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last == "weight" and type(model.get_submodule(owner)).__name__ == "ReferenceLinear"


@pytest.mark.parametrize(
    ("mode", "driver"),
    [
        ("zero2", "eager"),
        ("zero3", "eager"),
        ("zero3", "aot_eager"),
        pytest.param("zero2", "aot_eager", marks=pytest.mark.slow),
    ],
)
@distributed(2)
def test_a_model_in_bf16_quantises_its_fp32_main_weights(mode: str, driver: str) -> None:
    model = Model().to(BF16)
    reference = ReferenceInBf16(model)
    policy = MixedPrecisionPolicy(compute_weights="mxfp8", main_grads_dtype=torch.float32)
    call = drive(shard(model, policy, mode), driver)
    ours, theirs = adamw(model), torch.optim.AdamW(reference.main.parameters(), lr=1e-2)
    for tokens in batches(3):
        loss, expected = call(tokens), reference(tokens)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for (name, mine), other in zip(
            model.named_parameters(), reference.main.parameters(), strict=True
        ):
            assert torch.equal(full(mine.grad), other.grad), name
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), reference.main.parameters(), strict=True):
        assert torch.equal(full(mine), other)


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_autocast(driver: str) -> None:
    """Under autocast the product is computed in bf16, and gradients come back in fp32."""
    model = Model()
    results = []
    for name in ("eager", driver):
        copied = shard(copy.deepcopy(model))
        call = drive(copied, name)
        with torch.autocast("cpu", BF16):
            loss = call(batches(1)[0])
        loss.backward()
        gradients = [full(each.grad) for each in copied.parameters()]
        assert all(each.dtype == torch.float32 for each in gradients)
        results.append([loss.detach(), *gradients])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


# Recomputation, evaluation -----------------------------------------------------------------------


class PartsRecomputed(Model):
    """What is recomputed is no module that was sharded by itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            hidden = block.norm(x)
            x = x + checkpoint(self.feed_forward, block, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    @staticmethod
    def feed_forward(block: Block, x: torch.Tensor) -> torch.Tensor:
        return block.down(F.gelu(block.up(x)))


class Reentrant(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("make", [PartsRecomputed, Reentrant])
@distributed(2)
def test_recomputation_of_other_kinds(make: Callable[[], nn.Module]) -> None:
    both = pair(make=make)
    both.train(batches(2))
    assert_nothing_left(both.model)


@distributed(2)
def test_recomputed_parts_in_a_graph() -> None:
    both = pair("aot_eager", make=PartsRecomputed)
    both.train(batches(2))
    assert_nothing_left(both.model)


@pytest.mark.parametrize(
    ("driver", "mode"),
    [
        ("eager", torch.no_grad),
        ("eager", torch.inference_mode),
        ("aot_eager", torch.no_grad),
        pytest.param("aot_eager", torch.inference_mode, marks=pytest.mark.slow),
    ],
)
@distributed(2)
def test_evaluation_reads_rowwise_planes_alone(driver: str, mode: Callable[[], Any]) -> None:
    both = pair(driver)
    both.train(batches(1))
    with mode(), recorded() as records:
        found = both.model(batches(1)[0])
        assert torch.equal(found, both.reference(batches(1)[0]))
    assert gathered(records, "rowwise") > 0
    assert gathered(records, "columnwise") == 0
    both.train(batches(2))


# Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("mode", ["zero1", "zero3"])
@distributed(2)
def test_weights_written_by_hand(mode: str, announced: bool) -> None:
    both = pair(mode=mode, announced=announced)
    for tokens in batches(2):
        both.train([tokens])
        with torch.no_grad():
            for model in (both.model, both.reference):
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    both.train(batches(1))


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
@distributed(2)
def test_a_step_that_leaves_no_trace(mode: str) -> None:
    """An optimizer may write the local tensors, which nothing counts."""
    both = pair(mode=mode, announced=False)
    for tokens in batches(3):
        both.backward(tokens)
        both.assert_gradients_equal()
        for mine, other in zip(both.model.parameters(), both.reference.parameters(), strict=True):
            mine.to_local().detach().sub_(mine.grad.to_local())
            other.detach().sub_(other.grad)
            mine.grad = other.grad = None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-42])
@distributed(2)
def test_special_values(value: float) -> None:
    """A NaN makes its block NaN, an infinity stays one, a number too small becomes zero: in one
    process and in several."""
    model = Model()
    with torch.no_grad():
        model.blocks[1].up.weight[37, 5] = value
    reference = reference_of(model)
    shard(model)
    tokens = batches(1)[0]
    found, expected = model(tokens), reference(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    found.backward()
    expected.backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), other.grad, rtol=0, atol=0, equal_nan=True)


@distributed(2)
def test_a_deep_copy_has_planes_of_its_own() -> None:
    both = pair()
    both.train(batches(1))
    copied = copy.deepcopy(both.model)
    assert copied._fsdp_unit.unquantized == both.model._fsdp_unit.unquantized
    before = both.reference(batches(1)[0]).detach()
    both.train(batches(2))
    assert torch.equal(copied(batches(1)[0]), before)
    with torch.no_grad():
        for mine, other in zip(copied.parameters(), both.model.parameters(), strict=True):
            mine.to_local().copy_(other.to_local())  # leaves no trace
    assert torch.equal(copied(batches(1)[0]), both.reference(batches(1)[0]))


@distributed(2)
def test_a_weight_that_is_read_by_other_code_is_not_quantised() -> None:
    """``module.weight`` inside a forward is the weight in full precision."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            self.up = nn.Linear(32, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).sum() + F.linear(x, self.up.weight).sum()

    model = Reading()
    reference = reference_of(model)
    shard(model)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for driver in DRIVERS:
        found = drive(model, driver)(x)
        assert torch.equal(found, reference(x))
        found.backward()
        reference(x).backward()
        assert torch.equal(full(model.up.weight.grad), reference.up.weight.grad)
        for each in (model, reference):
            each.zero_grad()


@distributed(2)
def test_other_values_by_functional_call() -> None:
    """They are full tensors, which nothing is known of: they compute as they are."""
    block = Block()
    plain = copy.deepcopy(block)
    fully_shard(block, mesh_for("zero3", (2,))[0], None, MXFP8)
    x = torch.randn(4, 32)
    values = {"up.weight": torch.randn(96, 32), "down.weight": torch.randn(32, 96)}
    found = torch.func.functional_call(block, values, (x,))
    assert torch.equal(found, torch.func.functional_call(plain, values, (x,)))
