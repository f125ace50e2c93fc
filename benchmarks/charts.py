"""Bar charts as PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .results import Bars


def draw(charts: Mapping[str, Bars], folder: Path) -> list[Path]:
    """Write ``folder/name.png`` for each chart; returns the paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    return [_draw(bars, folder / f"{name}.png") for name, bars in charts.items()]


def _draw(bars: Bars, path: Path) -> Path:
    from matplotlib import pyplot

    places = range(len(bars.categories))
    figure, axes = pyplot.subplots(
        1, len(bars.categories), figsize=(3.4 * len(bars.categories) + 1.6, 3.6), squeeze=False
    )
    for place, axis in zip(places, axes[0], strict=True):
        names = [name for name, heights in bars.bars.items() if heights[place] is not None]
        heights = [bars.bars[name][place] for name in names]
        colours = ["tab:blue" if name.startswith("compile_fsdp") else "tab:gray" for name in names]
        drawn = axis.barh(names, heights, color=colours)
        axis.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
        for label, marks in bars.lines.items():
            if marks[place] is not None:
                axis.axvline(marks[place], color="tab:red", linewidth=1, label=label)
                axis.legend(fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(bars.categories[place], fontsize=9)
        axis.set_xlabel(bars.unit, fontsize=8)
        axis.tick_params(labelsize=7, labelleft=place == 0 or names != _names(bars, place - 1))
    figure.suptitle(bars.title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _names(bars: Bars, place: int) -> list[str]:
    return [name for name, heights in bars.bars.items() if heights[place] is not None]
