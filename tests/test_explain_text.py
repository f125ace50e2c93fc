# ruff: noqa: E501  (tables are as wide as they are)
"""The text and the JSON form of an explanation, as a reader sees them."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from compile_fsdp import Explanation
from compile_fsdp.report import terminal
from tests.explaining import explain_language_model, fake_world
from tests.explanations import HAND_MADE


def test_the_text() -> None:
    assert_expected_inline(
        str(HAND_MADE),
        """\
compile_fsdp on torch 2.13.0: 1 graph, 2 parameter groups, 2 ranks, 1 graph break, 1 recompile

group  gathered    shard  dtype    parameters
root    2.0 KiB  1.0 KiB  float32  embedding.weight
block   6.0 KiB  3.0 KiB  float32  block.{up.weight down.weight <odd>.weight}

graph 0: forward (0/0)  model.py:7 in forward: return self.block(self.embedding(x))
  2 all_gather over dp, 8.0 KiB together
  at most 9.0 KiB at a time: 1.0 KiB activations + 8.0 KiB gathered parameters
  beside 8.0 KiB of shards and their gradients, budget 64.0 KiB
  modelled (cpu+gloo): 120.0 us = 50.0 us compute + 70.0 us exposed of 90.0 us communication
  #  step     group  where               bytes  axis    us  exposed  names  overlaps  parameters
  0  unshard  root   at the start      2.0 KiB  dp    40.0                            embedding.weight
  1  unshard  block  before embedding  6.0 KiB  dp    50.0           0      root      block.{up.weight down.weight +1}
  2  wait     root   before embedding                          40.0  1
  3  release  root   after embedding
  4  wait     block  before mm                                 30.0  3
  5  release  block  after mm
  why
    block: released: keeping it would raise the peak
    0: gathered first: nothing computes before it
    1: prefetched 1 group ahead
    2 4: read from here on

graph breaks
  /home/me/model.py:9 in forward: print("loss & more")
    Call to `print`
      Explanation: <b>not</b> traced.

recompiles
  0/1 model.py:7 in forward: x
    0/0: tensor 'x' size mismatch""",
    )


def test_the_graphs_are_printed_when_asked_for() -> None:
    short = HAND_MADE.to_text(graphs="communication")
    assert "  communication:\n    full_root = unshard(primals_1)\n        embedding" in short
    whole = HAND_MADE.to_text(graphs="whole")
    assert "  before:\n    primals_1: f32[64]" in whole and "  after:\n" in whole
    with pytest.raises(ValueError, match="graphs must be one of none, communication, whole"):
        HAND_MADE.to_text(graphs="all")


def test_a_real_graph() -> None:
    with fake_world(2):
        forward, backward = explain_language_model().graphs
    lines = forward.after.splitlines()
    first = lines.index("# models.py:38 in forward: x = self.embedding(tokens)")
    shown = re.sub(r"'\d+/", "'0/", "\n".join(lines[first - 5 : first + 2]))
    assert_expected_inline(
        shown,
        """\
