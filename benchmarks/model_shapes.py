"""Parameter shapes of well-known models by FSDP unit, written down: no weights, no downloads.

A unit is what one ``fully_shard`` call would own: a block, the embeddings, the root (what the
others leave). Shapes are those of the models' usual PyTorch implementations: GPT-2 in
transformers keeps (in, out) weights, torchvision's ViT has a one-row position embedding.
"""

from __future__ import annotations

Shape = tuple[int, ...]
Units = dict[str, list[Shape]]


def llama(width: int, hidden: int, key_value: int, vocabulary: int = 128_256) -> Units:
    """Grouped-query attention, SwiGLU, RMSNorm; untied embedding and head."""
    attention = [(width, width), (key_value, width), (key_value, width), (width, width)]
    feed_forward = [(hidden, width), (hidden, width), (width, hidden)]
    return {
        "block": [*attention, *feed_forward, (width,), (width,)],
        "embedding": [(vocabulary, width)],
        "root": [(width,), (vocabulary, width)],
    }


def gpt2(width: int, vocabulary: int = 50_257, positions: int = 1024) -> Units:
    """transformers' Conv1D weights are (in, out); the head is tied to the embedding."""
    norm = [(width,), (width,)]
    block: list[Shape] = [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return {
        "block": block,
        "root": [(vocabulary, width), (positions, width), *norm],
    }


def mixtral(width: int = 4096, hidden: int = 14_336, experts: int = 8) -> Units:
    """Eight SwiGLU experts a block: one weight for each, or all of them in one tensor."""
    attention: list[Shape] = [(width, width), (1024, width), (1024, width), (width, width)]
    router_and_norms: list[Shape] = [(experts, width), (width,), (width,)]
    expert: list[Shape] = [(hidden, width), (width, hidden), (hidden, width)]
    stacked: list[Shape] = [(experts, 2 * hidden, width), (experts, width, hidden)]
    return {
        "block": [*attention, *router_and_norms, *(expert * experts)],
        "block, experts stacked": [*attention, *router_and_norms, *stacked],
        "expert": expert,
        "embedding": [(32_000, width)],
        "root": [(width,), (32_000, width)],
    }


def vit_large_16(width: int = 1024) -> Units:
    """torchvision's vit_l_16."""
    norm: list[Shape] = [(width,), (width,)]
    block: list[Shape] = [*norm, (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    stem: list[Shape] = [(1, 1, width), (width, 3, 16, 16), (width,), (1, 197, width)]
    return {"block": block, "root": [*stem, *norm, (1000, width), (1000,)]}


def resnet50() -> Units:
    """A unit for each of the four stages, one for stem and classifier; and all as one unit."""
    units: Units = {}
    root: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for number, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        stage: list[Shape] = []
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for convolution in convolutions:
                stage += [convolution, (convolution[0],), (convolution[0],)]
            channels = 4 * width
        units[f"stage {number}"] = stage
    root += [(1000, 2048), (1000,)]
    whole = [*root[:3], *(shape for stage in units.values() for shape in stage), *root[3:]]
    return {**units, "root": root, "as one unit": whole}


MODELS: dict[str, Units] = {
    "Llama-3-8B": llama(4096, 14_336, 1024),
    "Llama-3-70B": llama(8192, 28_672, 1024),
    "GPT-2": gpt2(768),
    "GPT-2 medium": gpt2(1024),
    "GPT-2 large": gpt2(1280),
    "GPT-2 XL": gpt2(1600),
    "Mixtral-8x7B": mixtral(),
    "ViT-L/16": vit_large_16(),
    "ResNet-50": resnet50(),
}
"""Units by name, by model."""
