"""An explanation in a terminal: coloured by ``rich`` where it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any, TextIO

from compile_fsdp.explanation import Explanation

from . import text

# What a line of the text says by how it begins, and the style that shows it. The first that fits.
_STYLES = (
    (r"compile_fsdp on ", "bold"),
    (r"graph \d+: |graph breaks$|recompiles$|compute weights$", "bold"),
    (r"(group|  +#) ", "dim"),
    (r" +\d+  (unshard|gather_together) ", "cyan"),
    (r" +\d+  (reduce_inner|reduce_together) ", "magenta"),
    (r" +\d+  reduce_outer ", "yellow"),
    (r" +\d+  (wait|release|wait_reductions) ", "dim"),
    (r" +\w* ?=? ?(unshard|gather_together|wait|release)\(", "cyan"),
    (r" +\w* ?=? ?(reduce_inner|reduce_together|reduce_outer|wait_reductions)\(", "cyan"),
    (r" +# ", "green"),
)


def show(explanation: Explanation, file: TextIO | None, *, graphs: str) -> None:
    """See `Explanation.show`."""
    stream = sys.stdout if file is None else file
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console(file=stream).print(render(explanation, graphs=graphs), soft_wrap=True)
    else:
        print(text.render(explanation, graphs=graphs), file=stream)


def render(explanation: Explanation, *, graphs: str = "none") -> Any:
    """Something that ``rich`` prints: the plain text, with a style for each line. Needs
    ``rich``."""
    from rich.text import Text

    shown = Text(no_wrap=True, overflow="ignore")
    for line in text.render(explanation, graphs=graphs).splitlines(keepends=True):
        shown.append(line, style=style_of(line))
    return shown


def style_of(line: str) -> str | None:
    """The style of one line of the text; None for the terminal's own."""
    for pattern, style in _STYLES:
        if re.match(pattern, line):
            return style
    return None
