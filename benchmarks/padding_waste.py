"""How much of a sharded buffer is padding, for the units of well-known models.

    python -m benchmarks.padding_waste                    # at 8, 64 and 512 ranks
    python -m benchmarks.padding_waste --ranks 16 32      # at others

For each unit: the elements that belong to no parameter, in percent of those that do, with the
alignment that bf16 weights get. Where equal segments would waste more than 3 %, ranks get unequal
ones, and what the equal ones would waste follows in parentheses (no layout of equal segments wastes
less: rows are never split, so a tensor longer than two segments needs segments of whole rows).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from compile_fsdp.runtime.layout import GlobalLayout, make_layout, padded_layout
from compile_fsdp.runtime.parameter_group import ALIGNMENT_BYTES

from .model_shapes import MODELS, Shape

ALIGNMENT = ALIGNMENT_BYTES // 2
"""Elements: bf16 is the narrowest dtype that most groups have."""


def wasted_percent(layout: GlobalLayout) -> float:
    """Elements of ``layout`` that belong to no tensor, in percent of those that do."""
    return 100 * layout.waste / (layout.size - layout.waste)


def cell(shapes: Sequence[Shape], ranks: int) -> str:
    """What the table says of one unit at one number of ranks."""
    used = make_layout(shapes, ranks, alignment=ALIGNMENT)
    equal = padded_layout(shapes, ranks, alignment=ALIGNMENT)
    instead = "" if used == equal else f" (equal: {wasted_percent(equal):.2f})"
    return f"{wasted_percent(used):.2f}{instead}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="padding of sharded buffers, in percent")
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
