"""What the tests of explanations share: small sharded models, and a world of one process.

Graphs and schedules are the same whether or not collectives move anything, so most of these tests
run under torch's fake process group: rank 0 of a world that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_fsdp
from compile_fsdp import Explanation, fully_shard
from tests.models import LanguageModel, language_batches
from tests.training import cpu_mesh

# Nothing that depends on a cost model, so that tests can name what they expect.
OPTIONS = {"inner": "aot_eager", "prefetch": 1, "reshard_after_forward": True}


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process is rank 0 of ``size`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def sharded_language_model() -> nn.Module:
    """Two blocks, each a group, and a root with the embedding and the head."""
    torch.manual_seed(3)
    model = LanguageModel()
    mesh = cpu_mesh()
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each of shape (2, 5)."""
    return language_batches(1, 1)[0]


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="compile_fsdp", options={**OPTIONS, **options})


def explain_language_model() -> Explanation:
    return compile_fsdp.explain(compiled(sharded_language_model()), *batch())


def explain_hsdp(**options: Any) -> Explanation:
    """The same on a mesh of two axes, gradients reduced over both."""
    torch.manual_seed(3)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    return compile_fsdp.explain(compiled(model, **options), *batch())
