"""Trains one `Configuration` sharded, and in one process on the concatenated batch; compares bits.

    make random CASES=500        random configurations, until one fails; it is then made small

The reference is not the library in a world of one: it is the unsharded model, plain autograd and
one optimizer over copies in the main dtype. Losses, gradients (None where there is none), the
input's gradient, parameters and a last evaluation are compared after every step. Nothing has a
tolerance; `tests.exact_model` says why.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from compile_fsdp import (
    BlockAtomic,
    MixedPrecisionPolicy,
    Placements,
    ShardLayout,
    TensorAtomic,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from tests.configurations import Configuration, snippet
from tests.exact_model import ExactModule, batches, build, loss_of
from tests.training import full, mean_over_ranks

# Of a case with Dynamo on a busy machine.
TIMEOUT = 240.0


@dataclass
class Trace:
    """What a run produced: named values in order, None for a gradient that there is not."""

    values: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor | None) -> None:
        """Keep ``value`` under a name that is new."""
        assert name not in self.values, name
        self.values[name] = None if value is None else full(value)

    def add_parameter(self, name: str, value: torch.Tensor, trainable: bool) -> None:
        """Keep a parameter; of a frozen one, which may be in either dtype, the value alone."""
        self.add(name, value if trainable else full(value).double())

    def differences(self, expected: Trace) -> list[str]:
        """A line for each value that is not the expected one, bit for bit."""
        lines = []
        for name, wanted in expected.values.items():
            found = self.values[name]
            if found is None or wanted is None:
                if found is not wanted:
                    lines.append(f"{name}: found {found}, expected {wanted}")
            elif found.dtype != wanted.dtype or found.shape != wanted.shape:
                lines.append(
                    f"{name}: found {found.dtype} {tuple(found.shape)}, "
                    f"expected {wanted.dtype} {tuple(wanted.shape)}"
                )
            elif not torch.equal(found, wanted):
                lines.append(f"{name}: found {found.tolist()}, expected {wanted.tolist()}")
        return lines


# The reference --------------------------------------------------------------------------------


def reference(configuration: Configuration) -> Trace:
    """Train in this process on the concatenated batches."""
    trace, model = Trace(), build(configuration)
    specs = _parameter_specs(configuration, model)
    scales = _grad_scales(configuration, model)
    main = {
        name: nn.Parameter(
            each.detach().to(configuration.main_dtype(specs[name])),
            requires_grad=each.requires_grad,
        )
        for name, each in model.named_parameters()
    }
    grad_dtypes = {name: configuration.grad_dtype(specs[name]) for name in main}
    optimizer = _optimizer(configuration, list(main.values()))
    for step, parts in enumerate(batches(configuration)):
        if step == 1:
            toggle(configuration, model)
        for number, (x, target) in enumerate(parts):
            is_last = number == len(parts) - 1
            x = x.requires_grad_(configuration.input_gradient)
            loss = loss_of(model(x, is_last), target, configuration.unit)
            if loss.requires_grad:
                loss.backward()
            trace.add(f"step {step}.{number}: loss", loss.detach() / configuration.ranks)
            trace.add(f"step {step}.{number}: gradient of the input", x.grad)
            for name, each in model.named_parameters():
                if each.grad is not None:
                    _accumulate(main[name], each.grad / configuration.ranks * scales[name])
                    each.grad = None
        for name, each in main.items():
            gradient = None if each.grad is None else each.grad.to(grad_dtypes[name])
            trace.add(f"step {step}: gradient of {name}", gradient)
        optimizer.step()
        _zero(configuration, optimizer)
        with torch.no_grad():
            for name, each in model.named_parameters():
                each.copy_(main[name])
        for name, each in model.named_parameters():
            trace.add_parameter(f"step {step}: parameter {name}", main[name], each.requires_grad)
    trace.add("evaluation", _evaluate(configuration, model, batches(configuration)[0][0][0]))
    return trace


def toggle(configuration: Configuration, model: nn.Module) -> None:
    """Freeze or unfreeze what ``toggled`` names."""
    for fqn in configuration.toggled:
        owner_fqn, _, name = fqn.rpartition(".")
        parameter = model.get_submodule(owner_fqn)._parameters[name]
        assert parameter is not None
        parameter.requires_grad_(not parameter.requires_grad)


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _parameter_specs(configuration: Configuration, model: ExactModule) -> dict[str, Any]:
    """The spec that made each parameter, by its first name."""
    listed = [each for _, module in configuration.model.modules() for each in module.parameters]
    made = dict(zip(configuration.fqns(), listed, strict=True))
    for first, second in configuration.ties:
        made[second] = made[first]
    return {name: made[name] for name, _ in model.named_parameters()}


def _grad_scales(configuration: Configuration, model: ExactModule) -> dict[str, float]:
    """The grad_scale of each parameter's owner: the nearest sharded module above."""
    scales: dict[str, float] = {}
    for fqn, module in configuration.model.modules():
        if module.sharded:
            start = f"{fqn}." if fqn else ""
            for name, _ in model.named_parameters():
                if name.startswith(start):
                    scales[name] = module.grad_scale
    return scales


