"""What the checkpoint tests share: a model with every awkward parameter, training, and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard
from compile_fsdp.checkpoint_state import clean_fqn

Values = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(x)))


class Zoo(nn.Module):
    """Tied, frozen, 0-D, (1,) and (1, N) parameters, fewer rows than ranks, two kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(1, 6))
        self.temperature = nn.Parameter(torch.ones(1))
        self.pair = nn.Parameter(torch.randn(2, 6))
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        x = self.frozen(self.embedding(tokens)) + self.bias + self.pair.sum(0)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def zoo(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Zoo:
    """An unsharded model; the same one for the same seed, on every rank."""
    torch.manual_seed(seed)
    return Zoo().to(dtype)


def shard(
    model: nn.Module, mode: str = "zero3", policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """Shard ``model`` and its layers over all ranks, on a (2, n / 2) mesh if ``mode`` needs two
    axes."""
    ranks = dist.get_world_size()
    if mode in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_outer", "dp_inner"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    placements = getattr(Placements, mode)(mesh)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh, placements, policy)
    fully_shard(model, mesh, placements, policy)
    return model


def adamw(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    """AdamW in two groups, as is usual for weight decay."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, **options)


def take_steps(
    call: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    first: int,
    count: int,
) -> None:
    """Steps ``first``, ``first + 1``, ... of one run; each rank has its own data."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        call(torch.randint(7, (2, 4), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of ``tensor``: of a parameter, or of an optimizer's state."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Values:
    """All values of a checkpoint, whole: parameters, buffers, optimizer state."""
    values = {name: full(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                values[f"{clean_fqn(name)}/{key}"] = full(value)
    return values


def assert_equal(found: Values, expected: Values) -> None:
    """The same names with the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), f"{name}: {found[name]} against {value}"
