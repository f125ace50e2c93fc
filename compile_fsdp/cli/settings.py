"""Arguments that both commands have -> what planning wants."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from compile_fsdp.passes.costs import CostModel, cost_model
from compile_fsdp.passes.hardware import USUAL_LINKS
from compile_fsdp.passes.policy import Policy, parse_bytes, parse_policy

from ..planning.capture import cost_model_on
from ..planning.errors import PlanError
from ..planning.sharding import MODES, Sharding
from ..planning.workload import Workload
from ..planning.world import MeshShape, parse_mesh
from .target import DTYPES, Sizes, workload_of


def workload(given: argparse.Namespace) -> Workload:
    """What TARGET names."""
    return workload_of(given.target, Sizes(given.batch, given.seq, given.dtype))


def mesh_shape(given: argparse.Namespace) -> MeshShape:
    """The ranks of ``--mesh``."""
    return parse_mesh(given.mesh, given.ranks_per_node)


def sharding(given: argparse.Namespace, shape: MeshShape) -> Sharding:
    """How the model is sharded on ``shape``."""
    mode = given.mode or ("hsdp" if shape.outer > 1 else "zero3")
    if MODES[mode][0] == 2 and "x" not in given.mesh.lower():
        raise PlanError(
            f"--mode {mode} wants two axes, got --mesh {given.mesh!r}; write OUTERxINNER, such as "
            f"{max(shape.ranks // shape.ranks_per_node, 1)}x{shape.ranks_per_node}"
        )
    is_function = not given.target.startswith("hf:")
    dtype = DTYPES[given.dtype] if given.dtype and is_function else None
    return Sharding(mode, given.activation_checkpointing, dtype)


def costs(given: argparse.Namespace, shape: MeshShape) -> CostModel:
    """The cost model of ``--device`` and ``--interconnect`` on ``shape``."""
    device = given.device.strip().lower()
    link = given.interconnect or USUAL_LINKS.get(device, ("", ""))[1]
    try:
        model = cost_model(f"{device}+{link}" if link else device)
        share = getattr(given, "compute_share", None)
        if share is not None:
            model = replace(model, compute_share=share)
    except ValueError as error:
        option = "--device / --interconnect" if "unknown" in str(error) else "--compute-share"
        raise PlanError(f"{option}: {str(error).partition('; or pass a')[0]}") from error
    return cost_model_on(model, shape)


def policy(given: argparse.Namespace, model: CostModel) -> Policy:
    """What is asked of the schedules."""
    options = {
        "cost_model": model,
        "prefetch": int(given.prefetch) if given.prefetch.isdigit() else given.prefetch,
        "memory_budget": budget(given),
    }
    try:
        return parse_policy({name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise PlanError(str(error)) from error


def budget(given: argparse.Namespace) -> int | None:
    """The bytes of ``--budget``."""
    if getattr(given, "budget", None) is None:
        return None
    try:
        return parse_bytes("--budget", given.budget)
    except ValueError as error:
        raise PlanError(str(error)) from error


def check_files(given: argparse.Namespace) -> None:
    """Whether the files that are asked for can be written, before minutes of work.

    Raises:
        PlanError: the folder of one of them does not exist.
    """
    for name in ("json", "html"):
        path = getattr(given, name)
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise PlanError(f"--{name} {path!r}: the folder does not exist")


def progress(text: str) -> None:
    """Say what is going on, on stderr."""
    print(f"... {text}", file=sys.stderr, flush=True)
