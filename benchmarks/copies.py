"""Copies of weights and of weight gradients in one step of a compiled model, counted.

Two gloo ranks, Inductor; the profiler sees what operators and the runtime copy, and Inductor's own
kernels by the names of the operators they are made of. What is looked for is as large as the
smallest weight matrix at least:

    packing      a gradient is copied into the buffer that is reduced
    unsharding   a weight is copied out of the gathered buffer

The own part of a gather, which every all-gather puts into its result, is listed and not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from compile_fsdp.passes.steps import format_bytes

from .contenders import CONTENDERS, compile_fsdp
from .ranks import Ranks, RanksFailed, World
from .results import Missing, Part, Settings, progress, table
from .workloads import Shape, batch_of, seeded_model, shape_of

WORKLOAD = "comm"
OURS = "compile_fsdp"
PEERS = ("FSDP2 eager", "FSDP2 + compile, by block")
COPYING = (
    "aten::copy_",
    "aten::cat",
    "aten::stack",
    "aten::split_with_sizes_copy",
    "aten::_chunk_cat",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
    "fsdp::all_gather_copy_in",
)
"""Operators that copy themselves; others (``clone``, ``_to_copy``) call the first."""

_COPYING_NAMES = {"copy", "clone", "cat", "view", "t", "permute", "slice", "as", "strided", "to"}


@dataclass(frozen=True)
class Copy:
    """One operator that copies.

    Attributes:
        operator: its name.
        elements: how many it copies; 0 where that is not known.
        inside: names of the operators and ranges around it, the innermost first.
    """

    operator: str
    elements: int
    inside: tuple[str, ...]

    @property
    def where(self) -> str:
        """In which part of a step: "unsharding", "packing", "compute", or in a "collective"."""
        for name in self.inside:
            if name.startswith("c10d::"):
                return "collective"
            called = name.replace("::", ".")  # an operator, or the range of a group
            if called.startswith("compile_fsdp.unshard") or "all_gather" in name:
                return "unsharding"
            if "_foreach_copy_" in name or called.startswith("compile_fsdp.reduce"):
                return "packing"
        if self.operator in ("aten::_chunk_cat", "fsdp::chunk_cat"):
            return "packing"
        gathered = "split_with_sizes_copy" in self.operator or "all_gather" in self.operator
        return "unsharding" if gathered else "compute"


def copies_in(work: Callable[[], object]) -> list[Copy]:
    """What ``work`` copies; numbers that are converted are no copies."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        work()
    found = []
    for event in watched.events() or ():
        if not (event.name in COPYING or _only_copies(event.name)):
            continue
        shapes = list(_shapes(event.input_shapes))
        around = tuple(_around(event))
        is_number = not shapes and event.name in COPYING
        if not is_number and not any(name in COPYING for name in around):
            elements = max((math.prod(shape) for shape in shapes), default=0)
            found.append(Copy(event.name, elements, around))
    return found


def _shapes(given: Sequence[Any]) -> Iterator[list[int]]:
    """Of all tensors with a dimension, also those in lists."""
    for each in given:
        if each and isinstance(each[0], list | tuple):
            yield from _shapes(each)
        elif each:
            yield list(each)


def _around(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


def _only_copies(name: str) -> bool:
    """Whether one of Inductor's kernels is made of nothing but copying operators."""
    found = re.match(r"(?:graph_\d+_)?cpp_fused_(.+)_\d+$", name)
    words = [word for word in found[1].split("_") if word] if found else []
    return bool(words) and set(words) <= _COPYING_NAMES


class Copying:
    """What the processes do: train a contender and count its copies."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._batch = batch_of(shape, dist.get_rank())
        model = seeded_model(shape)
        if name == OURS:
            named = {"inductor": {"cpp.enable_kernel_profile": True}}
            self._training = compile_fsdp(model, named)
        else:
            self._training = CONTENDERS[name](model)

    def copies(self) -> list[Copy]:
        """Of one forward and backward after two steps."""
        for _ in range(2):
            self._passes()
            self._training.optimizer.step()
            self._training.optimizer.zero_grad()
        return copies_in(self._passes)

    def _passes(self) -> None:
        self._training.call(*self._batch).backward()


def run(settings: Settings) -> Part:
    """Count."""
    shape = shape_of(WORKLOAD, settings)
    part = Part()
    rows = []
    for name in (OURS, *PEERS):
        progress(f"copies, {name}")
        try:
            with Ranks(World(), f"{__name__}:Copying", name, shape) as ranks:
                found: list[Copy] = ranks.ask("copies")[0]
        except RanksFailed as error:
            part.problems.append(f"copies, {name}: {error}")
            if name == OURS:
                part.measured = dict.fromkeys(
                    ("gradient copies", "weight copies"), Missing(str(error))
                )
            continue
        large = [copy for copy in found if copy.elements >= shape.width**2]
        counts = {where: _of(large, where) for where in ("packing", "unsharding", "compute")}
        own_parts = 0
        if name == OURS:
            own_parts = len(counts["unsharding"])
            part.measured["gradient copies"] = len(counts["packing"])
            part.measured["weight copies"] = sum(
                copy.elements in _weights(shape) for copy in counts["unsharding"]
            )
        rows.append([name, *map(_summary, counts.values())])
        part.data[name] = {
            "own parts of gathers": own_parts,
            **{where: [vars(copy) for copy in each] for where, each in counts.items()},
        }
    header = ["copies in a step", "packing", "unsharding", "compute"]
    part.text.append(table(header, rows))
    return part


def _of(copies: Sequence[Copy], where: str) -> list[Copy]:
    return [copy for copy in copies if copy.where == where]


def _weights(shape: Shape) -> set[int]:
    """Elements of the matrices of a model."""
    sizes = {parameter.numel() for parameter in seeded_model(shape).parameters()}
    return {size for size in sizes if size >= shape.width**2}


def _summary(copies: Sequence[Copy]) -> str:
    size = format_bytes(4 * sum(copy.elements for copy in copies))
    return f"{len(copies)} ({size})" if copies else "none"
