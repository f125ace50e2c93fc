"""How long compute and communication take, by arithmetic: no clock, no torch.

Compute: a node takes the longer of its arithmetic and its memory traffic, plus a start. (The
"roofline" model; S. Williams et al., CACM 52(4), 2009.)

Communication: alpha-beta on two levels. A ring over ``n`` ranks, ``local`` of them in each of
``nodes`` nodes, moves a buffer of ``size`` bytes in

    start + (local - 1) * alpha_in_node + (nodes - 1) * alpha_between_nodes
          + max(size * (n - 1) / n / beta_in_node,
                size * (nodes - 1) / nodes / local / beta_between_nodes)

since every rank receives all that others hold, and a node has a network port for each rank. An
all-reduce is a reduce-scatter and an all-gather.

Every number can be replaced by a measured one: ``dataclasses.replace(cost_model("h100"), ...)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import hardware
from .facts import GroupFacts, NodeFacts


@dataclass(frozen=True)
class DeviceCosts:
    """What one device can do.

    Attributes:
        name: for people.
        flops: FLOP/s by dtype; a dtype that is not listed counts as "float32".
        bandwidth: of its memory, bytes/s.
        memory: bytes of its memory, None when unknown.
        start: seconds to start one kernel.
        reductions: how many packed gradients the runtime holds; the next reduction waits for the
            oldest (see `memory.memory_curve`).
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    bandwidth: float
    memory: int | None = None
    start: float = 0.0
    reductions: int = 2

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix multiplications in ``dtype``."""
        rates = dict(self.flops)
        return rates.get(dtype) or rates["float32"]


@dataclass(frozen=True)
class LinkCosts:
    """One level of the network: seconds for a hop, bytes/s of a rank in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class CostModel:
    """Everything that times are computed from. Must be the same on every rank.

    Attributes:
        name: for people.
        device: the device that each rank computes on.
        in_node, between_nodes: the two levels of the network.
        ranks_per_node: consecutive ranks that share a node.
        start: seconds of a collective beside its hops and bytes.
        compute_share, memory_share, link_share: what part of the peak rates is reached.
        tokens: rows (tokens, samples) that a rank works on in one forward, for decisions that must
            not depend on the shapes of this rank (see `policy`).
    """

    name: str
    device: DeviceCosts
    in_node: LinkCosts
    between_nodes: LinkCosts
    ranks_per_node: int = 8
    start: float = hardware.USUAL_COLLECTIVE_START
    compute_share: float = 0.5
    memory_share: float = 0.8
    link_share: float = 0.8
    tokens: int = 4096

    def __post_init__(self) -> None:
        """Raises ValueError where a number makes no sense."""
        counts = {"ranks_per_node": self.ranks_per_node, "tokens": self.tokens}
        shares = {
            name: getattr(self, name) for name in ("compute_share", "memory_share", "link_share")
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"cost model {self.name!r}: {name} must be 1 or more, got {value}")
        for name, value in shares.items():
            if not 0 < value <= 1:
                raise ValueError(f"cost model {self.name!r}: {name} must be in (0, 1], got {value}")

    def node_seconds(self, node: NodeFacts) -> float:
        """Seconds that a node computes; 0 for a view."""
        if not node.flops and not node.moved:
            return 0.0
        arithmetic = node.flops / (self.device.rate(node.dtype) * self.compute_share)
        return self.device.start + max(arithmetic, self.copy_seconds(node.moved))

    def copy_seconds(self, moved: int) -> float:
        """Seconds that ``moved`` bytes, read and written, take in device memory."""
        return moved / (self.device.bandwidth * self.memory_share)

    def nominal_seconds(self, group: GroupFacts, *, backward: bool) -> float:
        """Seconds that ``tokens`` rows times the parameters of ``group`` take: the same on every
        rank, whatever the shapes of its data are."""
        flops = (4 if backward else 2) * group.numel * self.tokens
        return flops / (self.device.rate(group.dtype) * self.compute_share)

    def gather_seconds(self, groups: Sequence[GroupFacts]) -> float:
        """Seconds of one all-gather of ``groups``, which share a mesh."""
        size = sum(group.gather_bytes for group in groups)
        return self._ring(size, *self._inner(groups[0])) if size else 0.0

    def reduce_inner_seconds(self, groups: Sequence[GroupFacts]) -> float:
        """Seconds of one reduction of ``groups`` over dp_inner; 0 where there is none to do
        before the last microbatch."""
        if not groups[0].reduces_inner:
            return 0.0
        return self._ring(sum(group.reduce_bytes for group in groups), *self._inner(groups[0]))

    def reduce_outer_seconds(self, group: GroupFacts) -> float:
        """Seconds of the reduction that finishes a group on the last microbatch."""
        if not group.finishes_later:
            return 0.0
        if group.reduces_inner and len(group.mesh_shape) > 1:
            outer, inner = group.mesh_shape[0], group.mesh_shape[-1]
            local = min(max(self.ranks_per_node // inner, 1), outer)
            return 2 * self._ring(group.reduce_bytes // inner, outer, local)
        return 2 * self._ring(group.reduce_bytes, *self._whole(group))

    def latency(self, group: GroupFacts) -> float:
        """Seconds that a collective of ``group`` takes however few bytes it moves: what merging two
        of them saves."""
        return self._ring(0, *self._inner(group))

    def copy_break_even(self, group: GroupFacts) -> int:
        """Bytes below which copying into and out of a shared buffer costs less than `latency`."""
        return int(self.latency(group) * self.device.bandwidth * self.memory_share / 2)

    def _inner(self, group: GroupFacts) -> tuple[int, int]:
        """Ranks on dp_inner, and how many of them share a node."""
        ranks = group.mesh_shape[-1] if group.mesh_shape else 1
        return ranks, min(ranks, self.ranks_per_node)

    def _whole(self, group: GroupFacts) -> tuple[int, int]:
        ranks = 1
        for size in group.mesh_shape:
            ranks *= size
        return ranks, min(ranks, self.ranks_per_node)

    def _ring(self, size: int, ranks: int, local: int) -> float:
        """One pass around a ring of ``ranks``, ``local`` of them in a node."""
        if ranks <= 1:
            return 0.0
        nodes = -(-ranks // local)
        hops = (local - 1) * self.in_node.latency + (nodes - 1) * self.between_nodes.latency
        inside = size * (ranks - 1) / ranks / self.in_node.bandwidth if local > 1 else 0.0
        between = size * (nodes - 1) / nodes / local / self.between_nodes.bandwidth
        return self.start + hops + max(inside, between) / self.link_share


def cost_model(name: str) -> CostModel:
    """The cost model of a cluster: ``"h100"``, or ``"h100+ib200"`` with another network.

    Raises:
        ValueError: a device or a link is unknown; the message lists those that are known.
    """
    device_name, _, link_name = name.partition("+")
    device = _known("device", device_name, hardware.DEVICES, name)
    usual = hardware.USUAL_LINKS[device]
    between = _known("link", link_name, hardware.LINKS, name) if link_name else usual[1]
    rates, bandwidth, memory, start = hardware.DEVICES[device]
    return CostModel(
        name=f"{device}+{between}",
        device=DeviceCosts(
            device,
            tuple(sorted(rates.items())),
            bandwidth,
            memory,
            start,
            hardware.REDUCTIONS.get(device, hardware.USUAL_REDUCTIONS),
        ),
        in_node=LinkCosts(*hardware.LINKS[usual[0]]),
        between_nodes=LinkCosts(*hardware.LINKS[between]),
        start=hardware.COLLECTIVE_START.get(usual[0], hardware.USUAL_COLLECTIVE_START),
    )


def _known(what: str, name: str, table: Mapping[str, object], model: str) -> str:
    key = name.strip().lower()
    if key not in table:
        close = difflib.get_close_matches(key, table, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"cost model {model!r}: unknown {what} {name!r}{hint} Known: {', '.join(table)}; or "
            "pass a compile_fsdp.passes.costs.CostModel with your own numbers"
        )
    return key
