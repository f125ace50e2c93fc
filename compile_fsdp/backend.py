"""The torch.compile backend: ``torch.compile(model, backend="compile_fsdp")``.

Registered under the entry point group ``torch_dynamo_backends``, so an installed package needs no
import to be found. The heavy imports (Dynamo, Inductor) happen inside the functions: importing
this package stays light.
"""

from __future__ import annotations

import copy
import difflib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch

from compile_fsdp.passes import pipeline
from compile_fsdp.passes.costs import CostModel
from compile_fsdp.passes.policy import Policy, parse_policy
from compile_fsdp.passes.uses import group_facts
from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from compile_fsdp.runtime.planes import PlaneUnit
from compile_fsdp.runtime.registry import registry

from .compilation import Compilation, is_watched
from .context import FsdpContext
from .graphed import GraphedStep
from .inspection import check_all_managed
from .torch_internals import version_of
from .unit import written_in_forward

INNER_COMPILERS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class CompileOptions:
    """What ``torch.compile(..., backend="compile_fsdp", options={...})`` accepts.

    Attributes:
        inner: who compiles the compute: ``"inductor"``, or ``"aot_eager"``, which runs the graphs
            op by op and is bitwise equal to the eager driver.
        verify: prove every rewritten graph right (see ``passes/verify.py``); costs compile time.
        prefetch, memory_budget, activation_bytes, reshard_after_forward, merge_below, arena,
            equal_shapes, cost_model: what the schedules should be like; see `parse_policy` and
            `Policy` in ``compile_fsdp.passes.policy`` for their values and defaults.
        cudagraphs: capture what the graphs do on the device, and repeat it (``graphed.py``);
            implies ``arena``.
        inductor: extra Inductor config values for this compilation, by name.
    """

    inner: str = "inductor"
    verify: bool = False
    prefetch: int | str = "auto"
    memory_budget: int | float | str = "peak"
    activation_bytes: int | str | None = None
    reshard_after_forward: bool | str | Mapping[str, bool] = "auto"
    merge_below: int | str = 0
    arena: bool = False
    equal_shapes: bool = False
    cost_model: CostModel | str | None = None
    cudagraphs: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Check and take over the user's ``options``.

        Raises:
            ValueError: an option is unknown, or has a value that is not among those accepted.
            TypeError: a value has the wrong type.
        """
        options = dict(options or {})
        known = {option.name for option in fields(cls)}
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"compile_fsdp: unknown option {name!r}{hint} Known options: "
                    f"{', '.join(sorted(known))}"
                )
        parsed = cls(**options)
        parsed._check()
        return parsed.with_cudagraphs() if parsed.cudagraphs else parsed

    def with_cudagraphs(self) -> CompileOptions:
        """These options with CUDA graphs, which need gathered parameters at fixed addresses."""
        return replace(self, cudagraphs=True, arena=True)

    def _check(self) -> None:
        if self.inner not in INNER_COMPILERS:
            raise ValueError(
                f"compile_fsdp: option 'inner' must be one of {', '.join(INNER_COMPILERS)}, "
                f"got {self.inner!r}"
            )
        for name in ("verify", "cudagraphs"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"compile_fsdp: option {name!r} must be a bool, got {value!r}")
        if not isinstance(self.inductor, Mapping):
            raise TypeError(
                "compile_fsdp: option 'inductor' must be a dict of Inductor config values, got "
                f"{type(self.inductor).__name__}"
            )
        if self.cudagraphs and self.inductor.get("triton.cudagraphs"):
            raise ValueError(
                "compile_fsdp: option 'cudagraphs' captures whole graphs, communication included; "
                "leave out Inductor's own 'triton.cudagraphs'"
            )
        self.policy("cpu")

    def policy(self, device: str) -> Policy:
        """What these options ask of the schedules of a model on a type of device ("cuda").

        Raises:
            ValueError: names the option.
        """
        try:
            return parse_policy(
                {each.name: getattr(self, each.name) for each in fields(self)}, device
            )
        except ValueError as error:
            raise ValueError(f"compile_fsdp: {error}") from None


def compile_fsdp(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph with its parameter communication inside.

    Args:
        gm: the graph Dynamo captured; reads of sharded parameters are marker nodes.
        example_inputs: fake or real inputs, as Dynamo passes them.
        options: see `CompileOptions`.
        mode: None, ``"default"``, or ``"reduce-overhead"``, which is the option ``cudagraphs``.
            Inductor settings are passed by ``options={"inductor": ...}``.

    Returns:
        A callable with the graph's signature.

    Raises:
        ValueError, TypeError: by `CompileOptions.parse`, or for a ``mode``.
    """
    parsed = CompileOptions.parse(options)
    if mode == "reduce-overhead":
        parsed = parsed.with_cudagraphs()
    elif mode not in (None, "default"):
        raise ValueError(
            f"compile_fsdp: mode={mode!r} is not supported; pass 'reduce-overhead' for CUDA "
            'graphs, or Inductor settings by options={"inductor": {...}}'
        )
    return compile_graph(gm, example_inputs, parsed)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    parsed: CompileOptions,
    *,
    plan_only: bool = False,
) -> Callable[..., Any]:
    """As `compile_fsdp`, with options that are checked.

    Args:
        plan_only: plan the graphs and compile nothing; see `pipeline.compile_with_inductor`.
    """
    groups = groups_in(gm)
    _check_modules(groups)
    whole = _whole_models(groups)
    compilation = Compilation(gm, groups, _policy(parsed, whole))
    passes: dict[str, Any] = {
        "groups": groups,
        "policy": compilation.policy,
        "whole_model": whole.keys() == groups.keys(),
    }
    seen: dict[str, Any] = {
        "verify": parsed.verify,
        "observer": compilation.observe,
        "plan_only": plan_only,
    }
    if parsed.cudagraphs and groups and not plan_only:
        seen["captures"] = _graphed_step(groups, compilation.compile_id)
    if compilation.policy.prefetch != 0 and not plan_only:
        for context in dict.fromkeys(group.context for group in whole.values()):
            if isinstance(context, FsdpContext):
                context.note_graph(groups)
    original = copy.deepcopy(gm) if groups else gm
    if parsed.inner == "aot_eager":
        compiled = pipeline.compile_with_aot_eager(gm, example_inputs, **seen, **passes)
    else:
        patches = _inductor_config(parsed)
        compiled = pipeline.compile_with_inductor(
            gm, example_inputs, config_patches=patches, **seen, **passes
        )
    if groups:
        compiled = _following_flags(compiled, original, passes)
    return compilation.announcing(compiled)


