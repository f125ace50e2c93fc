"""Trainability: which parameters of a group are trainable, as the user's flags say.

The flags are on the sharded parameters, where ``requires_grad_()`` of a module or of a parameter
sets them. Compute sees other tensors: the unsharded parameters, and in graphs the flat leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from .parameter import FsdpParameter


class Trainability:
    """The flags of one group's parameters as they were when last taken over.

    Attributes:
        flags: for each parameter whether it is trainable.
    """

    def __init__(self, parameters: Sequence[FsdpParameter]) -> None:
        self._parameters = tuple(parameters)
        self._listeners: list[Callable[[], None]] = []
        self.flags = self._flags_of_now()

    def _flags_of_now(self) -> tuple[bool, ...]:
        return tuple([parameter.sharded.requires_grad for parameter in self._parameters])

    def has_changed(self) -> bool:
        """Whether a sharded parameter's flag is another one now."""
        return self._flags_of_now() != self.flags

    def take_over(self, flat_leaf: nn.Parameter) -> None:
        """Set what compute sees to the flags of now, and tell the listeners."""
        self.flags = self._flags_of_now()
        flat_leaf.requires_grad_(any(self.flags))
        for parameter, flag in zip(self._parameters, self.flags, strict=True):
            parameter.unsharded.requires_grad_(flag)
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now and after every change."""
        self._listeners.append(listener)
        listener()
