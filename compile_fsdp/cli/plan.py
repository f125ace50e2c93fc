"""``python -m compile_fsdp plan``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ..planning.advice import changes
from ..planning.capture import capture_step
from ..planning.explained import explanation_of_plan
from ..planning.predict import predict
from ..planning.search import search
from . import settings
from .plan_json import as_data
from .plan_text import Report, sections
from .show import plain, show


def run(given: argparse.Namespace) -> None:
    """Plan, print, and write what is asked for.

    Raises:
        PlanError: bad input.
    """
    started = time.perf_counter()
    settings.check_files(given)
    shape = settings.mesh_shape(given)
    how = settings.sharding(given, shape)
    costs = settings.costs(given, shape)
    policy = settings.policy(given, costs)
    workload = settings.workload(given)
    settings.progress(f"tracing {workload.name} for {shape.ranks} ranks")
    captured = capture_step(workload, shape, how, decompose=given.inner == "inductor")
    prediction = predict(captured, policy, given.optimizer)
    limit = settings.budget(given) or costs.device.memory
    found = []
    if given.search:
        found = search(captured, workload, policy, given.optimizer, limit, settings.progress)
    report = Report(prediction, changes(prediction, limit), found[: given.top], limit)
    parts = sections(report)
    if given.json:
        text = json.dumps(as_data(report), indent=1)
        Path(given.json).write_text(text + "\n", encoding="utf-8")
    if given.html:
        notes = [line for part in parts for line in plain(part)]
        explanation_of_plan(prediction, notes).save(given.html)
    show(parts, sys.stdout)
    settings.progress(f"planned in {time.perf_counter() - started:.0f} s")
