"""What an explanation holds: plain, frozen data about the communication of compiled graphs.

    Explanation
      groups        ParameterGroup     what is gathered and reduced together
      graphs        GraphExplanation   one for each forward, backward or inference graph
        steps         PlannedStep        the schedule, in the order of issue
        spans         Span               when each lane is busy
        collectives   CollectiveTotal    how many, how many bytes
        memory        MemoryPoint        modelled bytes in use
        decisions     Decision           what was decided about groups, and why
        time          ModelledTime       totals by the cost model
      formats       WeightFormat       which weights compute in MXFP8, and why others do not
      breaks        GraphBreak         where Dynamo ended a graph, and why
      recompiles    Recompile          which guard failed

Nothing here computes: `compile_fsdp.describe` fills it in, `compile_fsdp.report` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, TextIO

SCHEMA_VERSION = 1
"""Version of the JSON form; it changes when a field changes its meaning or goes away."""

LANES = ("compute", "gather", "reduce_inner", "reduce_outer")


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group.

    Attributes:
        name: stable name, equal on every rank ("0/blocks.0/0").
        label: short name for people ("blocks.0").
        fqns: for each parameter its fully qualified names, several when tied.
        shapes: for each parameter its full shape.
        dtype: compute dtype ("float32").
        gradient_dtype: dtype in which gradients are reduced.
        trainable: False for frozen parameters.
        gather_bytes: bytes of the gathered flat buffer; 0 where nothing is sharded.
        reduce_bytes: bytes of the packed gradients that are reduced.
        shard_bytes: bytes of this rank's part of the flat buffer.
        gather_axis, inner_axis, outer_axis: the mesh axes of its collectives, "+" between two;
            empty where there is none.
        inner_kind, outer_kind: what reduces gradients: ``"reduce_scatter"``, ``"all_reduce"``.
        planes: ``"rowwise"`` or ``"columnwise"`` for the planes of MXFP8 weights, which a forward
            or a backward gathers; else empty.
        planes_of: name of the group whose weights these planes are quantised from.
    """

    name: str
    label: str
    fqns: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    gradient_dtype: str
    trainable: bool
    gather_bytes: int
    reduce_bytes: int
    shard_bytes: int
    gather_axis: str = ""
    inner_axis: str = ""
    outer_axis: str = ""
    inner_kind: str = ""
    outer_kind: str = ""
    planes: str = ""
    planes_of: str = ""


@dataclass(frozen=True)
class WeightFormat:
    """In what format a parameter computes, where a policy's ``compute_weights`` was about it.

    Attributes:
        fqn: its first name.
        format: ``"mxfp8"``, or empty: its own dtype.
        reason: why it does not compute in MXFP8; empty where it does.
    """

    fqn: str
    format: str
    reason: str = ""


