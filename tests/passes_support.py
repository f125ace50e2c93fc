"""What the tests of the passes share: a parameter group without a runtime, and traced graphs.

`StubGroup` does in one process, with plain tensors, what the graph-level ops ask of a parameter
group. It is strict where the real one is fast: memory that may not be read holds NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import (
    aot_function,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch.fx import Graph, GraphModule

from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.pipeline import prepare_joint_graph
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.steps import Schedule
from compile_fsdp.passes.targets import is_marker
from compile_fsdp.runtime.arena import Place
from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.registry import registry

WIDTH = 4
VOCABULARY = 8


@dataclass(eq=False)
class StubContext:
    """The part of a model's context that the ops talk to."""

    is_last_microbatch: bool = True
    zeros_missing_gradients: bool = False

    def begin_graph(self) -> None: ...

    def gather_together(
        self, groups: Sequence[StubGroup], places: Sequence[Place | None]
    ) -> None: ...

    def reduce_together(
        self, contributions: Mapping[StubGroup, Mapping[int, torch.Tensor]]
    ) -> None:
        for group, gradients in contributions.items():
            group.reduce_gradients(gradients)

    def prefetch_beyond_graph(self, group: StubGroup) -> None: ...

    def finish_at_end_of_backward(self) -> None: ...

    def wait_for_reductions(self) -> None: ...


