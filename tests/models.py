"""Small models that the tests train; each is a plain nn.Module that knows nothing of sharding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 31
WIDTH = 12


class Block(nn.Module):
    """A pre-norm MLP block with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head, cross-entropy: the smallest thing shaped like a transformer."""

    def __init__(self, width: int = WIDTH, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def language_batches(
    count: int, ranks: int, per_rank: int = 2, length: int = 5
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` global batches of (tokens, targets), each of shape (ranks * per_rank, length)."""
    generator = torch.Generator().manual_seed(7)
    shape = (ranks * per_rank, length)

    def draw() -> torch.Tensor:
        return torch.randint(VOCABULARY, shape, generator=generator)

    return [(draw(), draw()) for _ in range(count)]
