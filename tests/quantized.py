"""Models whose linear layers can be quantised, and the same models in one process.

What sharded training with MXFP8 compute weights is compared with computes with full weights that
one process holds, quantised along their rows for forward and along their columns for backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from compile_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_optimizer,
)
from compile_fsdp.runtime.collectives import CollectiveRecord
from compile_fsdp.runtime.mxfp8 import dequantize, is_eligible, quantize
from tests.training import drive, full

WIDTH, VOCABULARY = 32, 64
RECOMPUTES_IN_GRAPHS = torch.__version__ >= "2.13"
"""Before, what a checkpointed ``autograd.Function`` returns is saved in compiled graphs."""

MXFP8 = MixedPrecisionPolicy(compute_weights="mxfp8")


class Block(nn.Module):
    """Linear layers that can be quantised, with and without a bias, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.narrow = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        return x + self.down(F.gelu(self.up(hidden))) + self.narrow(hidden).sum(-1, keepdim=True)


class Model(nn.Module):
    """Embedding, blocks, head, cross-entropy. ``recompute``: the blocks, in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class _Reference(torch.autograd.Function):
    """A linear layer with a full weight, in the dtype of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, dequantize(*quantize(weight.detach()), dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        planes = quantize(weight, columnwise=True)
        of_x = grad @ dequantize(*planes, columnwise=True, dtype=grad.dtype)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, rows.t() @ x.flatten(0, -2), of_bias


class ReferenceLinear(nn.Linear):
    """``nn.Linear`` that computes with a quantised weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Reference.apply(input, self.weight, self.bias)
        return result


def reference_of(model: nn.Module) -> nn.Module:
    """A copy of an unsharded model that quantises its full weights, where the runtime would."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.Linear) and is_eligible(module.weight.shape):
            module.__class__ = ReferenceLinear
    return reference


def mesh_for(mode: str, shape: tuple[int, ...]) -> tuple[DeviceMesh, Placements]:
    """A CPU mesh, and the row of the placement table called ``mode`` on it."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    return mesh, getattr(Placements, mode)(mesh)


def shard(
    model: nn.Module,
    policy: MixedPrecisionPolicy | None = MXFP8,
    mode: str = "zero3",
    shape: tuple[int, ...] = (2,),
    **options: Any,
) -> nn.Module:
    """Shard every block of ``model``, then the rest."""
    mesh, placements = mesh_for(mode, shape)
    return shard_on(model, mesh, placements, policy, **options)


def shard_on(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Placements | None = None,
    policy: MixedPrecisionPolicy | None = MXFP8,
    **options: Any,
) -> nn.Module:
    """As `shard`, on a mesh that is there."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh, placements, policy, **options)
    fully_shard(model, mesh, placements, policy, **options)
    return model


def adamw(model: nn.Module, *, announced: bool = True) -> torch.optim.Optimizer:
    """AdamW, which tells the groups of its steps if they are ``announced``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if announced:
        fully_shard_optimizer(optimizer)
    return optimizer


def batches(count: int) -> list[torch.Tensor]:
    """Tokens, the same on every rank: an average of equal gradients is exact."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (4, 8), generator=generator) for _ in range(count)]


class Pair:
    """A sharded model and its reference, which do the same and must agree bit for bit.

    Attributes:
        model: sharded.
        call: runs it.
        reference: in this process.
    """

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], reference: nn.Module, **options: Any
    ) -> None:
        self.model, self.reference = model, reference
        self.call = call
        self.optimizer = adamw(model, **options)
        self._other = torch.optim.AdamW(reference.parameters(), lr=1e-2)

    def backward(self, tokens: torch.Tensor) -> None:
        """A forward and a backward of both; the losses agree."""
        loss, expected = self.call(tokens), self.reference(tokens)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()

    def step(self) -> None:
        """The gradients agree; then a step of both."""
        self.assert_gradients_equal()
        for each in (self.optimizer, self._other):
            each.step()
            each.zero_grad()

    def train(self, tokens: Iterable[torch.Tensor]) -> None:
        """A step for each batch; then the parameters agree."""
        for batch in tokens:
            self.backward(batch)
            self.step()
        self.assert_parameters_equal()

    def assert_gradients_equal(self) -> None:
        """Gradients agree bit for bit; None where the other has none."""
        others = dict(self.reference.named_parameters())
        for name, parameter in self.model.named_parameters():
            wanted = others[name].grad
            if parameter.grad is None or wanted is None:
                assert parameter.grad is wanted, name
            else:
                assert torch.equal(full(parameter.grad), wanted), name

    def assert_parameters_equal(self) -> None:
        """Parameters agree bit for bit."""
        others = dict(self.reference.named_parameters())
        for name, parameter in self.model.named_parameters():
            assert torch.equal(full(parameter), others[name]), name


def gathered(records: Iterable[CollectiveRecord], planes: str = "") -> int:
    """Bytes that were gathered, of all or of the rowwise or columnwise planes."""
    return sum(
        each.bytes
        for each in records
        if each.kind == "all_gather" and (not planes or f":{planes}" in each.label)
    )


def pair(
    driver: str = "eager",
    *,
    make: Callable[[], nn.Module] = Model,
    compiling: Mapping[str, Any] | None = None,
    announced: bool = True,
    **sharding: Any,
) -> Pair:
    """A sharded model and its reference."""
    model = make()
    reference = reference_of(model)
    shard(model, **sharding)
    return Pair(model, drive(model, driver, **(compiling or {})), reference, announced=announced)


def assert_nothing_left(model: nn.Module) -> None:
    """No group and no planes of it hold what was gathered."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FsdpModule)
        for group in module.fsdp_parameter_groups
    ]
    assert groups
    for each in (each for group in groups for each in (group, *group.planes)):
        assert not each.is_held, each.label
        assert not (each.gathers and each.is_unsharded), each.label
