"""The page and the picture: well formed, complete, and right in a browser if there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compile_fsdp import Explanation
from compile_fsdp.explanation import MemoryPoint, Span
from tests.explanations import FORWARD, HAND_MADE

SVG = "{http://www.w3.org/2000/svg}"
BROWSERS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")


# The picture -----------------------------------------------------------------


def picture(explanation: Explanation = HAND_MADE) -> ElementTree.Element:
    return ElementTree.fromstring(explanation.to_svg())


def spans(lane: str) -> list[ElementTree.Element]:
    return picture().findall(f".//*[@data-lane='{lane}']/{SVG}g")


def box(span: ElementTree.Element) -> tuple[float, float]:
    rectangle = span.find(f"{SVG}rect")
    assert rectangle is not None
    left = float(rectangle.attrib["x"])
    return left, left + float(rectangle.attrib["width"])


def test_each_lane_that_is_used_has_its_spans() -> None:
    lanes = [group.attrib["data-lane"] for group in picture().findall(".//*[@data-lane]")]
    assert lanes == ["compute", "gather", "memory"]
    assert [len(spans(lane)) for lane in lanes] == [2, 2, 4]


def test_a_span_tells_its_bytes_and_parameters() -> None:
    _, block = spans("gather")
    title = block.find(f"{SVG}title")
    assert title is not None
    assert title.text == block.attrib["data-tip"] == block.attrib["aria-label"]
    assert title.text.splitlines() == [
        "gather block (step 1)",
        "6.0 KiB",
        "40.0 us to 90.0 us, before embedding",
        "block.{up.weight down.weight <odd>.weight}",
    ]


def test_time_runs_to_the_right_at_one_scale() -> None:
    (root, block), (embedding, mm) = spans("gather"), spans("compute")
    assert box(root)[1] == pytest.approx(box(block)[0], abs=0.2)
    assert box(embedding)[0] == pytest.approx(box(root)[1], abs=0.2), "computes when it is there"
    assert box(mm)[0] == pytest.approx(box(block)[1], abs=0.2)
    seconds = (box(block)[1] - box(block)[0]) / (box(root)[1] - box(root)[0])
    assert seconds == pytest.approx(50 / 40, rel=0.01)


def test_the_memory_curve_has_its_peak_at_the_top() -> None:
    tips = [point.attrib["data-tip"].splitlines() for point in spans("memory")]
    assert tips[1] == [
        "memory at 40.0 us: 9.0 KiB (peak)",
        "activations 1.0 KiB",
        "parameters 8.0 KiB",
    ]
    assert sum("(peak)" in tip[0] for tip in tips) == 1


def test_a_graph_without_communication_is_drawn() -> None:
    bare = replace(FORWARD, steps=(), spans=(), memory=(MemoryPoint(0.0, 0, 0, 0),))
    explanation = replace(HAND_MADE, graphs=(bare,))
    assert picture(explanation).findall(".//*[@data-lane='compute']")
    assert (
        "no communication" in replace(HAND_MADE, graphs=(replace(bare, collectives=()),)).to_html()
    )


def test_many_spans_make_a_wide_picture_and_short_ones_are_visible() -> None:
    many = tuple(Span("gather", float(n), float(n), f"b{n}", step=n) for n in range(200))
    wide = picture(replace(HAND_MADE, graphs=(replace(FORWARD, spans=many),)))
    assert float(wide.attrib["width"]) > 3000
    widths = {
        rectangle.attrib["width"] for rectangle in wide.findall(f".//{SVG}g/{SVG}g/{SVG}rect")
    }
    assert all(float(width) >= 2 for width in widths)


# The page, without a browser -----------------------------------------------------------------


class Page(HTMLParser):
    """Tags that are open, and what would be fetched."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tables: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "action", "xlink:href") and value is not None:
                self.fetched.append(value)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    text = HAND_MADE.to_html()
    page = Page(text)
    assert page.fetched == ["data:,"], "the icon that browsers would ask for"
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)