@dataclass(frozen=True)
class PlannedStep:
    """One step of a schedule.

    Attributes:
        number: position in the schedule; later steps name it in ``names``.
        op: ``"gather_together"``, ``"unshard"``, ``"wait"``, ``"release"``, ``"keep"``,
            ``"reduce_inner"``, ``"reduce_together"``, ``"reduce_outer"`` or
            ``"wait_reductions"``.
        group: label of its parameter group, several with "+" between them where they are gathered
            or reduced together, empty for ``wait_reductions``.
        fqns: the parameters it is about.
        bytes: size of the buffer that it gathers or reduces, else 0.
        axis: mesh axis of its collective, empty where it has none.
        where: its place in the graph, in words.
        anchor: position of the node before which it is written.
        names: steps whose result it takes as an argument, beyond the one that it works on.
        overlaps: labels of the groups that compute while its collective is in flight.
        reason: why it is there.
        issued, start, end: modelled microseconds from the start of the graph: when compute reaches
            it, and when its collective runs.
        exposed: modelled microseconds that compute stands still at it.
    """

    number: int
    op: str
    group: str
    fqns: tuple[str, ...]
    bytes: int
    axis: str
    where: str
    anchor: int
    names: tuple[int, ...] = ()
    overlaps: tuple[str, ...] = ()
    reason: str = ""
    issued: float = 0.0
    start: float = 0.0
    end: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Span:
    """A lane is busy from ``start`` to ``end``.

    Attributes:
        lane: one of `LANES`.
        start, end: in the unit of the graph's ``time_unit``.
        label: the group, or for compute the nodes that run.
        detail: one more line for people.
        step: number of the step that started it; None for compute.
        bytes: what the collective's buffer holds; 0 for compute.
        fqns: the parameters that are moved, or that are read.
    """

    lane: str
    start: float
    end: float
    label: str
    detail: str = ""
    step: int | None = None
    bytes: int = 0
    fqns: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of a kind over one mesh axis.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        lane: the lane they are issued on.
        axis: the mesh axis.
        count: how many.
        bytes: the sum of their full buffers, in bytes.
    """

    kind: str
    lane: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MemoryPoint:
    """Modelled bytes in use from ``at`` on, until the next point.

    Attributes:
        at: in the unit of the graph's ``time_unit``.
        activations: results of nodes.
        parameters: unsharded flat buffers.
        gradients: packed gradients that wait for their reduction.
    """

    at: float
    activations: int
    parameters: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.activations + self.parameters + self.gradients


@dataclass(frozen=True)
class ModelledTime:
    """Microseconds that a graph is expected to take, by the cost model.

    Attributes:
        cost_model: name of the model.
        compute: compute alone.
        communication: all collectives together.
        exposed: compute standing still until communication is done.
        total: from the first node to the end.
    """

    cost_model: str
    compute: float
    communication: float
    exposed: float
    total: float


@dataclass(frozen=True)
class Decision:
    """What was decided about a group as a whole, and why.

    Attributes:
        group: label of the group.
        reason: in words.
    """

    group: str
    reason: str


@dataclass(frozen=True)
class GraphExplanation:
    """One compiled graph.

    Attributes:
        number: position among the graphs of the explanation.
        kind: ``"forward"``, ``"backward"`` or ``"inference"``.
        compile_id: Dynamo's name for the compilation ("0/1": frame 0, its first recompile).
        where: the user's line that the graph starts with.
        calls: how often it was called while the capture was open; 0 for a backward graph.
        schedule: the schedule as the scheduler prints it.
        steps, spans, collectives, memory, decisions, time: see their classes.
        time_unit: ``"us"`` where spans and memory are over modelled microseconds, ``"node"`` where
            they are over positions in the graph, because nothing was modelled.
        state_bytes: shards and their gradients, which are in use at all times.
        budget: bytes that the policy allows a rank; None where it names no number.
        node_count: nodes of the graph before the rewrite.
        before, after: the whole graph, see `compile_fsdp.passes.listing`.
        communication: the rewritten graph, with communication and its neighbours only.
        arena_bytes: size of the arena that gathered parameters have their places in; None: there is
            none (option ``arena``).
        arena_bound: the bytes in it that are live at once, which no arena can do without.
    """

    number: int
    kind: str
    compile_id: str
    where: str
    calls: int
    schedule: str
    steps: tuple[PlannedStep, ...]
    spans: tuple[Span, ...]
    collectives: tuple[CollectiveTotal, ...]
    memory: tuple[MemoryPoint, ...]
    decisions: tuple[Decision, ...]
    time: ModelledTime
    time_unit: str
    state_bytes: int
    budget: int | None
    node_count: int
    before: str
    after: str
    communication: str
    arena_bytes: int | None = None
    arena_bound: int | None = None

    @property
    def name(self) -> str:
        """``"graph 0: forward (0/0)"``."""
        return f"graph {self.number}: {self.kind} ({self.compile_id})"

    @property
    def peak(self) -> MemoryPoint | None:
        """The first point at which most memory is in use; None without a curve."""
        return max(self.memory, key=lambda point: point.total, default=None)


@dataclass(frozen=True)
class GraphBreak:
    """Dynamo ended a graph here and went on with another one.

    Attributes:
        reason: Dynamo's explanation, several lines.
        file, line, function, code: the user's line; empty and 0 where Dynamo does not know.
        compile_id: the compilation that it ended.
    """

    reason: str
    file: str
    line: int
    function: str
    code: str
    compile_id: str


@dataclass(frozen=True)
class Recompile:
    """Code that had been compiled before was compiled again.

    Attributes:
        compile_id: the new compilation.
        failed_guard: what had changed, as Dynamo says it.
        where: the user's line that the graph starts with.
    """

    compile_id: str
    failed_guard: str
    where: str


@dataclass(frozen=True)
class Explanation:
    """What was compiled; see the module's docstring for the parts.

    ``str(explanation)`` is the text form; a notebook shows the page.

    Attributes:
        torch_version: of the torch that compiled.
        world_size: ranks that share a group; 1 without groups.
        groups: every group that a graph may read, in order of first use.
        graphs: in the order in which they were compiled or first called.
        breaks, recompiles: what Dynamo did beside.
        notes: what is missing, and why; empty when nothing is.
        formats: of the parameters of modules that were sharded with ``compute_weights``.
    """

    torch_version: str
    world_size: int
    groups: tuple[ParameterGroup, ...]
    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    notes: tuple[str, ...] = ()
    formats: tuple[WeightFormat, ...] = ()

    def __bool__(self) -> bool:
        """Whether any graph was seen."""
        return bool(self.graphs)

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> Any:
        from .report import terminal

        return terminal.render(self)

    def _repr_html_(self) -> str:
        from .report import html

        return html.embedded(self)

    def show(self, file: TextIO | None = None, *, graphs: str = "none") -> None:
        """Print it: in colour where ``rich`` is installed and ``file`` is a terminal, else as
        plain text.

        Args:
            file: where to; None is standard output.
            graphs: see `to_text`.
        """
        from .report import terminal

        terminal.show(self, file, graphs=graphs)

    def to_text(self, *, graphs: str = "none") -> str:
        """As plain text.

        Args:
            graphs: what to print of the graphs themselves: ``"none"``, ``"communication"`` (the
                rewritten graph, with communication and its neighbours only) or ``"whole"`` (before
                and after the rewrite).

        Raises:
            ValueError: ``graphs`` is something else.
        """
        from .report import text

        return text.render(self, graphs=graphs)

    def to_json(self) -> str:
        """As JSON: the fields of these classes under their names, and ``"version"``; see
        `compile_fsdp.report.as_json` for the schema."""
        from .report import as_json

        return as_json.dumps(self)

    @staticmethod
    def from_json(text: str) -> Explanation:
        """The inverse of `to_json`.

        Raises:
            ValueError: ``text`` is no explanation, or one of another version.
        """
        from .report import as_json

        return as_json.loads(text)

    def to_html(self) -> str:
        """As a page: lanes over time and the memory below. It needs nothing but a browser."""
        from .report import html

        return html.render(self)

    def to_chrome_trace(self) -> str:
        """As a trace that ui.perfetto.dev and chrome://tracing open."""
        from .report import chrome_trace

        return chrome_trace.dumps(self)

    def to_dot(self, graph: int = 0) -> str:
        """The order of one graph's steps in Graphviz's language.

        Raises:
            ValueError: there is no such graph.
        """
        from .report import dot

        return dot.render(self.graph(graph))

    def to_svg(self, graph: int = 0) -> str:
        """One graph's lanes and memory as a picture.

        Raises:
            ValueError: there is no such graph.
        """
        from .report import svg

        return svg.render(self.graph(graph))

    def graph(self, number: int) -> GraphExplanation:
        """The graph of this number.

        Raises:
            ValueError: there is no such graph.
        """
        if not 0 <= number < len(self.graphs):
            known = ", ".join(graph.name for graph in self.graphs) or "none"
            raise ValueError(f"there is no graph {number} in this explanation; graphs: {known}")
        return self.graphs[number]

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, in the form that the name asks for: ``.txt``, ``.json``, ``.html``,
        ``.trace.json`` (Perfetto), and of the first graph ``.dot`` and ``.svg``.

        Raises:
            ValueError: the name ends otherwise.
        """
        from .report import save

        save(self, path)
