"""A Llama-style decoder over bytes, in plain PyTorch: nothing here knows about sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder; `kv_heads` groups of query heads share a key and a value head."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = VOCABULARY
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Width of the gated MLP: 8/3 of `dim` keeps the cost of an ungated one of 4 x `dim`."""
        return 32 * math.ceil(8 * self.dim / 3 / 32)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rotary_tables(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each fp32 (length, head_dim / 2).

    Computed where they are used instead of kept as buffers: a model cast to bf16 would cast
    buffers too, and positions beyond 256 are not exact in bf16.
    """
    pairs = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = torch.exp(pairs * (-math.log(config.rope_base) / config.head_dim))
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of each head by its position's angles (arXiv:2104.09864).

    x: (batch, heads, length, head_dim); the result has x's dtype.
    """
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        query = rotate(self._heads(self.query(x)), tables)
        key = rotate(self._heads(self.key(x)), tables)
        value = self._heads(self.value(x))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, n * head_dim) -> (batch, n, length, head_dim)."""
        heads: Tensor = x.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Pre-norm decoder block: the unit that is sharded and gathered together."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), tables)
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


class Decoder(nn.Module):
    """Tokens to logits, or to the mean loss when targets are given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, Block):
            # Two branches a block add to the residual stream; scaled so that its variance does
            # not grow with depth. apply() visits children first, so this comes last.
            shrink = (2 * self.config.layers) ** -0.5
            with torch.no_grad():
                module.attention.output.weight.mul_(shrink)
                module.mlp.down.weight.mul_(shrink)
        elif module is self:
            nn.init.normal_(self.head.weight, std=0.02)  # near-uniform predictions to begin with

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary), or the mean cross-entropy, a 0-D fp32 tensor.

        tokens, targets: int64 (batch, length).
        """
        tables = rotary_tables(tokens.shape[1], self.config, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, tables)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
