"""Group name -> live parameter group.

Graphs outlive Python objects in compile caches, so a graph names its groups by a string and
finds the live object here. The registry holds groups weakly: it never keeps a model alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

from .group_info import GroupInfo


class RegisteredGroup(Protocol):
    """What the ops' fakes, the passes and the backend need from a group."""

    @property
    def info(self) -> GroupInfo: ...

    @property
    def trainable(self) -> tuple[bool, ...]: ...

    def follow_requires_grad(self) -> bool: ...


class GroupRegistry:
    """Weak map from group name to group, and the counter that makes names unique."""

    def __init__(self) -> None:
        self._groups: weakref.WeakValueDictionary[str, RegisteredGroup] = (
            weakref.WeakValueDictionary()
        )
        self._root_counter = itertools.count()

    def next_root(self) -> int:
        """A new root number: roots count in the order in which they are first named, which is
        the same on every rank that runs the same program."""
        return next(self._root_counter)

    def register(self, name: str, group: RegisteredGroup) -> None:
        """Make ``group`` findable under ``name``.

        Raises:
            ValueError: another live group has this name.
        """
        existing = self._groups.get(name)
        if existing is not None and existing is not group:
            raise ValueError(
                f"parameter group name {name!r} is already taken by another live group; "
                "names must be unique within a process"
            )
        self._groups[name] = group

    def unregister(self, name: str) -> None:
        """Forget ``name`` (no error when it is unknown)."""
        self._groups.pop(name, None)

    def lookup(self, name: str) -> RegisteredGroup:
        """The live group called ``name``.

        Raises:
            RuntimeError: no live group has this name, so the model a graph was compiled for has
                been deleted, or the graph came from a program that shards other modules.
        """
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(sorted(self._groups)) or "none"
            raise RuntimeError(
                f"no live parameter group is named {name!r} (live groups: {known}). The compiled "
                "graph belongs to a sharded model that no longer exists: keep the model alive "
                "while its compiled graphs run, or compile again after fully_shard"
            )
        return group


registry = GroupRegistry()
"""The registry of this process. It must be one: graphs carry nothing but the string."""
