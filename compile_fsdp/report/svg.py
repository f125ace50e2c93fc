"""One graph as a picture: a lane for compute and for each kind of communication, memory below.

The picture stands alone (a file, a README) and is what the page shows. Every span says what it is
in a ``<title>``, which viewers show when the pointer rests on it, and in ``data-`` attributes for
the page's script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from compile_fsdp.explanation import LANES, GraphExplanation, MemoryPoint, Span
from compile_fsdp.passes.steps import format_bytes, format_seconds

from .text import short_fqns

LABEL_WIDTH = 110
RIGHT_MARGIN = 20
TOP = 24
LANE_HEIGHT = 30
BAR_HEIGHT = 22
MEMORY_HEIGHT = 110
GAP = 26
NARROWEST = 2.0

LEAST_WIDTH = 960
MOST_WIDTH = 12_000
WIDTH_PER_SPAN = 18

LANE_NAMES = {
    "compute": "compute",
    "gather": "gather",
    "reduce_inner": "reduce inner",
    "reduce_outer": "reduce outer",
}

KINDS = ("activations", "parameters", "gradients")


def render(graph: GraphExplanation) -> str:
    """See `Explanation.to_svg`."""
    picture = Picture(graph)
    width, height = picture.width, picture.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" class="cfsdp-graph" role="group" '
        f'aria-label="{escape(graph.name)}">\n'
        f"<style>{style()}</style>\n{''.join(picture.parts())}</svg>\n"
    )


def style() -> str:
    """The rules of the picture."""
    return files(__package__).joinpath("picture.css").read_text(encoding="utf-8")


class Picture:
    """The geometry of one graph's picture.

    Args:
        graph: what to draw.
    """

    def __init__(self, graph: GraphExplanation) -> None:
        self.graph = graph
        used = {span.lane for span in graph.spans}
        self.lanes = [lane for lane in LANES if lane in used] or ["compute"]
        busiest = max((sum(s.lane == lane for s in graph.spans) for lane in self.lanes), default=0)
        self.width = min(MOST_WIDTH, max(LEAST_WIDTH, LABEL_WIDTH + WIDTH_PER_SPAN * busiest))
        ends = [span.end for span in graph.spans] + [point.at for point in graph.memory]
        starts = [span.start for span in graph.spans] + [point.at for point in graph.memory]
        self.first = min(starts, default=0.0)
        self.last = max(ends, default=1.0)
        self.memory_top = TOP + LANE_HEIGHT * len(self.lanes) + GAP
        self.height = self.memory_top + MEMORY_HEIGHT + GAP

    def x(self, at: float) -> float:
        """Where a time is, in pixels."""
        duration = (self.last - self.first) or 1.0
        drawn = self.width - LABEL_WIDTH - RIGHT_MARGIN
        return LABEL_WIDTH + (at - self.first) / duration * drawn

    def parts(self) -> Iterator[str]:
        """The elements of the picture, from back to front."""
        yield from self._axis()
        for row, lane in enumerate(self.lanes):
            y = TOP + row * LANE_HEIGHT
            yield (
                f'<g class="lane {lane}" role="list" data-lane="{lane}" '
                f'aria-label="{LANE_NAMES[lane]}">'
                f'<text class="lane-name" x="4" y="{y + 16}">{LANE_NAMES[lane]}</text>\n'
            )
            for span in self.graph.spans:
                if span.lane == lane:
                    yield self._span(span, y)
            yield "</g>\n"
        yield from self._memory()

    def _axis(self) -> Iterator[str]:
        for part in range(5):
            at = self.first + (self.last - self.first) * part / 4
            x = f"{self.x(at):.1f}"
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{self.height - GAP}"/>'
            anchor = ' text-anchor="end"' if part == 4 else ""
            yield f'<text class="tick" x="{x}" y="14"{anchor}>{escape(self.time(at))}</text>\n'

    def time(self, at: float) -> str:
        """A time for people."""
        return format_seconds(at / 1e6) if self.graph.time_unit == "us" else f"node {at:.0f}"

    def _span(self, span: Span, y: float) -> str:
        x, end = self.x(span.start), self.x(span.end)
        width = max(NARROWEST, end - x)
        told = self.told(span)
        label = ""
        if width > 6.5 * len(span.label) + 6:
            label = f'<text class="label" x="{x + 4:.1f}" y="{y + 15}">{escape(span.label)}</text>'
        reads = " idle" if span.lane == "compute" and not span.fqns else ""
        return (
            f"{_opened(told, reads)}"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"/>'
            f"{label}</g>\n"
        )

    def told(self, span: Span) -> str:
        """What a span is, in lines: what, which bytes, when, which parameters."""
        what = f"{LANE_NAMES[span.lane]} {span.label}".rstrip()
        lines = [what if span.step is None else f"{what} (step {span.step})"]
        if span.bytes:
            lines.append(format_bytes(span.bytes))
        lines.append(f"{self.time(span.start)} to {self.time(span.end)}, {span.detail}")
        if span.fqns:
            lines.append(short_fqns(span.fqns, 8))
        return "\n".join(lines)

    def _memory(self) -> Iterator[str]:
        points = self.graph.memory
        peak = self.graph.peak
        if peak is None or not peak.total:
            return
        bottom = self.memory_top + MEMORY_HEIGHT
        yield '<g class="memory" role="list" data-lane="memory" aria-label="memory">'
        yield f'<text class="lane-name" x="4" y="{self.memory_top + 12}">memory</text>'
        yield (
            f'<text class="tick" x="4" y="{self.memory_top + 28}">'
            f"peak {format_bytes(peak.total)}</text>\n"
        )
        yield from self._legend()
        below = [0] * len(points)
        for kind in KINDS:
            above = [base + getattr(point, kind) for base, point in zip(below, points, strict=True)]
            if above != below:
                path = self._area(points, below, above, peak.total, bottom)
                yield f'<path class="{kind}" d="{path}"><title>{kind}</title></path>\n'
            below = above
        yield from self._memory_points(points, peak)
        yield "</g>\n"

    def _legend(self) -> Iterator[str]:
        for row, kind in enumerate(KINDS):
            y = self.memory_top + 40 + 16 * row
            yield f'<rect class="{kind}" x="4" y="{y}" width="9" height="9"/>'
            yield f'<text class="tick" x="17" y="{y + 9}">{kind}</text>\n'

    def _area(
        self,
        points: Sequence[MemoryPoint],
        below: Sequence[int],
        above: Sequence[int],
        most: int,
        bottom: float,
    ) -> str:
        """The outline of one kind of memory between two step functions."""
        ends = [*(point.at for point in points[1:]), self.last]

        def corners(values: Sequence[int]) -> list[str]:
            found = []
            for point, end, value in zip(points, ends, values, strict=True):
                y = bottom - value / most * MEMORY_HEIGHT
                found += [f"{self.x(point.at):.1f} {y:.1f}", f"{self.x(end):.1f} {y:.1f}"]
            return found

        return f"M{'L'.join([*corners(above), *reversed(corners(below))])}Z"

    def _memory_points(self, points: Sequence[MemoryPoint], peak: MemoryPoint) -> Iterator[str]:
        """Something to point at for every piece of the curve."""
        ends = [*(point.at for point in points[1:]), self.last]
        for point, end in zip(points, ends, strict=True):
            x = self.x(point.at)
            told = self._memory_told(point, point is peak)
            yield (
                f"{_opened(told, ' point')}"
                f'<rect x="{x:.1f}" y="{self.memory_top}" '
                f'width="{max(NARROWEST, self.x(end) - x):.1f}" height="{MEMORY_HEIGHT}"/></g>\n'
            )

    def _memory_told(self, point: MemoryPoint, is_peak: bool) -> str:
        lines = [f"memory at {self.time(point.at)}: {format_bytes(point.total)}"]
        if is_peak:
            lines[0] += " (peak)"
        lines += [
            f"{kind} {format_bytes(getattr(point, kind))}" for kind in KINDS if getattr(point, kind)
        ]
        return "\n".join(lines)


def _opened(told: str, kinds: str) -> str:
    """The start of a span's group, which says in ``told`` what it is."""
    # A line break that is not written as a reference is a space in an attribute.
    attribute = escape(told).replace("\n", "&#10;")
    return (
        f'<g class="span{kinds}" role="listitem" aria-label="{attribute}" '
        f'data-tip="{attribute}"><title>{escape(told)}</title>'
    )
