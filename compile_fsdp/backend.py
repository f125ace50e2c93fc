"""The torch.compile backend: ``torch.compile(model, backend="compile_fsdp")``.

Registered under the entry point group ``torch_dynamo_backends``, so an installed package needs no
import to be found. The heavy imports (Dynamo, Inductor) happen inside the functions: importing
this package stays light.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from compile_fsdp.passes import pipeline
from compile_fsdp.passes.schedule import Policy
from compile_fsdp.runtime.group_info import GroupInfo
from compile_fsdp.runtime.registry import registry

INNER_COMPILERS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class CompileOptions:
    """What ``torch.compile(..., backend="compile_fsdp", options={...})`` accepts.

    Attributes:
        inner: who compiles the compute: ``"inductor"``, or ``"aot_eager"``, which runs the graphs
            op by op and is bitwise equal to the eager driver.
        verify: prove every rewritten graph right (see ``passes/verify.py``); costs compile time.
        prefetch: how many groups ahead of their use gathers are issued; 0 turns overlap off.
        inductor: extra Inductor config values for this compilation, by name.
    """

    inner: str = "inductor"
    verify: bool = False
    prefetch: int = 1
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
        return parsed

    def _check(self) -> None:
        if self.inner not in INNER_COMPILERS:
            raise ValueError(
                f"compile_fsdp: option 'inner' must be one of {', '.join(INNER_COMPILERS)}, "
                f"got {self.inner!r}"
            )
        if not isinstance(self.verify, bool):
            raise TypeError(f"compile_fsdp: option 'verify' must be a bool, got {self.verify!r}")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(
                f"compile_fsdp: option 'prefetch' must be an int, got {self.prefetch!r}"
            )
        if self.prefetch < 0:
            raise ValueError(f"compile_fsdp: option 'prefetch' must be >= 0, got {self.prefetch}")
        if not isinstance(self.inductor, Mapping):
            raise TypeError(
                "compile_fsdp: option 'inductor' must be a dict of Inductor config values, got "
                f"{type(self.inductor).__name__}"
            )


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
        mode: only None and ``"default"``; pass Inductor settings by ``options={"inductor": ...}``.

    Returns:
        A callable with the graph's signature.

    Raises:
        ValueError, TypeError: by `CompileOptions.parse`, or for a ``mode``.
    """
    parsed = CompileOptions.parse(options)
    if mode not in (None, "default"):
        raise ValueError(
            f"compile_fsdp: mode={mode!r} is not supported; pass Inductor settings by "
            'options={"inductor": {...}}'
        )
    groups = groups_in(gm)
    policy = Policy(prefetch=parsed.prefetch)
    if parsed.inner == "aot_eager":
        return pipeline.compile_with_aot_eager(
            gm, example_inputs, groups=groups, policy=policy, verify=parsed.verify
        )
    return pipeline.compile_with_inductor(
        gm,
        example_inputs,
        groups=groups,
        policy=policy,
        verify=parsed.verify,
        config_patches=dict(parsed.inductor),
    )


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
                if name not in found:
                    found[name] = registry.lookup(name).info
    return found
