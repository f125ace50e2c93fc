"""A model whose gradients add up exactly in any order, so that sharded training can be compared bit
for bit with one process, whatever the number of ranks, the dtype and the layout.

Activations are halves, ``{-1, -1/2, 0, 1/2, 1}``, and so are the gradients of activations: every
product of a parameter and an activation passes through `Halves`, which rounds both ways. A
parameter's gradient is then a sum of products of halves: a multiple of a quarter, small enough
for 8 bits of mantissa (`Configuration.largest_sum` is what bounds it). Rounding happens for each
element and sample alone, so a batch may be cut anywhere. Parameters themselves may have any value
(AdamW's are no dyadic fractions): optimizers work element by element.

An average over 3 ranks is exact if what is summed is a multiple of 3; with 3 ranks the unit of all
gradients is 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.configurations import Configuration, ModuleSpec

WIDTH = 8


def to_halves(x: torch.Tensor) -> torch.Tensor:
    """The nearest of -1, -1/2, 0, 1/2, 1."""
    return x.mul(2).round().clamp(-2, 2).mul(0.5)


class Halves(torch.autograd.Function):
    """Rounds activations to halves, and their gradients to halves of ``unit``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: int) -> torch.Tensor:
        ctx.unit = unit
        return to_halves(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return to_halves(gradient / ctx.unit) * ctx.unit, None


class ExactModule(nn.Module):
    """Multiplies its input, repeated as often as needed, with each of its parameters, folds that
    back to ``WIDTH`` features and adds it to the input; then its children do the same."""

    def __init__(self, spec: ModuleSpec, unit: int, generator: torch.Generator) -> None:
        super().__init__()
        self.spec = spec
        self.unit = unit
        for number, parameter in enumerate(spec.parameters):
            shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
            value = torch.randint(-8, 9, shape, generator=generator) / 4
            if parameter.transposed:
                value = value.permute(tuple(reversed(range(value.ndim))))
            value = value.to(parameter.dtype)
            setattr(self, f"p{number}", nn.Parameter(value, requires_grad=parameter.trainable))
        self.children_ = nn.ModuleList(
            ExactModule(child, unit, generator) for child in spec.children
        )

    def forward(self, x: torch.Tensor, is_last: bool) -> torch.Tensor:
        names = [
            f"p{number}"
            for number, parameter in enumerate(self.spec.parameters)
            if parameter.use == "always" or (parameter.use == "last microbatch" and is_last)
        ]
        if names:
            x = self.mix(x, [getattr(self, name) for name in names])
        for child in self.children_:
            for _ in range(child.spec.times):
                if child.spec.checkpointed == "no":
                    x = child(x, is_last)
                else:
                    reentrant = child.spec.checkpointed == "reentrant"
                    x = checkpoint(child, x, is_last, use_reentrant=reentrant)
        return x

    def mix(self, x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        chunks = -(-sum(sizes) // WIDTH)
        if chunks == 0:
            # Nothing but empty parameters, which still take part.
            return x + sum(parameter.sum() for parameter in parameters)
        repeated = Halves.apply(x.repeat(1, chunks), self.unit)
        pieces = repeated.split([*sizes, chunks * WIDTH - sum(sizes)], dim=1)
        products = [
            (piece.to(parameter.dtype) * parameter.reshape(-1)).to(x.dtype)
            for piece, parameter in zip(pieces, parameters, strict=False)
        ]
        mixed = Halves.apply(torch.cat([*products, pieces[-1]], dim=1), self.unit)
        return Halves.apply(x + mixed.view(len(x), chunks, WIDTH).sum(1), self.unit)


def build(configuration: Configuration) -> ExactModule:
    """The unsharded model of ``configuration``; the same values in every process."""
    generator = torch.Generator().manual_seed(configuration.seed)
    model = ExactModule(configuration.model, configuration.unit, generator)
    for fqn, tied_fqn in configuration.ties:
        owner_fqn, _, name = tied_fqn.rpartition(".")
        setattr(model.get_submodule(owner_fqn), name, model.get_parameter(fqn))
    return model


def loss_of(output: torch.Tensor, target: torch.Tensor, unit: int) -> torch.Tensor:
    """The sum over samples and features of output times target: a multiple of a quarter."""
    return (output * target).sum() * unit


def batches(configuration: Configuration) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each step and microbatch the input and the target of all ranks: halves, of shape
    (ranks * samples, WIDTH)."""
    generator = torch.Generator().manual_seed(configuration.seed + 1)
    shape = (configuration.ranks * configuration.samples, WIDTH)

    def draw() -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator) / 2

    return [
        [(draw(), draw()) for _ in range(configuration.microbatches)]
        for _ in range(configuration.steps)
    ]