def test_what_comes_from_a_model_is_text() -> None:
    """Names, reasons and code are escaped."""
    text = HAND_MADE.to_html()
    assert "<odd>" not in text and "<b>not</b>" not in text
    words = "".join(Page(text).words)
    assert "block.{up.weight down.weight <odd>.weight}" in words
    assert "Explanation: <b>not</b> traced." in words and 'print("loss & more")' in words
    assert "full_root: f32[128] = compile_fsdp.unshard(primals_1, '0//0', [])" in words
    assert "prefetched 1 group ahead" in words and "size mismatch" in words


def test_a_notebook_shows_the_same_without_a_script() -> None:
    shown = HAND_MADE._repr_html_()
    page = Page(shown)
    assert "<script" not in shown and page.fetched == []
    assert "<title>gather block (step 1)" in shown


# The page in a browser -----------------------------------------------------------------

PROBE = """
<script>
"use strict";
const told = {};
try {
  const tip = document.getElementById("cfsdp-tip");
  const lanes = Array.from(document.querySelectorAll("[data-lane]"));
  told.lanes = lanes.map((lane) => lane.dataset.lane);
  const block = document.querySelectorAll('[data-lane="gather"] .span')[1];
  block.dispatchEvent(new MouseEvent("mouseenter"));
  told.hover = tip.textContent;
  const seen = tip.getBoundingClientRect();
  told.visible = seen.width > 0 && seen.top >= 0 && seen.right <= window.innerWidth;
  block.dispatchEvent(new MouseEvent("mouseleave"));
  told.hidden = getComputedStyle(tip).display === "none";
  told.stops = document.querySelectorAll('.span[tabindex="0"]').length;
  const press = (key) => document.activeElement.dispatchEvent(
    new KeyboardEvent("keydown", { key: key, bubbles: true, cancelable: true }));
  const at = () => document.activeElement.dataset.tip.split("\\n")[0];
  document.querySelector('.span[tabindex="0"]').focus();
  told.path = [at()];
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowDown", "End"]) {
    press(key);
    told.path.push(at());
  }
  told.focus = tip.textContent.split("\\n")[0];
  press("Escape");
  told.escaped = getComputedStyle(tip).display === "none";
  const bar = block.querySelector("rect").getBoundingClientRect();
  told.drawn = bar.width > 50 && bar.height > 10;
} catch (error) {
  told.error = String(error);
}
const result = document.createElement("pre");
result.id = "told";
result.textContent = JSON.stringify(told);
document.body.appendChild(result);
</script>
"""


def browser() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH and CHROMIUM is not set")
    return found


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1200,900"]
    # A loaded machine starts a browser slowly; nothing here depends on how fast it is.
    return subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def visited(tmp_path: Path) -> Iterator[tuple[dict[str, object], str, list[str]]]:
    """What the probe found, the browser's own log, and the addresses it asked for."""
    page = tmp_path / "page.html"
    page.write_text(HAND_MADE.to_html().replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    log = tmp_path / "net.json"
    done = browse(page, "--virtual-time-budget=2000", f"--log-net-log={log}", "--dump-dom")
    match = re.search(r'<pre id="told">(.*?)</pre>', done.stdout)
    assert match, done.stderr[-2000:]
    asked = sorted(set(re.findall(r'"url":"(https?://[^"]*)"', log.read_text())))
    yield json.loads(match[1].replace("&gt;", ">").replace("&lt;", "<")), done.stderr, asked


def test_in_a_browser(visited: tuple[dict[str, object], str, list[str]]) -> None:
    told, log, asked = visited
    assert "error" not in told, told
    assert told["lanes"] == ["compute", "gather", "memory"]
    assert told["drawn"] and told["visible"] and told["hidden"] and told["escaped"]
    assert str(told["hover"]).splitlines() == [
        "gather block (step 1)",
        "6.0 KiB",
        "40.0 us to 90.0 us, before embedding",
        "block.{up.weight down.weight <odd>.weight}",
    ]
    assert told["stops"] == 1, "one stop of the Tab key for a graph"
    assert told["path"] == [
        "compute root",
        "compute block",
        "compute block",  # nothing is further right
        "gather block (step 1)",
        "gather root (step 0)",
        "memory at 0.0 us: 2.0 KiB",
        "memory at 120.0 us: 1.0 KiB",
    ]
    assert told["focus"] == "memory at 120.0 us: 1.0 KiB"
    assert "CONSOLE" not in log, log
    assert asked == []
