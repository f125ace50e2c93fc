"""Forms of an explanation, one file for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

from compile_fsdp.explanation import Explanation

_FORMS: Mapping[str, Callable[[Explanation], str]] = {
    # The longer ending first.
    ".trace.json": Explanation.to_chrome_trace,
    ".json": Explanation.to_json,
    ".html": Explanation.to_html,
    ".dot": Explanation.to_dot,
    ".svg": Explanation.to_svg,
    ".txt": lambda explanation: explanation.to_text(graphs="whole") + "\n",
}


def save(explanation: Explanation, path: str | PathLike[str]) -> None:
    """See `Explanation.save`."""
    target = Path(path)
    for ending, form in _FORMS.items():
        if target.name.endswith(ending):
            target.write_text(form(explanation), encoding="utf-8")
            return
    raise ValueError(
        f"an explanation cannot be saved as {target.name!r}: the name must end with one of "
        f"{', '.join(_FORMS)}"
    )
