"""Sections of a report in a terminal: tables by ``rich`` where it is installed, else plain text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from compile_fsdp.passes.steps import table


@dataclass(frozen=True)
class Section:
    """A title, lines, and a table.

    Attributes:
        title: in a line of its own.
        lines: sentences below it.
        rows: the header and the rows of a table; none: no table.
        right: numbers of the columns that are aligned to the right.
    """

    title: str
    lines: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[int, ...] = ()


def plain(section: Section) -> list[str]:
    """The lines of a section as plain text."""
    cells = table(section.rows, section.right) if section.rows else []
    return [section.title, *(f"  {line}" for line in (*section.lines, *cells))]


def show(sections: Sequence[Section], file: TextIO) -> None:
    """Print ``sections``."""
    if file.isatty() and importlib.util.find_spec("rich") is not None:
        _show_rich(sections, file)
        return
    print("\n\n".join("\n".join(plain(section)) for section in sections), file=file)


def _show_rich(sections: Sequence[Section], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file)
    for section in sections:
        console.print(Text(section.title, style="bold"))
        for line in section.lines:
            console.print(Text(f"  {line}"))
        if section.rows:
            header, *rows = section.rows
            shown = Table(box=None, pad_edge=True, header_style="dim")
            for number, name in enumerate(header):
                justify = "right" if number in section.right else "left"
                shown.add_column(name, justify=justify)  # type: ignore[arg-type]
            for row in rows:
                shown.add_row(*map(Text, row))
            console.print(shown)
        console.print()
