"""What can be configured about a sharded training run, as plain data.

The ``repr`` of a `Configuration` is the Python expression that makes it: `snippet` turns one into a
script for torchrun. `tests.configuration_strategies` draws them at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent

DRIVERS = ("eager", "compiled", "compiled blocks", "unscheduled")
NARROW = (torch.bfloat16,)


class _Plain:
    """A ``repr`` that leaves out what has its default value."""

    def __repr__(self: Any) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        told = [
            f"{each.name}={values[each.name]!r}"
            for each in fields(self)
            if each.default is MISSING or each.default != values[each.name]
        ]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True, repr=False)
class ParameterSpec(_Plain):
    """One parameter: ``use`` is "always", "never" or "last microbatch"."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    use: str = "always"
    transposed: bool = False


@dataclass(frozen=True, repr=False)
class ModuleSpec(_Plain):
    """One module: ``times`` it is called in a forward; ``checkpointed`` is "no", "nonreentrant" or
    "reentrant"; ``grad_scale`` is passed to its fully_shard."""

    parameters: tuple[ParameterSpec, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    sharded: bool = True
    checkpointed: str = "no"
    times: int = 1
    grad_scale: float = 1.0

    def modules(self, prefix: str = "") -> Iterator[tuple[str, ModuleSpec]]:
        """This module and all below it by FQN, in the order of ``named_modules``."""
        yield prefix, self
        for number, child in enumerate(self.children):
            start = f"{prefix}." if prefix else ""
            yield from child.modules(f"{start}children_.{number}")


@dataclass(frozen=True, repr=False)
class Configuration(_Plain):
    """One way to train.

    Attributes:
        model: the tree of modules.
        mesh: shape of the data-parallel mesh.
        sharded_axes: how many of the mesh's axes, innermost first, shard parameter, gradient and
            optimizer: (0, 0, 1) on a 1-D mesh is ZeRO-1, (1, 1, 2) on a 2-D mesh HFSDP.
        promise: what a shard never splits: "row", "2 rows", "3 rows", "tensor" (owners in turn)
            or "tensor on rank 0".
        packed: ``ShardLayout.PACKED``.
        ties: pairs of FQNs; the second becomes the first's parameter.
        toggled: FQNs of parameters whose ``requires_grad`` is flipped after the first step.
        main_params, main_grads, grad_comm: the mixed-precision policy.
        driver: "eager"; "compiled" (the backend, aot_eager inside); "compiled blocks" (each sharded
            module below the root alone); "unscheduled" (the markers, under torch's "aot_eager").
        prefetch: option of the backend.
        optimizer: "sgd" (with momentum) or "adamw".
        prepared: whether ``fully_shard_optimizer`` is called.
        zero: "drop" (``set_to_none``), "in place" or "never".
        microbatches: backwards in a step, ``flagged`` by ``microbatch`` or not.
        samples: of each rank in each microbatch.
        input_gradient: whether the model's input requires a gradient.
        seed: of weights and data.
    """

    model: ModuleSpec
    mesh: tuple[int, ...] = (2,)
    sharded_axes: tuple[int, int, int] = (1, 1, 1)
    promise: str = "row"
    packed: bool = False
    ties: tuple[tuple[str, str], ...] = ()
    toggled: tuple[str, ...] = ()
    main_params: torch.dtype | None = torch.float32
    main_grads: torch.dtype | None = None
    grad_comm: torch.dtype | None = None
    driver: str = "eager"
    prefetch: int = 1
    optimizer: str = "sgd"
    prepared: bool = True
    zero: str = "drop"
    microbatches: int = 1
    flagged: bool = True
    samples: int = 1
    steps: int = 3
    input_gradient: bool = False
    seed: int = 0

    @property
    def ranks(self) -> int:
        """World size."""
        return math.prod(self.mesh)

    @property
    def unit(self) -> int:
        """What all gradients of activations are multiples of a half of: an average over the ranks
        divides by it without rounding."""
        return 3 if self.ranks == 3 else 1

    @property
    def largest_sum(self) -> int:
        """Bound of a gradient sum over ranks, microbatches and sites, in quarters."""
        sites = max(self.calls().values()) * (1 + len(self.ties))
        kept = self.steps if self.zero == "never" else 1
        return 4 * self.unit * self.ranks * self.samples * self.microbatches * kept * sites

    @property
    def is_exact(self) -> bool:
        """Whether `largest_sum` fits the mantissa of every dtype that gradients have."""
        specs = [each for _, module in self.model.modules() for each in module.parameters]
        dtypes = {each.dtype for each in specs} | {self.main_grads, self.grad_comm}
        return self.largest_sum <= (256 if dtypes.intersection(NARROW) else 2**16)

    @property
    def can_step_unprepared(self) -> bool:
        """Whether gradients have their main weight's dtype without ``fully_shard_optimizer``."""
        specs = [each for _, module in self.model.modules() for each in module.parameters]
        return all(self.main_dtype(each) == self.grad_dtype(each) for each in specs)

    def fqns(self) -> list[str]:
        """The names of all parameters, of tied ones each."""
        return [
            f"{fqn}.p{number}" if fqn else f"p{number}"
            for fqn, module in self.model.modules()
            for number in range(len(module.parameters))
        ]

    def calls(self) -> dict[str, int]:
        """How often each module's forward runs in a forward of the root, by FQN."""
        calls: dict[str, int] = {}
        for fqn, module in self.model.modules():
            above = fqn.rpartition(".children_.")[0] if fqn.count("children_") > 1 else ""
            calls[fqn] = module.times * calls.get(above, 1)
        return calls

    def main_dtype(self, parameter: ParameterSpec) -> torch.dtype:
        """What the optimizer's copy of a trainable parameter is; a frozen one has none."""
        return torch.promote_types(self.main_params or torch.float32, parameter.dtype)

    def grad_dtype(self, parameter: ParameterSpec) -> torch.dtype:
        """What a parameter's gradient accumulates in."""
        return self.main_grads or parameter.dtype


def snippet(configuration: Configuration) -> str:
    """A script that trains this one configuration and compares; the exit code is 0 if all is
    equal. It starts with the command that runs it."""
    command = f"torchrun --standalone --nproc-per-node={configuration.ranks} snippet.py"
    return "\n".join(
        [
            f"# {command}",
            "import sys",
            "import torch",
            f"sys.path.insert(0, {str(REPOSITORY)!r})",
            "from tests.configurations import Configuration, ModuleSpec, ParameterSpec",
            "from tests.random_training import run_alone",
            "",
            'if __name__ == "__main__":',
            f"    run_alone({configuration!r})",
            "",
        ]
    )
