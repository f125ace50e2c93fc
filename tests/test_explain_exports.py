"""The trace that Perfetto opens and the graph that Graphviz draws."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from expecttest import assert_expected_inline

from tests.explanations import FORWARD, HAND_MADE


def test_the_trace_has_a_thread_for_each_lane_and_a_counter() -> None:
    events = json.loads(HAND_MADE.to_chrome_trace())["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["compute", "gather", "reduce_inner", "reduce_outer"]
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, "root", 40.0, 20.0),
        (0, "block", 90.0, 30.0),
        (1, "root", 0.0, 40.0),
        (1, "block", 40.0, 50.0),
    ]
    (block,) = (
        event
        for event in events
        if event["ph"] == "X" and event["ts"] == 40.0 and event["tid"] == 1
    )
    assert block["args"]["bytes"] == 6144
    assert block["args"]["parameters"][0] == "block.up.weight"
    counted = [event["args"]["parameters"] for event in events if event["ph"] == "C"]
    assert counted == [2048, 8192, 6144, 0]


def test_graphs_are_processes_of_their_own() -> None:
    two = replace(HAND_MADE, graphs=(FORWARD, replace(FORWARD, number=1, kind="backward")))
    events = json.loads(two.to_chrome_trace())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert names == {0: "graph 0: forward (0/0)", 1: "graph 1: backward (0/0)"}


def test_spans_that_take_no_time_are_there() -> None:
    spans = tuple(replace(span, end=span.start) for span in FORWARD.spans)
    explanation = replace(HAND_MADE, graphs=(replace(FORWARD, spans=spans),))
    events = json.loads(explanation.to_chrome_trace())["traceEvents"]
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")


def test_the_order_of_the_steps_as_a_graph() -> None:
    text = HAND_MADE.to_dot()
    arrows = "\n".join(line.strip() for line in text.splitlines() if "->" in line)
    assert_expected_inline(
        arrows,
        """\
s0 -> s1;
s1 -> s2;
s0 -> s2 [style=dotted];
s0 -> s3 [style=dotted];
s3 -> s4;
s1 -> s4 [style=dotted];
s1 -> s5 [style=dotted];""",
    )
    assert 's1 [label="1 unshard block\\n6.0 KiB dp\\nbefore embedding"' in text
    assert 'tooltip="block.up.weight\\nblock.down.weight\\nblock.<odd>.weight"' in text
    assert text.count("{") == text.count("}")


def test_names_with_quotes_stay_one_string() -> None:
    odd = replace(FORWARD, steps=tuple(replace(s, group='a"b\\c') for s in FORWARD.steps))
    text = replace(HAND_MADE, graphs=(odd,)).to_dot()
    for line in text.splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line


def test_exports_are_saved_by_name(tmp_path: Path) -> None:
    for name, start in (
        ("a.trace.json", '{\n "traceEvents"'),
        ("a.dot", "digraph"),
        ("a.svg", "<svg"),
        ("a.html", "<!DOCTYPE html>"),
    ):
        HAND_MADE.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start), name
