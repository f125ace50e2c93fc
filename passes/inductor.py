"""The passes in the form that Inductor calls and caches.

Importing this module imports Inductor, so only a compilation imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Interpreter

from .capturable import capture_facts
from .facts import GraphKind
from .pipeline import Captures, PassOptions, with_graph_of_its_own
from .torch_internals import (
    boxed,
    custom_graph_pass,
    inductor_config_value,
    inductor_inner_compile,
    inference_aware_graph_pass,
)
from .uses import graph_kind

_CustomGraphPass: Any = custom_graph_pass()
_InferenceAwareGraphPass: Any = inference_aware_graph_pass()


class JointPass(_CustomGraphPass):  # type: ignore[misc]
    """Inductor's ``joint_custom_pre_pass``: prepare a joint graph for the partitioner."""

    def __init__(self, options: PassOptions) -> None:
        self._options = options

    def __call__(self, graph: Graph) -> None:
        self._options.prepare(graph)

    def uuid(self) -> str:
        """Part of Inductor's cache key."""
        return self._options.cache_key


class PlanOnly:
    """Takes the place of Inductor's inner compiler: stops when a graph has been planned.

    Inductor's own passes run up to ours, so the graph is the one that would be compiled. What is
    returned runs the graph that Inductor was given, in which parameters are markers.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._is_planned = False

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        run = with_graph_of_its_own(gm)
        self._graph, self._is_planned = gm.graph, False
        try:
            inductor_inner_compile(gm, inputs, **settings)
        except Exception:
            # Inductor wraps what a pass raises in an error of its own.
            if not self._is_planned:
                raise
        return boxed(lambda arguments: Interpreter(run).boxed_run(arguments))

    def planned(self, graph: Graph) -> None:
        """Stop the compilation if ``graph`` is all of it, and not the body of a higher-order op.

        Raises:
            RuntimeError: to stop; it is caught above.
        """
        if graph is self._graph:
            self._is_planned = True
            raise RuntimeError("the graph is planned, and nobody wants it compiled")


class CapturedGraphs:
    """Inductor's inner compiler, whose graphs are handed over to be captured.

    What it returns has no key of its own, so AOTAutograd's cache does not store it; Inductor's
    cache, which is below, does.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        kind = GraphKind.FORWARD
        if settings.get("is_backward"):
            kind = GraphKind.BACKWARD
        elif settings.get("is_inference"):
            kind = GraphKind.INFERENCE
        facts = capture_facts(gm, kind, self._captures.device_type)
        return boxed(self._captures.take(facts, inductor_inner_compile(gm, inputs, **settings)))


class GraphPass(_InferenceAwareGraphPass):  # type: ignore[misc]
    """Inductor's ``post_grad_custom_post_pass``: rewrite one graph.

    Inductor calls it on the bodies of higher-order ops as well. Their markers are scheduled
    within the body; their gradient markers stay, and reduce one gradient at a time.
    """

    def __init__(self, options: PassOptions, plan_only: PlanOnly | None = None) -> None:
        self._options = options
        self._plan_only = plan_only

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        # Older releases of torch do not tell; an inference graph is planned like a forward then.
        self._options.rewrite(graph, graph_kind(graph, is_inference))
        if self._plan_only is not None:
            self._plan_only.planned(graph)

    def uuid(self) -> str:
        """Part of Inductor's cache key."""
        return self._options.cache_key


class PassSequence(_InferenceAwareGraphPass):  # type: ignore[misc]
    """Several passes where older releases of torch accept one."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self._passes = tuple(passes)

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for graph_pass in self._passes:
            if isinstance(graph_pass, _InferenceAwareGraphPass):
                graph_pass(graph, is_inference)
            else:
                graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, which turns caching off, when a pass has no key of its own."""
        keys = tuple(_uuid(graph_pass) for graph_pass in self._passes)
        return None if None in keys else keys


def with_passes(
    options: PassOptions, config_patches: Mapping[str, Any], plan_only: PlanOnly | None = None
) -> dict[str, Any]:
    """``config_patches`` with the passes added behind those that a user has configured."""
    patches = dict(config_patches)
    for name, own in (
        ("joint_custom_pre_pass", JointPass(options)),
        ("post_grad_custom_post_pass", GraphPass(options, plan_only)),
    ):
        configured = patches[name] if name in patches else inductor_config_value(name)
        patches[name] = _sequence(configured, own)
    return patches


def _sequence(configured: Any, own: Any) -> Any:
    if configured is None:
        return own
    earlier = configured if isinstance(configured, list | tuple) else (configured,)
    return PassSequence((*earlier, own))


def _uuid(graph_pass: Any) -> Any:
    return graph_pass.uuid() if isinstance(graph_pass, _CustomGraphPass) else None
