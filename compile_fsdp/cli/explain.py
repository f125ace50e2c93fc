"""``python -m compile_fsdp explain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..explain import explain
from ..explanation import Explanation
from ..planning.capture import capture_step
from ..planning.errors import PlanError, one_line
from ..planning.explained import explanation_of_plan
from ..planning.predict import predict
from ..planning.sharding import Sharding, shard
from ..planning.world import parse_mesh
from ..torch_internals import init_own_process_group
from . import settings
from .target import DTYPES


def run(given: argparse.Namespace) -> None:
    """Explain, print, and write what is asked for.

    Raises:
        PlanError: bad input.
    """
    settings.check_files(given)
    explanation = _here(given) if given.mesh is None else _pretended(given)
    if given.json:
        Path(given.json).write_text(explanation.to_json() + "\n", encoding="utf-8")
    if given.html:
        explanation.save(given.html)
    explanation.show(sys.stdout, graphs=given.graphs)


def _pretended(given: argparse.Namespace) -> Explanation:
    shape = settings.mesh_shape(given)
    if given.graphs != "none":
        raise PlanError("--graphs shows graphs that are compiled here: leave --mesh out")
    costs = settings.costs(given, shape)
    policy = settings.policy(given, costs)
    how = settings.sharding(given, shape)
    decompose = given.inner == "inductor"
    captured = capture_step(settings.workload(given), shape, how, decompose=decompose)
    return explanation_of_plan(predict(captured, policy))


def _here(given: argparse.Namespace) -> Explanation:
    """One rank, this machine, real tensors."""
    workload = settings.workload(given)
    shape = parse_mesh("1")
    options: dict[str, Any] = {"inner": given.inner, "cost_model": settings.costs(given, shape)}
    options["prefetch"] = settings.policy(given, options["cost_model"]).prefetch
    if options["prefetch"] is None:
        options["prefetch"] = "auto"
    mode = given.mode or "zero3"
    is_function = not given.target.startswith("hf:")
    dtype = DTYPES[given.dtype] if given.dtype and is_function else None
    how = Sharding(mode, given.activation_checkpointing, dtype)
    with _one_rank(how.axes) as mesh:
        built = workload.build(mesh)
        shard(built, mesh, how)
        compiled = torch.compile(built.model, backend="compile_fsdp", options=options)
        try:
            return explain(compiled, *built.args, **built.kwargs)  # type: ignore[arg-type]
        except Exception as error:
            raise PlanError(
                f"the model cannot be explained: {type(error).__name__}: {one_line(error)}"
            ) from error


@contextmanager
def _one_rank(axes: int) -> Iterator[DeviceMesh]:
    own = not dist.is_initialized()
    if own:
        init_own_process_group()
    try:
        names = ("dp_outer", "dp_inner")[-axes:]
        sizes = (1, 1)[-axes:] if own else (1, dist.get_world_size())[-axes:]
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        if own:
            dist.destroy_process_group()