full_root: f32[744] = compile_fsdp.unshard(primals_1, '0//0', [])
full_blocks_0: f32[1248] = compile_fsdp.unshard(primals_3, '0/blocks.0/0', [full_root])
wait_root = compile_fsdp.wait(full_root, '0//0', [full_blocks_0])
embedding_weight: f32[31, 12] = aten.as_strided(full_root, [31, 12], [12, 1], 0)
head_weight: f32[31, 12] = aten.as_strided(full_root, [31, 12], [12, 1], 372)
# models.py:38 in forward: x = self.embedding(tokens)
embedding: f32[2, 5, 12] = aten.embedding(embedding_weight, primals_2)""",
    )
    assert "compile_fsdp.parameter(" in forward.before and "unshard" not in forward.before
    assert "compile_fsdp.parameter(" not in forward.after
    assert "reduce_inner(" in backward.communication and "# " not in backward.communication


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_a_file_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), io.StringIO()
    HAND_MADE.show(coloured)
    HAND_MADE.show(plain)
    assert "\x1b[" in coloured.getvalue() and "\x1b[" not in plain.getvalue()
    assert plain.getvalue() == str(HAND_MADE) + "\n"
    row = "0      root      block.{up.weight down.weight +1}"
    assert row in coloured.getvalue(), "long lines stay whole"


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    stream = Terminal()
    HAND_MADE.show(stream)
    assert stream.getvalue() == str(HAND_MADE) + "\n"


# JSON ------------------------------------------------------------------------------------------


def test_json_and_back() -> None:
    text = HAND_MADE.to_json()
    assert Explanation.from_json(text) == HAND_MADE
    data = json.loads(text)
    assert (data["format"], data["version"]) == ("compile_fsdp.explanation", 1)
    assert_expected_inline(
        json.dumps(data["graphs"][0]["steps"][1], indent=1),
        """\
{
 "number": 1,
 "op": "unshard",
 "group": "block",
 "fqns": [
  "block.up.weight",
  "block.down.weight",
  "block.<odd>.weight"
 ],
 "bytes": 6144,
 "axis": "dp",
 "where": "before embedding",
 "anchor": 2,
 "names": [
  0
 ],
 "overlaps": [
  "root"
 ],
 "reason": "prefetched 1 group ahead",
 "issued": 0.0,
 "start": 40.0,
 "end": 90.0,
 "exposed": 0.0
}""",
    )


def test_json_of_a_newer_writer_is_read_and_of_another_version_refused() -> None:
    data = json.loads(HAND_MADE.to_json())
    data["graphs"][0]["steps"][0]["colour"] = "a field of the future"
    assert Explanation.from_json(json.dumps(data)) == HAND_MADE
    data["version"] = 2
    with pytest.raises(ValueError, match="version 2 of the schema, expected 1"):
        Explanation.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": "x"}', "of format 'compile_fsdp.explanation'"),
        ('{"format": "compile_fsdp.explanation", "version": 1}', "lacks a field"),
    ],
)
def test_what_is_no_explanation(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Explanation.from_json(text)


def test_json_of_the_wrong_type_names_the_place() -> None:
    data = json.loads(HAND_MADE.to_json())
    data["graphs"][0]["steps"][0]["bytes"] = "many"
    with pytest.raises(ValueError, match=r"explanation\.graphs\[\]\.steps\[\]\.bytes must be int"):
        Explanation.from_json(json.dumps(data))


# Files -----------------------------------------------------------------------------------------


def test_files_by_the_end_of_their_name(tmp_path: Path) -> None:
    HAND_MADE.save(tmp_path / "a.json")
    assert Explanation.from_json((tmp_path / "a.json").read_text()) == HAND_MADE
    HAND_MADE.save(str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text() == HAND_MADE.to_text(graphs="whole") + "\n"
    with pytest.raises(ValueError, match=r"'a\.pdf': the name must end with one of"):
        HAND_MADE.save(tmp_path / "a.pdf")


def test_nothing_is_said_of_what_is_not_there() -> None:
    empty = replace(HAND_MADE, groups=(), graphs=(), breaks=(), recompiles=())
    assert str(empty) == "compile_fsdp on torch 2.13.0: 0 graphs, 0 parameter groups, 2 ranks"
    assert not empty and HAND_MADE
    with pytest.raises(ValueError, match="no graph 0 in this explanation; graphs: none"):
        empty.graph(0)


def test_an_arena_is_shown_with_its_size() -> None:
    forward, *_ = HAND_MADE.graphs
    placed = replace(forward, arena_bytes=3072, arena_bound=2048)
    assert "arena" not in str(replace(HAND_MADE, graphs=(forward,)))
    shown = replace(HAND_MADE, graphs=(placed,))
    assert "  arena of 3.0 KiB, of which 2.0 KiB are live at once\n" in str(shown)
    assert Explanation.from_json(shown.to_json()) == shown
