"""What the processes of the step-time benchmarks do: one step of a contender, timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.streams import make_lane

from .contenders import CONTENDERS, adamw
from .workloads import Shape, batch_of, seeded_model


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one rank.

    Attributes:
        passes: forward and backward.
        optimizer: its step and ``zero_grad``.
        loss: of this rank's batch; NaN where nothing is computed.
    """

    passes: float
    optimizer: float
    loss: float


class Stepper(ABC):
    """Is asked for steps, some at a time."""

    @abstractmethod
    def step(self) -> StepTime:
        """One of them."""

    def turn(self, steps: int) -> list[StepTime]:
        """Several."""
        return [self.step() for _ in range(steps)]


class TrainingSteps(Stepper):
    """Trains a contender.

    Args:
        name: of the contender.
        shape: the workload.
        together: ranks start each step together.
    """

    def __init__(self, name: str, shape: Shape, together: bool = True) -> None:
        self._together = together
        self._batch = batch_of(shape, dist.get_rank())
        self._training = CONTENDERS[name](seeded_model(shape))

    def step(self) -> StepTime:
        """One step of training."""
        if self._together:
            dist.barrier()
        start = time.perf_counter()
        loss = self._training.call(*self._batch)
        loss.backward()
        middle = time.perf_counter()
        self._training.optimizer.step()
        self._training.optimizer.zero_grad()
        end = time.perf_counter()
        return StepTime(middle - start, end - middle, loss.item())


class ShareOfOptimizer(Stepper):
    """AdamW on a rank's share of the weights as plain tensors: what the optimizer must cost."""

    def __init__(self, shape: Shape) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        share = nn.ParameterList()
        for parameter in seeded_model(shape).parameters():
            rows = parameter.detach().chunk(ranks)
            if rank < len(rows):
                share.append(nn.Parameter(rows[rank].clone()))
        self._parameters = list(share)
        self._optimizer = adamw(share)

    def step(self) -> StepTime:
        """One step of the optimizer."""
        for parameter in self._parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        dist.barrier()
        start = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepTime(0.0, time.perf_counter() - start, float("nan"))


class BareCollectives(Stepper):
    """Two all-gathers and one reduce-scatter of every group, back to back, nothing else.

    A group is a block, or what is left for the root.

    Args:
        shape: the workload.
        own: those of this project's runtime instead of torch.distributed's, also one at a time.
    """

    def __init__(self, shape: Shape, own: bool) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        model = seeded_model(shape)
        blocks = [sum(each.numel() for each in block.parameters()) for block in model.blocks]
        root = sum(each.numel() for each in model.parameters()) - sum(blocks)
        self._buffers = []
        for size in (root, *blocks):
            part = -(-size // ranks)
            full, received = torch.rand(part * ranks), torch.empty(part)
            self._buffers.append((full, full[rank * part : (rank + 1) * part].clone(), received))
        self._gather, self._reduce = _runtime_collectives() if own else _torch_collectives()

    def step(self) -> StepTime:
        """The collectives of one step."""
        dist.barrier()
        start = time.perf_counter()
        for full, own, _ in self._buffers:
            self._gather(full, own)
        for full, own, received in reversed(self._buffers):
            self._gather(full, own)
            self._reduce(received, full)
        return StepTime(time.perf_counter() - start, 0.0, float("nan"))


Collective = Callable[[torch.Tensor, torch.Tensor], None]


def _torch_collectives() -> tuple[Collective, Collective]:
    # torch 2.13 deprecated the second of each pair of names in favour of the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return gather, reduce


def _runtime_collectives() -> tuple[Collective, Collective]:
    lane = make_lane(torch.device("cpu"), "bare")
    group = dist.group.WORLD
    assert group is not None

    def gather(full: torch.Tensor, part: torch.Tensor) -> None:
        collectives.all_gather(lane, full, part, group)
        lane.synchronize()

    def reduce(part: torch.Tensor, full: torch.Tensor) -> None:
        collectives.reduce_scatter(lane, part, full, group, average=True)
        lane.synchronize()

    return gather, reduce