def _optimizer(
    configuration: Configuration, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    if configuration.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def _zero(configuration: Configuration, optimizer: torch.optim.Optimizer) -> None:
    if configuration.zero != "never":
        optimizer.zero_grad(set_to_none=configuration.zero == "drop")


def _evaluate(configuration: Configuration, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(x.detach(), True)
    return output


# The sharded run ------------------------------------------------------------------------------


def train(configuration: Configuration) -> Trace:
    """Train on every rank of the default process group, each on its part of the batches."""
    trace, model = Trace(), build(configuration)
    shard(configuration, model)
    parameters = list(model.parameters())
    optimizer = _optimizer(configuration, parameters)
    if configuration.prepared:
        fully_shard_optimizer(optimizer)
    call = _drive(configuration, model)
    for step, parts in enumerate(batches(configuration)):
        if step == 1:
            toggle(configuration, model)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            x, target = (each.chunk(configuration.ranks)[dist.get_rank()].clone() for each in part)
            x.requires_grad_(configuration.input_gradient)
            with ExitStack() as stack:
                if configuration.flagged:
                    stack.enter_context(microbatch(model, is_last))
                loss = loss_of(call(x, is_last), target, configuration.unit)
                if loss.requires_grad:
                    loss.backward()
            trace.add(f"step {step}.{number}: loss", mean_over_ranks(loss))
            trace.add(f"step {step}.{number}: gradient of the input", _all_rows(x.grad))
        for name, each in model.named_parameters():
            trace.add(f"step {step}: gradient of {name}", each.grad)
        optimizer.step()
        _zero(configuration, optimizer)
        for name, each in model.named_parameters():
            trace.add_parameter(f"step {step}: parameter {name}", each, each.requires_grad)
    x = batches(configuration)[0][0][0].chunk(configuration.ranks)[dist.get_rank()]
    trace.add("evaluation", _all_rows(_evaluate(configuration, model, x)))
    for group in model._fsdp_unit.context.groups():
        held = group.gathers and group.is_unsharded
        assert not held, f"{group.label} is unsharded at rest"
    return trace


def _all_rows(local: torch.Tensor | None) -> torch.Tensor | None:
    if local is None:
        return None
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local.contiguous())
    return torch.cat(rows)


def _drive(configuration: Configuration, model: ExactModule) -> Callable[..., Any]:
    options = {"inner": "aot_eager", "verify": True, "prefetch": configuration.prefetch}
    if configuration.driver == "compiled":
        return torch.compile(model, backend="compile_fsdp", options=options)
    if configuration.driver == "unscheduled":
        return torch.compile(model, backend="aot_eager")
    if configuration.driver == "compiled blocks":
        for fqn, module in configuration.model.modules():
            if fqn and module.sharded:
                model.get_submodule(fqn).compile(backend="compile_fsdp", options=options)
    return model


def shard(configuration: Configuration, model: ExactModule) -> None:
    """``fully_shard`` every module that is to be, children before their parents."""
    names = ("dp_outer", "dp_inner")[-len(configuration.mesh) :]
    mesh = init_device_mesh("cpu", configuration.mesh, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        configuration.main_params, configuration.main_grads, configuration.grad_comm
    )
    placements = _placements(configuration, mesh)
    in_turn = configuration.promise == "tensor"
    owners = {
        each: number % configuration.ranks if in_turn else 0
        for number, each in enumerate(model.parameters())
    }
    layout = ShardLayout.PACKED if configuration.packed else ShardLayout.PADDED
    for fqn, module in reversed(list(configuration.model.modules())):
        if module.sharded:
            fully_shard(
                model.get_submodule(fqn),
                mesh,
                placements,
                policy,
                grad_scale=module.grad_scale,
                shard_layout=layout,
                parameter_to_owner=owners,
            )


def _placements(configuration: Configuration, mesh: DeviceMesh) -> Placements:
    promise: Placement = {
        "row": Shard(0),
        "2 rows": BlockAtomic(2),
        "3 rows": BlockAtomic(3),
    }.get(configuration.promise, TensorAtomic())

    def last(count: int, otherwise: Placement) -> tuple[Placement, ...]:
        return (otherwise,) * (mesh.ndim - count) + (promise,) * count

    parameter, gradient, optimizer = configuration.sharded_axes
    return Placements(
        tuple(mesh.mesh_dim_names or ()),
        last(parameter, Replicate()),
        last(gradient, Partial("avg")),
        last(optimizer, Replicate()),
    )


# Comparing ------------------------------------------------------------------------------------


def differences(configuration: Configuration) -> list[str]:
    """Train and compare, on every rank of a running process group; what differs, one a line."""
    if configuration.driver == "eager":
        # Importing Dynamo takes seconds.
        return train(configuration).differences(reference(configuration))
    # Dynamo keeps one compilation for each module of a class, in training and in evaluation.
    with torch._dynamo.config.patch(recompile_limit=64):
        return train(configuration).differences(reference(configuration))


def run_alone(configuration: Configuration) -> None:
    """The body of a `snippet`: one rank of torchrun's. Exits with 1 where anything differs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = differences(configuration)
    for line in lines:
        print(f"rank {dist.get_rank()}: {line}")
    dist.barrier()
    dist.destroy_process_group()
    if lines:
        sys.exit(1)
    print(f"rank {configuration.ranks}: as in one process")


def check(configuration: Configuration) -> None:
    """Fail with the differences, or the ranks' exception, and a snippet that reproduces them."""
    from tests.distributed import run

    try:
        results = run(configuration.ranks, differences, configuration, timeout=TIMEOUT)
        ranks: dict[str, list[int]] = {}
        for rank, lines in enumerate(results):
            for line in lines:
                ranks.setdefault(line, []).append(rank)
        problems = [f"ranks {where}: {line}" for line, where in ranks.items()]
    except AssertionError as failure:
        problems = [str(failure)]
    if problems:
        shown = "\n".join(problems[:8])
        raise AssertionError(f"{shown}\n\n{snippet(configuration)}")


# A long run -----------------------------------------------------------------------------------


def main() -> int:
    """Try many random configurations, with progress on stderr; 1 when some failed."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.configuration_strategies import configurations
    from tests.configurations import DRIVERS
    from tests.distributed import shut_down

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=DRIVERS)
    parser.add_argument("--keep-going", action="store_true", help="report all failures, unshrunk")
    options = parser.parse_args()
    tried, failures, begun = 0, [], time.monotonic()

    def attempt(configuration: Configuration) -> None:
        nonlocal tried
        tried += 1
        try:
            check(configuration)
        except AssertionError:
            if not options.keep_going:
                raise
            failures.append(traceback.format_exc(limit=0))
            print(failures[-1], file=sys.stderr)
        if tried % 25 == 0:
            seconds = time.monotonic() - begun
            print(
                f"{tried} configurations, {len(failures)} failed, {seconds:.0f} s", file=sys.stderr
            )

    chosen = configurations(drivers=tuple(options.drivers))
    phases = [Phase.generate] if options.keep_going else [Phase.generate, Phase.shrink]
    runner = settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    try:
        runner(seed(options.seed)(given(chosen)(attempt)))()
    finally:
        shut_down()
    print(f"{tried} configurations, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