def _graphed_step(groups: Iterable[str], compile_id: str) -> GraphedStep:
    """What captures the graphs of one compilation; their model can be asked about it."""
    live = [cast(FsdpParameterGroup, registry.lookup(name)) for name in groups]
    step = GraphedStep([group.name for group in live], live[0].device, compile_id)
    for context in dict.fromkeys(group.context for group in live):
        if isinstance(context, FsdpContext):
            context.graphed_steps.append(weakref.ref(step))
    return step


def _inductor_config(options: CompileOptions) -> dict[str, Any]:
    """The user's values. A graph that comes out of a cache is not seen by the passes, so while a
    capture is open there are no caches."""
    patches = dict(options.inductor)
    if options.cudagraphs:
        patches["triton.cudagraphs"] = False
    if is_watched():
        patches |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    return patches


def _following_flags(
    compiled: Callable[..., Any],
    original: torch.fx.GraphModule,
    passes: Mapping[str, Any],
) -> Callable[..., Any]:
    """``compiled``, which sees that a parameter has been frozen or made trainable.

    The flag is on the sharded parameter, which no graph has as an input. Taking it over changes
    what Dynamo guards on, so the next call compiles anew; but this one's guards have been
    evaluated. It runs the same graph with the flags of now, operator by operator.
    """
    trainable = {name: info.trainable for name, info in passes["groups"].items()}

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        now = {name: flags_of(name) for name in trainable}
        if now == trainable:
            return compiled(*args)
        again = {**passes, "groups": groups_in(original)}
        once = pipeline.compile_with_aot_eager(copy.deepcopy(original), args, **again)
        return once(*args)

    def flags_of(name: str) -> tuple[bool, ...]:
        group = registry.lookup(name)
        group.follow_requires_grad()
        return group.trainable

    return call


def _check_modules(groups: Mapping[str, GroupInfo]) -> None:
    """Refuse trainable parameters that were added below the sharded modules of a graph."""
    for name in groups:
        check_all_managed(cast(FsdpParameterGroup, registry.lookup(name)).owning_module)


def _whole_models(groups: Iterable[str]) -> dict[str, FsdpParameterGroup]:
    """All groups of the models that ``groups`` are a part of, by name: a program with graph breaks
    compiles its model in parts."""
    live = [cast(FsdpParameterGroup, registry.lookup(name)) for name in groups]
    contexts = dict.fromkeys(group.context for group in live)
    return {group.name: group for context in contexts for group in context.groups()}


def _policy(options: CompileOptions, models: Mapping[str, FsdpParameterGroup]) -> Policy:
    """What the options ask, checked against all groups of the models: they may speak of groups that
    are not in the graph at hand."""
    device = next(iter(models.values())).device.type if models else "cpu"
    policy = options.policy(device)
    infos = {name: group.info for name, group in models.items()}
    try:
        policy.check_groups([info.label for info in infos.values()])
        policy.check_budget(group_facts(infos))
    except ValueError as error:
        raise ValueError(f"compile_fsdp: {error}") from None
    return policy


def groups_in(gm: torch.fx.GraphModule) -> dict[str, GroupInfo]:
    """The parameter groups that ``gm`` and its subgraphs read, by name, in order of first read."""
    import compile_fsdp.runtime.ops  # noqa: F401  (registers the marker)

    marker = torch.ops.compile_fsdp.parameter
    found: dict[str, GroupInfo] = {}
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target in (marker, marker.default):
                name = node.args[1]
                # Dynamo ran the program on this very value.
                value = node.meta.get("example_value")
                if value is not None and version_of(value) > 0:
                    index = cast(int, node.args[2])
                    raise written_in_forward(registry.lookup(name).info.fqns[index][0])
                if name not in found:
                    found[name] = registry.lookup(name).info
                    live = registry.lookup(name)
                    if isinstance(live, PlaneUnit):
                        # Backward reads the other planes, and reduces the group's gradients.
                        group = live.group
                        found.setdefault(group.name, group.info)
                        found.update({each.name: each.info for each in group.planes})
    return found
