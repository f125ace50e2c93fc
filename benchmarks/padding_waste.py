"""How much of a padded buffer is padding, for the units of well-known models.

    python benchmarks/padding_waste.py                    # at 8, 64 and 512 ranks
    python benchmarks/padding_waste.py --ranks 16 32      # at others

For each unit: the elements that belong to no parameter, in percent of those that do, with the
alignment that bf16 weights get. Where that is more than 3 %, the least that any layout of equal
segments wastes follows in parentheses: rows are never split, so a tensor longer than two segments
needs segments of whole rows. ``ShardLayout.PACKED`` has no padding, and segments that differ.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from compile_fsdp.runtime.layout import least_padded_size, padded_layout
from compile_fsdp.runtime.parameter_group import ALIGNMENT_BYTES
from model_shapes import MODELS, Shape

ALIGNMENT = ALIGNMENT_BYTES // 2
"""Elements: bf16 is the narrowest dtype that most groups have."""
SHOWN_BOUND = 0.03


def wasted_share(shapes: Sequence[Shape], ranks: int) -> tuple[float, float]:
    """``(waste, least possible)`` of a unit's padded buffer, each a share of its parameters."""
    layout = padded_layout(shapes, ranks, alignment=ALIGNMENT)
    least = least_padded_size(shapes, ranks, alignment=ALIGNMENT)
    payload = layout.size - layout.waste
    return layout.waste / payload, (least - payload) / payload


def cell(shapes: Sequence[Shape], ranks: int) -> str:
    """What the table says of one unit at one number of ranks."""
    waste, least = wasted_share(shapes, ranks)
    bound = f" (>= {100 * least:.2f})" if waste > SHOWN_BOUND else ""
    return f"{100 * waste:.2f}{bound}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="padding of PADDED layouts, in percent")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    ranks = parser.parse_args().ranks
    header = f"{'model':13} {'unit':22} {'parameters':>12}"
    print(header + "".join(f"{f'{count} ranks':>24}" for count in ranks))
    for model, units in MODELS.items():
        for unit, shapes in units.items():
            parameters = sum(math.prod(shape) for shape in shapes)
            cells = "".join(f"{cell(shapes, count):>24}" for count in ranks)
            print(f"{model:13} {unit:22} {parameters:12,}{cells}")


if __name__ == "__main__":
    main()
