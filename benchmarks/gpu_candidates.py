"""What `gpu_step.py` compares: ways of making a training step of one and the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.workloads import Shape, Transformer
from compile_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from compile_fsdp.backend import compile_fsdp as backend
from compile_fsdp.runtime.torch_internals import copy_each

Step = Callable[[], torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Job:
    """What every candidate does.

    Attributes:
        shape, vocabulary: of the model, and of the batch of a rank.
        dtype: in which it computes; main weights are fp32.
        inner: what compiles: "inductor", or "aot_eager".
        fused: whether AdamW is the fused one.
    """

    device: torch.device
    mesh: DeviceMesh
    shape: Shape
    vocabulary: int
    dtype: torch.dtype
    inner: str
    fused: bool

    def model(self) -> nn.Module:
        """A new model in fp32, the same in every call and on every rank."""
        torch.manual_seed(1)
        with self.device:
            return Transformer(self.shape, self.vocabulary)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of this rank, (batch, length) each."""
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        size = (2, self.shape.batch, self.shape.length)
        drawn = torch.randint(self.vocabulary, size, generator=generator).to(self.device)
        return drawn[0], drawn[1]

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.fused, foreach=not self.fused)

    def compiled(self, run: nn.Module) -> Any:
        return torch.compile(run, backend=self.inner)


def plain(job: Job) -> Step:
    """No sharding at all; with several ranks DDP reduces the gradients."""
    main = job.model()
    compute = main if job.dtype == torch.float32 else job.model().to(job.dtype)
    wrapped: nn.Module = compute
    if dist.get_world_size() > 1:
        wrapped = nn.parallel.DistributedDataParallel(compute, gradient_as_bucket_view=True)
    run, batch = job.compiled(wrapped), job.batch()
    optimizer = job.adamw(main.parameters())
    pairs = list(zip(main.parameters(), compute.parameters(), strict=True))

    def step() -> torch.Tensor:
        loss: torch.Tensor = run(*batch)
        loss.backward()
        if compute is not main:
            grads = [each.grad for _, each in pairs if each.grad is not None]
            wide = [torch.empty_like(own) for own, _ in pairs]
            copy_each(wide, grads)
            for (own, _), grad in zip(pairs, wide, strict=True):
                own.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        if compute is not main:
            compute.zero_grad()
            with torch.no_grad():
                copy_each([each for _, each in pairs], [own for own, _ in pairs])
        return loss.detach()

    return step


def fsdp2(compiles: str) -> Callable[[Job], Step]:
    """PyTorch's FSDP2. ``compiles``: "nothing", "whole" (the model) or "blocks" (each)."""

    def make(job: Job) -> Step:
        from torch.distributed.fsdp import MixedPrecisionPolicy as Precision
        from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

        model: Any = job.model()
        precision = Precision(param_dtype=None if job.dtype == torch.float32 else job.dtype)
        for number, block in enumerate(model.blocks):
            if compiles == "blocks":
                model.blocks[number] = block = job.compiled(block)
            fsdp2_fully_shard(block, mesh=job.mesh, mp_policy=precision)
        fsdp2_fully_shard(model, mesh=job.mesh, mp_policy=precision)
        run = job.compiled(model) if compiles == "whole" else model
        return _training(run, job.adamw(model.parameters()), job.batch())

    return make


def ours(compiles: bool = True, **options: Any) -> Callable[[Job], Step]:
    """compile_fsdp, with these options of the backend."""

    def make(job: Job) -> Step:
        model: Any = job.model().to(job.dtype)
        precision = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, job.mesh, mixed_precision_policy=precision)
        fully_shard(model, job.mesh, mixed_precision_policy=precision)
        optimizer = job.adamw(model.parameters())
        fully_shard_optimizer(optimizer)
        settings = {"inner": job.inner, **options}
        run = torch.compile(model, backend=backend, options=settings) if compiles else model
        return _training(run, optimizer, job.batch())

    return make


def _training(run: Any, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> Step:
    def step() -> torch.Tensor:
        loss: torch.Tensor = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PLAIN = "plain"
FSDP2 = ("fsdp2", "fsdp2-whole", "fsdp2-blocks")
CANDIDATES: Mapping[str, Callable[[Job], Step]] = {
    PLAIN: plain,
    "fsdp2": fsdp2("nothing"),
    "fsdp2-whole": fsdp2("whole"),
    "fsdp2-blocks": fsdp2("blocks"),
    "ours-eager": ours(compiles=False),
    "ours": ours(),
    "ours-unlimited": ours(memory_budget="unlimited"),
    "ours-cudagraphs": ours(cudagraphs=True),
}
