"""An elementwise optimizer steps whole stretches of buffers, and nobody can tell from its results.

The reference is a subclass of AdamW, which might do anything and so steps parameter by parameter.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from compile_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.distributed import run
from tests.sharded_models import WAYS, Odd, batches, pair, shard_as
from tests.training import full


class OneByOne(optim.AdamW):
    """AdamW that nobody knows to be elementwise."""


class CountedOps(TorchDispatchMode):
    """The names of the operators that run on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(each, torch.nn.Parameter) for each in types):
            return NotImplemented
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def prepared(model: nn.Module, kind: type[optim.AdamW], **options: Any) -> optim.Optimizer:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=0.05, **options)
    fully_shard_optimizer(optimizer)
    return optimizer


def assert_same(
    models: tuple[nn.Module, nn.Module], optimizers: tuple[optim.Optimizer, optim.Optimizer]
) -> None:
    one, other = optimizers
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(a), full(b)), name
        assert one.state[a].keys() == other.state[b].keys(), name
        for key, value in one.state[a].items():
            assert torch.equal(full(value), full(other.state[b][key])), (name, key)
    for optimizer, model in zip(optimizers, models, strict=True):
        shown = [each for group in optimizer.param_groups for each in group["params"]]
        assert {id(each) for each in shown} == {id(each) for each in model.parameters()}
        assert {id(each) for each in optimizer.state} <= {id(each) for each in model.parameters()}


def check_ways(way: str, options: dict[str, Any]) -> None:
    _, one = pair(way)
    other = shard_as(way, Odd())
    other.load_state_dict({name: each.detach().clone() for name, each in one.state_dict().items()})
    optimizers = prepared(one, optim.AdamW, **options), prepared(other, OneByOne, **options)
    for batch in batches(4):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same((one, other), optimizers)


@pytest.mark.parametrize("way", ["packed", "tensors", "zero2", "hsdp", "hfsdp"])
def test_like_one_by_one(way: str) -> None:
    run(WAYS[way][0], check_ways, way, {"amsgrad": way == "packed", "foreach": way != "hsdp"})


def check_operators() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    fully_shard_optimizer(optimizer)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        with CountedOps() as counted:
            optimizer.step()
    # One for each of the three buffers; there are twelve parameters.
    assert counted.names["addcdiv_"] == counted.names["lerp_"] == 3
    for parameter in model.parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert (moment.shape, moment.placements) == (parameter.shape, parameter.placements)


def test_one_operator_for_each_buffer() -> None:
    run(2, check_operators)


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def check_interruptions() -> None:
    _, one = pair("packed")
    other = shard_as("packed", Odd())
    other.load_state_dict({name: each.detach().clone() for name, each in one.state_dict().items()})
    models = (one, other)
    optimizers = prepared(one, optim.AdamW), prepared(other, OneByOne)

    def step(*, without: str | None = None) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(*batches(1)[0]).backward()
            if without is not None:
                model.get_parameter(without).grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, optimizers)

    step(without="up.bias")
    step()  # that one's first step, and the others' second
    step(without="norm.weight")
    step()
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.state[model.get_parameter("norm.weight")]["step"].fill_(7.0)
    step()
    for optimizer in optimizers:
        optimizer.state.clear()
    step()
    for model, optimizer in zip(models, optimizers, strict=True):
        model(*batches(1)[0]).backward()
        handle = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        handle.remove()
        shown = [each for group in optimizer.param_groups for each in group["params"]]
        assert {id(each) for each in shown} == {id(each) for each in model.parameters()}
        assert set(optimizer.state) <= set(model.parameters())
        optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())
        model(*batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(models, optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(*batches(1)[0]).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    assert_same(models, optimizers)


def test_whatever_comes_between_steps() -> None:
    run(2, check_interruptions)


def check_mixed(main_grads: torch.dtype | None) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(torch.bfloat16)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    models = copy.deepcopy(whole), copy.deepcopy(whole)
    for model in models:
        policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
        fully_shard(model, mesh, mixed_precision_policy=policy)
    optimizers = prepared(models[0], optim.AdamW), prepared(models[1], OneByOne)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
            assert all(p.grad.dtype == (main_grads or torch.bfloat16) for p in model.parameters())
            optimizer.zero_grad()
    assert_same(models, optimizers)


@pytest.mark.parametrize("main_grads", [None, torch.float32])
def test_gradients_are_cast(main_grads: torch.dtype | None) -> None:
    run(2, check_mixed, main_grads)


def check_growth() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    fully_shard(model, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    parameters = list(model.parameters())
    for step in range(32):
        model(torch.ones(2, 4)).sum().backward()
        for index, parameter in enumerate(parameters):
            if (step >> index % 5) & 1:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    flat = optimizer._compile_fsdp_hooks._flat_step
    # Of one step: no more than one for each parameter, however many sets of them there were.
    assert max(len(flat._known), len(flat._splits)) <= len(parameters)


def test_stretches_of_other_steps_are_forgotten() -> None:
    run(2, check_growth)
