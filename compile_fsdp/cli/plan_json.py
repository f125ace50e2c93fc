"""A plan as JSON.

The schema, version 1; sizes are bytes, times seconds::

    {
      "format": "compile_fsdp.plan", "version": 1, "torch_version": str,
      "target": str, "mesh": {"outer", "inner", "ranks_per_node"}, "mode": str,
      "activation_checkpointing": bool, "cost_model": str, "optimizer": str, "limit": int or null,
      "samples": int, "unit": str, "groups": [GroupSizes, and "gather_bytes", "reduce_bytes"],
      "kept": [label], "memory": Memory and "total", "communication": [Traffic],
      "arena": {"size", "bound"} or null,
      "seconds": Seconds and "total", "flops": int, "rate": float, "mfu": float,
      "changes": [{"text", "option", "step", "memory", "fits"}],
      "search": [{"mode", "mesh", "options", "step", "exposed", "peak", "rate", "mfu", "fits"}]
    }

``GroupSizes`` and the others have the fields of the classes of that name in
`compile_fsdp.planning`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..planning.communication import traffic
from .plan_text import Report

VERSION = 1


def as_data(report: Report) -> dict[str, Any]:
    """The schema's object, of dicts, lists and scalars."""
    plan = report.prediction
    captured = plan.captured
    return {
        "format": "compile_fsdp.plan",
        "version": VERSION,
        "torch_version": torch.__version__,
        "target": captured.name,
        "mesh": asdict(captured.shape),
        "mode": captured.sharding.mode,
        "activation_checkpointing": captured.sharding.checkpoints,
        "cost_model": plan.policy.costs.name,
        "optimizer": plan.optimizer,
        "limit": report.limit,
        "samples": captured.samples,
        "unit": captured.unit,
        "groups": [
            {
                **asdict(size),
                "gather_bytes": captured.groups[name].gather_bytes,
                "reduce_bytes": captured.groups[name].reduce_bytes,
            }
            for name, size in captured.sizes.items()
        ],
        "kept": list(plan.kept),
        "memory": {**asdict(plan.memory), "total": plan.memory.total},
        "arena": plan.arena and {"size": plan.arena.size, "bound": plan.arena.bound},
        "communication": [asdict(each) for each in traffic(plan)],
        "seconds": {**asdict(plan.seconds), "total": plan.seconds.total},
        "flops": plan.flops,
        "rate": plan.rate,
        "mfu": plan.mfu,
        "changes": [
            {
                "text": each.text,
                "option": each.option,
                "step": each.step,
                "memory": each.memory,
                "fits": each.fits,
            }
            for each in report.changes
        ],
        "search": [
            {
                "mode": each.mode,
                "mesh": each.mesh,
                "options": each.options,
                "step": each.plan.seconds.total,
                "exposed": each.plan.seconds.exposed,
                "peak": each.plan.memory.total,
                "rate": each.plan.rate,
                "mfu": each.plan.mfu,
                "fits": each.fits,
            }
            for each in report.found
        ],
    }