class StubGroup:
    """A parameter group of a world of one.

    Attributes:
        info: as the passes see it.
        shard: the flat leaf that graphs take as input.
        gradients: accumulated gradient of each tensor, None where none arrived.
        reductions: the indices of every reduction, in order.
        handed_over: packed gradients, each with a copy as it was then.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        label: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        requires_grad: bool = True,
        mesh_shape: tuple[int, ...] = (2,),
    ) -> None:
        values = list(tensors.values())
        dtype = values[0].dtype
        sizes = [value.numel() for value in values]
        self.info = GroupInfo(
            name=f"0/{label}/0",
            label=label,
            fqns=tuple((name,) for name in tensors),
            shapes=tuple(tuple(value.shape) for value in values),
            offsets=tuple(sum(sizes[:number]) for number in range(len(sizes))),
            full_numel=sum(sizes),
            local_numel=sum(sizes) // 2,
            dtype=dtype,
            grad_comm_dtype=dtype,
            requires_grad=requires_grad,
            mesh_shape=mesh_shape,
            finishes_later=len(mesh_shape) > 1,
            reduced_axis=len(mesh_shape) - 1,
        )
        self.shard = torch.zeros(self.info.local_numel, dtype=dtype, requires_grad=requires_grad)
        self.context = StubContext()
        self.gradients: list[torch.Tensor | None] = [None] * len(values)
        self.reductions: list[list[int]] = []
        self.handed_over: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outer_reductions = 0
        self.holders = 0
        self.gathers = 0
        self.is_kept = False
        self._values = torch.cat([value.detach().flatten() for value in values])
        self.full_local_tensor = torch.empty_like(self._values)
        self.full_local_tensor.untyped_storage().resize_(0)

    def parameter(self, index: int) -> torch.Tensor:
        """The marker, as the parameter property returns it while Dynamo traces."""
        marked: torch.Tensor = torch.ops.compile_fsdp.parameter(self.shard, self.info.name, index)
        return marked

    def copy_full_parameter(self, index: int) -> torch.Tensor:
        shape, offset = self.info.shapes[index], self.info.offsets[index]
        return self._values[offset : offset + prod(shape)].view(shape).clone()

    def acquire(self, place: Place | None = None) -> torch.Tensor:
        self.holders += 1
        if self.holders > 1 or self.is_kept:  # a branch, or the backward of a forward that kept it
            self.is_kept = False
            return self.full_local_tensor
        self.gathers += 1
        storage = self.full_local_tensor.untyped_storage()
        storage.resize_(self._values.untyped_storage().nbytes())
        self.full_local_tensor.fill_(torch.nan)  # until the wait
        return self.full_local_tensor

    def wait_for_unshard(self, full: torch.Tensor) -> None:
        self.full_local_tensor.copy_(self._values)

    def keep(self, full: torch.Tensor) -> None:
        self.holders -= 1
        self.is_kept = self.holders == 0

    def drop(self, full: torch.Tensor) -> None:
        self.holders -= 1
        if self.holders == 0:
            self.full_local_tensor.fill_(torch.nan)
            self.full_local_tensor.untyped_storage().resize_(0)

    def gradients_wanted(self) -> bool:
        return True

    def reduce_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self.reductions.append(list(gradients))
        for index, gradient in gradients.items():
            known = self.gradients[index]
            self.gradients[index] = gradient.clone() if known is None else known + gradient

    def reduce_packed(self, packed: torch.Tensor, indices: Sequence[int]) -> None:
        assert packed.shape == (self.info.full_numel,)
        # The runtime reads it for longer than the operator runs.
        self.handed_over.append((packed, packed.clone()))
        parts = packed.split([prod(shape) for shape in self.info.shapes])
        self.reduce_gradients(
            {index: parts[index].view(self.info.shapes[index]) for index in indices}
        )

    def reduce_outer_gradients(self) -> None:
        self.outer_reductions += 1


@contextlib.contextmanager
def registered(*groups: StubGroup) -> Iterator[dict[str, GroupInfo]]:
    """Make groups findable by the ops; yields what the passes need to know about them."""
    for group in groups:
        registry.register(group.info.name, group)
    try:
        yield {group.info.name: group.info for group in groups}
    finally:
        for group in groups:
            registry.unregister(group.info.name)


@dataclass
class Observed:
    """An observer that keeps what it sees; ``show`` makes the text of the rewritten graph."""

    show: Callable[[Graph], str] = str
    kinds: list[GraphKind] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def __call__(self, kind: GraphKind, before: str, schedule: Schedule, after: Graph) -> None:
        self.kinds.append(kind)
        self.before.append(before)
        self.schedules.append(schedule)
        self.after.append(self.show(after))

    def schedule(self, kind: GraphKind) -> Schedule:
        (found,) = [s for k, s in zip(self.kinds, self.schedules, strict=True) if k is kind]
        return found


def traced(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    policy: Policy | None = None,
    dynamic: bool = False,
) -> dict[GraphKind, GraphModule]:
    """The graphs that AOTAutograd makes of ``function``, before any rewrite.

    ``inputs`` must include the flat shards of all groups that the function reads. ``dynamic``:
    with symbolic sizes.
    """
    graphs: dict[GraphKind, GraphModule] = {}

    def keep(kind: GraphKind) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compiler(gm: GraphModule, _: Sequence[Any]) -> Any:
            graphs[kind] = gm
            return make_boxed_func(gm.forward)

        return compiler

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        names = dict.fromkeys(node.args[1] for node in joint.graph.nodes if is_marker(node))
        groups = {name: registry.lookup(name).info for name in names}
        prepare_joint_graph(joint.graph, groups, policy or Policy())
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    compiled = aot_function(
        function,
        fw_compiler=keep(GraphKind.FORWARD),
        bw_compiler=keep(GraphKind.BACKWARD),
        inference_compiler=keep(GraphKind.INFERENCE),
        partition_fn=partition,
        dynamic=dynamic,
    )
    output = compiled(*inputs)
    if GraphKind.BACKWARD not in graphs and GraphKind.FORWARD in graphs:
        output.sum().backward()  # with symbolic sizes the backward graph is compiled when run
    return graphs


class TwoBlocks:
    """Embedding, two MLP blocks and a head, reading its parameters through markers.

    The embedding and the head are in one group, each block is in one of its own.
    """

    def __init__(self, **options: Any) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape) / 2

        self.root = StubGroup(
            "root",
            {
                "embedding.weight": draw(VOCABULARY, WIDTH),
                "head.weight": draw(VOCABULARY, WIDTH),
            },
            **options,
        )
        self.blocks = [
            StubGroup(
                f"blocks.{number}",
                {
                    f"blocks.{number}.norm.weight": draw(WIDTH),
                    f"blocks.{number}.up.weight": draw(2 * WIDTH, WIDTH),
                    f"blocks.{number}.down.weight": draw(WIDTH, 2 * WIDTH),
                },
                **options,
            )
            for number in range(2)
        ]

    @property
    def groups(self) -> list[StubGroup]:
        return [self.root, *self.blocks]

    def __call__(self, tokens: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        """The loss; ``shards``, if given, stand for the groups' own."""
        parameter = _reader(self.groups, shards)
        x = F.embedding(tokens, parameter(0, 0))
        for number in (1, 2):
            hidden = F.rms_norm(x, (WIDTH,), parameter(number, 0))
            x = x + F.linear(F.gelu(F.linear(hidden, parameter(number, 1))), parameter(number, 2))
        return F.linear(x, parameter(0, 1)).logsumexp(-1).mean()

    def reference(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradients of the same model on plain parameters, in the groups' order."""
        plain = [
            [
                group.copy_full_parameter(index).requires_grad_()
                for index in range(len(group.info.shapes))
            ]
            for group in self.groups
        ]
        x = F.embedding(tokens, plain[0][0])
        for number in (1, 2):
            norm, up, down = plain[number]
            x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (WIDTH,), norm), up)), down)
        loss = F.linear(x, plain[0][1]).logsumexp(-1).mean()
        flat = [tensor for group in plain for tensor in group]
        return loss.detach(), list(torch.autograd.grad(loss, flat))

    def gradients(self) -> list[torch.Tensor | None]:
        return [gradient for group in self.groups for gradient in group.gradients]


def _reader(
    groups: Sequence[StubGroup], shards: Sequence[torch.Tensor]
) -> Callable[[int, int], torch.Tensor]:
    def read(group: int, index: int) -> torch.Tensor:
        if not shards:
            return groups[group].parameter(index)
        marked: torch.Tensor = torch.ops.compile_fsdp.parameter(
            shards[group], groups[group].info.name, index
        )
        return marked

    return read


def tokens() -> torch.Tensor:
    return torch.arange(6).view(2, 3)
