"""What the GPU tests share: the device, a process group of one rank, models, ways to call them.

Tests that do not need CUDA itself run on a CPU as well, where `VARIABLE` says so: that is how their
logic is checked on machines without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

# The callable and not its name: an entry point is known of an installed package only, and these
# tests run from a plain copy of the sources.
from compile_fsdp.backend import compile_fsdp as backend
from tests.distributed import forget
from tests.models import Block, LanguageModel, language_batches
from tests.training import Batch, shard_blocks

VARIABLE = "COMPILE_FSDP_GPU_TESTS_ON"
"""Environment variable: "cpu" runs on the CPU, with gloo, those tests that do not need a GPU."""

DEVICE = torch.device("cpu" if os.environ.get(VARIABLE) == "cpu" else "cuda:0")
ON_CUDA = DEVICE.type == "cuda"

# Sums of some hundred products in another order (cuBLAS chooses kernels by the alignment of a
# weight, Triton reduces in blocks), through a few steps of an optimizer whose large eps does not
# blow up what is zero up to rounding. A missing wait or reduction is off by whole values.
ROUNDING = {"rtol": 1e-3, "atol": 2e-5}

# bf16 has 8 bits of mantissa; a fused kernel rounds once where operators round each result. Three
# steps of a learning rate of 1e-2 move a weight by up to 3e-2.
BF16_ROUNDING = {"rtol": 3e-2, "atol": 6e-3}


# Clock cycles: about two milliseconds of an H200, far more than the host needs for what it issues
# meanwhile, far less than a test may take.
SLOW = 4_000_000


def missing_device() -> str:
    """Why nothing can run on `DEVICE`; empty where it can."""
    if not ON_CUDA or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"needs a CUDA GPU, and torch {torch.__version__} was built without CUDA"
    return f"needs a CUDA GPU, and torch {torch.__version__} sees none"


@contextmanager
def world(backend_name: str = "nccl" if ON_CUDA else "gloo", ranks: int = 1) -> Iterator[None]:
    """A default process group in which this process is rank 0; ended with all that hangs on it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options: dict[str, Any] = {}
    if ON_CUDA:
        torch.cuda.set_device(DEVICE)
    if backend_name == "nccl":
        # The communicator is made now and not inside of the first step.
        options["device_id"] = DEVICE
    dist.init_process_group(backend_name, store=store, rank=0, world_size=ranks, **options)
    try:
        yield
    finally:
        forget()


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of this shape on `DEVICE`; without one, all ranks in a row."""
    shape = shape or (dist.get_world_size(),)
    names = ("dp_outer", "dp_inner")[-len(shape) :]
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Blocks first, then ``model``, over ``mesh`` or all ranks."""
    return shard_blocks(model, mesh_of() if mesh is None else mesh, **options)


def drive(model: nn.Module, driver: str, **options: Any) -> Callable[..., Any]:
    """What to call to run ``model``: itself, or compiled with the graphs verified."""
    if driver == "eager":
        return model
    options = {"inner": driver, "verify": True, **options}
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, options=options)
    return compiled


def language_model(width: int = 64, blocks: int = 3, **options: Any) -> nn.Module:
    """Embedding, blocks, head, cross-entropy, with equal weights in every call."""
    torch.manual_seed(3)
    return LanguageModel(width, blocks, **options).to(DEVICE)


def tokens(count: int, per_rank: int = 8, length: int = 16) -> list[Batch]:
    """``count`` batches of tokens and targets on `DEVICE`, (per_rank, length) each."""
    drawn = language_batches(count, 1, per_rank, length)
    return [tuple(part.to(DEVICE) for part in batch) for batch in drawn]


@torch.library.custom_op("compile_fsdp_tests::idle", mutates_args=())
def idle(x: torch.Tensor, cycles: int) -> torch.Tensor:
    """A copy of ``x``, for which a GPU idles so many clock cycles first; also in backward."""
    if x.is_cuda:
        torch.cuda._sleep(cycles)
    return x.clone()


@idle.register_fake
def _(x: torch.Tensor, cycles: int) -> torch.Tensor:
    return torch.empty_like(x)


def _note_cycles(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.cycles = inputs[1]


def _idle_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return idle(grad, ctx.cycles), None


idle.register_autograd(_idle_backward, setup_context=_note_cycles)


class Stack(nn.Module):
    """Blocks on float inputs and a mean square: no operator whose CUDA kernel uses atomics, so that
    runs can be compared bit for bit.

    Args:
        recompute: activation checkpointing of every block.
        cycles: for which compute idles before each block, in forward and backward.
    """

    def __init__(
        self, width: int = 64, blocks: int = 3, recompute: bool = False, cycles: int = 0
    ) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.recompute = recompute
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.cycles:
                x = idle(x, self.cycles)
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.float().square().mean()


def stack(width: int = 64, blocks: int = 3, **options: Any) -> nn.Module:
    """A `Stack` on `DEVICE`, with equal weights in every call."""
    torch.manual_seed(5)
    return Stack(width, blocks, **options).to(DEVICE)


def floats(count: int, rows: int = 32, width: int = 64) -> list[Batch]:
    """``count`` batches of one input on `DEVICE`, (rows, width) each."""
    generator = torch.Generator().manual_seed(13)
    return [(torch.randn(rows, width, generator=generator).to(DEVICE),) for _ in range(count)]
