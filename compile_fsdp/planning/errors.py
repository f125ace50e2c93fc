"""What is said to whoever asked for a plan that cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan cannot be made of what was given: what was found, what is accepted, in one line."""


def one_line(error: BaseException) -> str:
    """The first sentence or line of an error's message."""
    text = str(error).strip().splitlines()
    first = text[0].strip() if text else ""
    return first or type(error).__name__
