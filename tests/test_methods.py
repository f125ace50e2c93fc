"""Methods other than forward, and modules that are not called from the root (case 19)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import fully_shard, register_forward_method
from tests.distributed import distributed
from tests.training import assert_gradients_close, cpu_mesh, drive, shard_blocks

DRIVERS = ["eager", "aot_eager"]


class Encoder(nn.Module):
    """``encode`` computes with the model's own parameters, ``features`` calls modules only."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.features(tokens).sum()

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def encode(self, tokens: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
        """Docs."""
        return F.linear(self.features(tokens), self.mix) + offset

    def steps(self, tokens: torch.Tensor):
        yield self.encode(tokens)

    @property
    def width(self) -> int:
        return 4


def encoder_pair() -> tuple[Encoder, Encoder]:
    model = Encoder()
    sharded = shard_blocks(copy.deepcopy(model))
    return model, sharded


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_a_registered_method_computes_with_full_parameters(driver: str) -> None:
    model, sharded = encoder_pair()
    register_forward_method(sharded, "encode")
    assert sharded.encode.__doc__ == "Docs."
    encode = drive(sharded.encode, driver)
    tokens = torch.tensor([[1, 2, 3]])
    for _ in range(2):
        found, expected = encode(tokens, offset=1.0), model.encode(tokens, offset=1.0)
        torch.testing.assert_close(found, expected)
        assert not any(group.is_held for group in sharded._fsdp_unit.context.groups())
        found.sum().backward()
        expected.sum().backward()
        assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())
    sharded(tokens).backward()
    model(tokens).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_without_registration_modules_work_when_they_are_called() -> None:
    """``features`` calls the root's embedding and the blocks, one after another, from outside."""
    model, sharded = encoder_pair()
    tokens = torch.tensor([[1, 2, 3]])
    found, expected = sharded.features(tokens), model.features(tokens)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert_gradients_close(sharded, model)
    torch.testing.assert_close(sharded.forward(tokens), model.forward(tokens))


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_a_registered_method_of_a_block(driver: str) -> None:
    class Block(nn.Linear):
        def project(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](torch.tanh(self.blocks[0].project(x))).sum()

    model = Model()
    sharded = shard_blocks(copy.deepcopy(model))
    register_forward_method(sharded.blocks[0], "project")
    register_forward_method(sharded.blocks[0], "project")
    x = torch.randn(3, 4)
    drive(sharded, driver)(x).backward()
    model(x).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_what_cannot_be_registered_says_so() -> None:
    model, sharded = encoder_pair()
    for name, error, match in (
        ("encodee", AttributeError, "Encoder has no attribute 'encodee'"),
        ("scale", ValueError, "'scale' of Encoder must be a plain method"),
        ("width", ValueError, "'width' of Encoder must be a plain method"),
        ("steps", ValueError, "'steps' of Encoder must be a plain method"),
        ("__call__", ValueError, "must be a plain method"),
        (3, TypeError, "the name of a method, got FsdpEncoder and int"),
    ):
        with pytest.raises(error, match=match):
            register_forward_method(sharded, name)
    with pytest.raises(ValueError, match="this Encoder is not sharded"):
        register_forward_method(model, "encode")
    with pytest.raises(ValueError, match="this FsdpLinear is not sharded"):
        register_forward_method(sharded.blocks[0][0], "forward")


@distributed(2)
def test_a_method_that_fails_leaves_nothing_behind() -> None:
    _, sharded = encoder_pair()
    register_forward_method(sharded, "encode")
    with pytest.raises(TypeError):
        sharded.encode(torch.tensor([[1, 2, 3]]), offset="no number")
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())
    assert sharded._fsdp_unit.context.eager_depth == 0
    sharded.encode(torch.tensor([[1, 2, 3]])).sum().backward()


@distributed(2)
def test_a_module_that_is_sharded_alone_may_have_its_forward_called() -> None:
    model = nn.Linear(4, 4)
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    x = torch.randn(3, 4)
    sharded.forward(x).sum().backward()
    model(x).sum().backward()
    assert_gradients_close(sharded, model)
