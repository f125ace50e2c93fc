"""What a user can get wrong."""

from __future__ import annotations


class InputError(Exception):
    """A wrong option, path or checkpoint: one line that names it and the way out."""
