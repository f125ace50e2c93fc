"""The models that are measured: pre-norm transformers, MLP ratio 4, vocabulary 1024, fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.planning.workload import Built, Workload

from .results import Settings

VOCABULARY = 1024


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload; ``batch`` sequences of ``length`` tokens are one rank's part."""

    width: int
    blocks: int
    batch: int
    length: int


SHAPES: Mapping[str, Shape] = {
    "latency": Shape(128, 24, 1, 16),  # the number of collectives, host time
    "comm": Shape(256, 8, 2, 64),  # bytes moved
    "compute": Shape(512, 4, 4, 128),  # overlap, overhead on top of compute
}


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.before = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.before(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        hidden = F.gelu(self.up(self.between(x)))
        result: torch.Tensor = x + self.down(hidden)
        return result


class Transformer(nn.Module):
    """Embedding, blocks, head, cross-entropy."""

    def __init__(self, shape: Shape, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def shape_of(name: str, settings: Settings) -> Shape:
    """The workload, or what stands for it in a quick run."""
    shape = SHAPES[name]
    return Shape(shape.width // 2, 2, shape.batch, shape.length) if settings.quick else shape


def seeded_model(shape: Shape) -> Transformer:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Transformer(shape)


def batch_of(shape: Shape, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    size = (2, shape.batch, shape.length)
    tokens, targets = torch.randint(VOCABULARY, size, generator=generator)
    return tokens, targets


def workload(name: str, shape: Shape) -> Workload:
    """``shape`` as something to plan."""

    def build(_: DeviceMesh) -> Built:
        tokens = torch.zeros(shape.batch, shape.length, dtype=torch.long)
        return Built(Transformer(shape), (tokens, tokens.clone()))

    return Workload(name, build)
