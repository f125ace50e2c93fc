"""An explanation as one page that needs nothing but a browser: no network, no other file.

Each graph is its picture (see `svg`), the table of its steps, the reasons, and the graph itself
behind a fold. Without the script, as in a notebook, everything but the keyboard is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from compile_fsdp.explanation import Explanation, GraphExplanation

from . import svg, text

# Nothing is fetched, whatever a name in a model looks like.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(explanation: Explanation) -> str:
    """See `Explanation.to_html`."""
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(text.title(explanation))}</title>\n</head>\n<body>\n"
        f"{embedded(explanation)}<script>\n{script}</script>\n</body>\n</html>\n"
    )


def embedded(explanation: Explanation) -> str:
    """The page's contents, without a script, to be a part of another page."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f'<main class="cfsdp">\n<style>{style}</style>\n{"".join(_parts(explanation))}</main>\n'


def _parts(explanation: Explanation) -> Iterator[str]:
    yield f"<h1>{escape(text.title(explanation))}</h1>\n"
    for note in explanation.notes:
        yield f'<p class="note">{escape(note)}</p>\n'
    if explanation.groups:
        rows = map(text.group_row, explanation.groups)
        yield _table("Parameter groups", text.GROUP_COLUMNS, rows, (1, 2))
    if explanation.formats:
        yield _section("Compute weights", text.format_lines(explanation))
    for graph in explanation.graphs:
        yield from _graph(graph)
    if explanation.breaks:
        yield _section("Graph breaks", text.break_lines(explanation.breaks))
    if explanation.recompiles:
        yield _section("Recompiles", text.recompile_lines(explanation))


def _graph(graph: GraphExplanation) -> Iterator[str]:
    yield f'<section>\n<h2 id="graph-{graph.number}">{escape(text.heading(graph))}</h2>\n<ul>'
    yield "".join(f"<li>{escape(line)}</li>" for line in text.summary(graph))
    yield "</ul>\n"
    yield f'<div class="picture">\n{svg.render(graph)}</div>\n'
    yield (
        '<p class="hint">Point at a bar, or go to it with Tab and the arrow keys, to see its bytes '
        "and parameters.</p>\n"
    )
    if graph.steps:
        rows = map(text.step_row, graph.steps)
        yield _table("Steps, in the order of issue", text.STEP_COLUMNS, rows, text.RIGHT_ALIGNED)
    why = list(text.reasons(graph))[1:]
    if why:
        lines = "".join(f"<li>{escape(line.strip())}</li>" for line in why)
        yield f"<details open><summary>Why</summary><ul>{lines}</ul></details>\n"
    for name, listing in (
        ("communication and its neighbours", graph.communication),
        ("graph before", graph.before),
        ("graph after", graph.after),
    ):
        yield _folded(name, listing)
    yield "</section>\n"


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right_aligned: Sequence[int],
) -> str:
    def cell(kind: str, number: int, value: str) -> str:
        attributes = ' class="number"' if number in right_aligned else ""
        attributes += ' scope="col"' if kind == "th" else ""
        return f"<{kind}{attributes}>{escape(value)}</{kind}>"

    def line(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(kind, *each) for each in enumerate(cells))}</tr>\n"

    body = "".join(line("td", row) for row in rows)
    return (
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead>{line('th', columns)}</thead>\n"
        f"<tbody>{body}</tbody>\n</table>\n"
    )


def _section(name: str, lines: Iterable[str]) -> str:
    shown = escape("\n".join(lines))
    return f"<section><h2>{escape(name)}</h2><pre>{shown}</pre></section>\n"


def _folded(name: str, listing: str) -> str:
    return (
        f"<details><summary>{escape(name)}</summary>"
        f'<pre tabindex="0">{escape(listing)}</pre></details>\n'
    )
