"""CommunicationError: what a user sees when a collective cannot be started or completed.

The text of a backend says little of where a program was: an aborted NCCL communicator, or a
connection that was reset. What is raised instead names the collective, the parameter group, the
ranks and the process group, and the operator of the compiled graph that started or waited for it;
the backend's own error is its cause (``raise ... from``).
"""

from __future__ import annotations

# What a backend's message contains, and what that means. The first that fits is taken.
_CAUSES = (
    (
        ("abort",),
        "The communicator was aborted: by NCCL's watchdog after a time-out or a failure (what it "
        "wrote on standard error has the process group's name), or by destroy_process_group on "
        "this rank",
    ),
    (
        ("invalid process group", "has been destroyed", "not initialized"),
        "The process group was destroyed while the model was in use",
    ),
    (
        ("unhandled cuda error", "unhandled system error", "invalid usage", "internal error"),
        "NCCL_DEBUG=WARN in the environment makes NCCL say more. An earlier kernel may have failed "
        "as well: CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
)
_OTHERWISE = "Most likely one of these ranks has ended; its own output says why"


class CommunicationError(RuntimeError):
    """A collective could not be agreed on, started or completed."""

    def add_place(self, place: str) -> None:
        """Say where in the program it was noticed."""
        text, *rest = self.args
        self.args = (f"{text}\n(noticed {place})", *rest)


def likely_cause(error: BaseException) -> str:
    """What the backend's ``error`` means, in one or two sentences without the last full stop."""
    text = str(error).lower()
    for patterns, meaning in _CAUSES:
        if any(pattern in text for pattern in patterns):
            return meaning
    return _OTHERWISE
