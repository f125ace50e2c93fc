"""The entry point: parse, run a command, say what was wrong with the input in one line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from ..planning.errors import PlanError
from .arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or 2 for bad input: then one line on stderr says what was found and what is accepted.
    """
    given = parser().parse_args(arguments)
    try:
        if given.command == "plan":
            from .plan import run
        else:
            from .explain import run
        run(given)
    except PlanError as error:
        if given.debug:
            traceback.print_exc()
        line = " ".join(str(error).split())
        print(f"compile_fsdp {given.command}: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0
