"""Text from the sharded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    count: int,
    length: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
) -> bytes:
    """The prompt and `count` bytes that follow it, sampled one at a time.

    model: tokens, int64 (1, length), to logits (1, length, vocabulary).

    Every rank must call this with the same arguments: each byte is one forward of the sharded
    model, and so the same collectives everywhere. The input always has the full length, zeros
    after the text that there is, so one compiled graph serves every byte: the model is causal and
    what follows a position does not reach it.
    """
    if not prompt:
        raise ValueError("generate: the prompt is empty; give at least one byte")
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = text[-length:]
        tokens = torch.zeros(1, length, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        logits = model(tokens.to(device))[0, len(window) - 1]
        odds = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(text)


def readable(text: bytes) -> str:
    """The text as it can be printed: what is not printable is replaced by a dot."""
    decoded = text.decode("utf-8", errors="replace").replace("\ufffd", ".")
    return "".join(c if c.isprintable() or c in "\n\t" else "." for c in decoded)
