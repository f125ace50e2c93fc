"""A prediction as an `Explanation`, with the pictures and files that explanations have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compilation import RewrittenGraph
from ..describe import GraphOrigin, graph_explanation
from ..explanation import Explanation
from .predict import Prediction


def explanation_of_plan(prediction: Prediction, notes: Sequence[str] = ()) -> Explanation:
    """``prediction`` as an explanation; graph texts are empty, for no graph was rewritten."""
    captured = prediction.captured
    origin = GraphOrigin(prediction.policy.costs, "plan", captured.name)
    graphs = tuple(
        graph_explanation(
            number,
            origin,
            RewrittenGraph(schedule.kind, schedule, "", "", ""),
            captured.described,
            1,
        )
        for number, schedule in enumerate(prediction.schedules)
    )
    return Explanation(
        torch_version=torch.__version__,
        world_size=captured.shape.ranks,
        groups=tuple(captured.described.values()),
        graphs=graphs,
        notes=tuple(notes),
    )
