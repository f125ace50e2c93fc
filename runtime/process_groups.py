"""Process groups of lanes: which communicator the collectives of a lane go to.

NCCL runs the collectives of one communicator one after the other, whatever streams they were
started on. Lanes that are to overlap over the same ranks therefore need a communicator, which to
torch is a process group, each:

    mesh axis      gather                reduce_inner                 reduce_outer
    dp_inner       the mesh's own        "compile_fsdp reduce_inner   -
                   process group          dp_inner"
    dp_outer       (HFSDP: after the     -                            the mesh's own, or where
                    step, the mesh's)                                 gathers have it, another

The first lane over an axis takes the group that the mesh has, each further one gets a group of
its own. The works of one gloo group overlap as they are, so on CPU nothing is made; nor where all
lanes are one (``unify_communication_stream=True``).

**Why no two ranks can wait for each other.** Within one communicator NCCL needs the same order on
every rank. The host starts every collective itself, one at a time and in program order (a backward
may run on a thread of autograd's, for which its caller waits): the eager driver's order is that of
the modules, a compiled graph's that of the schedule, which is a pure function of graph, groups and
options. No order depends on when an event is reached or on how large a batch is, and a choice that
a program makes is compared between ranks before the first collective after it starts
(`compile_fsdp.runtime.agreement`, one `Agreement` for all groups over the same ranks of an axis).

Between communicators NCCL asks that their kernels can be on a device at the same time, or else are
launched in one order on every rank. The host launches them in one order everywhere. What a device
that is full of other work makes of it has not been tried; one lane for all leaves nothing to ask.

Groups are made while sharding, by their members alone and in the order of the calls, and are found
again by the process group of the mesh axis: many units, several models and deep copies share them.
torch.distributed owns them, and ``destroy_process_group()`` ends them with all others: nothing here
keeps one alive.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .agreement import Step, agreement_of, share_agreement
from .placement import axis_names, is_sharded
from .torch_internals import (
    hashed_group_name,
    is_fake_group,
    process_group_timeout,
)

__all__ = [
    "GATHER",
    "REDUCE_INNER",
    "REDUCE_OUTER",
    "UNIFIED",
    "backend_of",
    "check_bound_device",
    "connect",
    "group_of_lane",
    "groups_in_use",
    "lanes_over",
    "own_groups_pay",
    "separate",
]

GATHER, REDUCE_INNER, REDUCE_OUTER = "gather", "reduce_inner", "reduce_outer"
"""Names of lanes that may overlap."""

UNIFIED = "communication"
"""Name of the one lane that does the work of all three."""

LaneUses = tuple[tuple[str, int], ...]


def lanes_over(
    mesh: DeviceMesh,
    parameter: Sequence[Placement],
    gradient: Sequence[Placement],
    optimizer: Sequence[Placement],
) -> LaneUses:
    """Which lane communicates over which axis of ``mesh``, under these placements.

    Gathers go over what is sharded, in each step or once after it; inner reductions over what
    gradients are sharded on, outer ones over what they leave partial.
    """
    sharded = [is_sharded(p) or is_sharded(o) for p, o in zip(parameter, optimizer, strict=True)]
    scattered = [is_sharded(each) for each in gradient]
    partial = [each.is_partial() for each in gradient]
    return tuple(
        (lane, axis)
        for lane, axes in ((GATHER, sharded), (REDUCE_INNER, scattered), (REDUCE_OUTER, partial))
        for axis, used in enumerate(axes)
        if used and mesh.size(axis) > 1
    )


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The name of the backend that ``group`` has for tensors on ``device_type``."""
    config = dist.get_backend_config(group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    return backends.get(device_type)


def own_groups_pay(backend: str | None) -> bool:
    """Whether lanes on this backend overlap only in process groups of their own."""
    return backend is not None and backend.startswith("nccl")


class _LanesOverAxis:
    """The process groups of the lanes over one mesh axis, by the lanes' names.

    None is the axis' own group, which is this one's key and so must not be held by it. Groups are
    held weakly: torch.distributed owns them.
    """

    def __init__(self) -> None:
        self.groups: dict[str, weakref.ref[dist.ProcessGroup] | None] = {}


_axes: weakref.WeakKeyDictionary[dist.ProcessGroup, _LanesOverAxis] = weakref.WeakKeyDictionary()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def separate(mesh: DeviceMesh, uses: LaneUses, *, own: bool | None = None) -> None:
    """Give the lanes in ``uses`` process groups of their own where they need them to overlap.

    Collective: every rank of ``mesh`` calls it with the same ``uses``. What is there is reused.

    Args:
        mesh: the data-parallel mesh.
        uses: see `lanes_over`.
        own: whether lanes need groups of their own; None asks `own_groups_pay`.

    Raises:
        RuntimeError: a group cannot be made, or the ranks of an axis are not at the same point.
    """
    for lane, axis in uses:
        group: dist.ProcessGroup = mesh.get_group(axis)
        backend = backend_of(group, mesh.device_type)
        ranks = dist.get_process_group_ranks(group)
        wanted = own_groups_pay(backend) if own is None else own
        # torch sorts the ranks of a new group: another order would give other shards.
        if not wanted or is_fake_group(group) or group.size() == 1 or ranks != sorted(ranks):
            continue
        over_axis = _axes.setdefault(group, _LanesOverAxis())
        if lane not in over_axis.groups:
            made = None
            if over_axis.groups:
                made = weakref.ref(_new_group(group, backend, lane, axis_names(mesh)[axis]))
            over_axis.groups[lane] = made


def group_of_lane(mesh: DeviceMesh, axis: int, lane: str) -> dist.ProcessGroup:
    """The process group for the collectives of the lane called ``lane`` over ``axis`` of ``mesh``.

    Raises:
        RuntimeError: it has been destroyed.
    """
    group: dist.ProcessGroup = mesh.get_group(axis)
    over_axis = _axes.get(group)
    reference = None if over_axis is None else over_axis.groups.get(lane)
    if reference is None:
        return group
    own = reference()
    if own is None:
        raise RuntimeError(
            f"the process group of the {lane} lane over mesh axis {axis_names(mesh)[axis]!r} has "
            "been destroyed while the mesh still has its own; destroy all of them with "
            "dist.destroy_process_group(), and shard the model anew"
        )
    return own


def groups_in_use(mesh: DeviceMesh, uses: LaneUses, *, unified: bool) -> list[dist.ProcessGroup]:
    """The process groups that the lanes in ``uses`` communicate in, each once."""
    names = [(UNIFIED if unified else lane, axis) for lane, axis in uses]
    return list(dict.fromkeys(group_of_lane(mesh, axis, lane) for lane, axis in names))


def _new_group(
    group: dist.ProcessGroup, backend: str | None, lane: str, axis: str | int
) -> dist.ProcessGroup:
    """A process group of the members of ``group`` for one lane, under a name that people find again
    in NCCL's messages and in its flight recorder."""
    described = f"compile_fsdp {lane} {axis}"
    agreement = agreement_of(group)
    if agreement is not None:
        # torch derives the name under which members meet from how many groups a rank has made.
        # Where that differs they would wait for each other.
        agreement.announce(Step.preparation(described, hashed_group_name(group)))
    ranks, timeout = dist.get_process_group_ranks(group), process_group_timeout(group)
    if own_groups_pay(backend) and group.bound_device_id is not None:
        # With a bound device torch makes a new group by splitting the default communicator, in
        # which every rank of the world must join. Splitting the axis' own needs its members only,
        # and that it is there.
        connect([group], group.bound_device_id)
        made: dist.ProcessGroup | None = dist.split_group(
            group, [list(range(group.size()))], timeout=timeout, group_desc=described
        )
    else:
        made = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=described,
        )
    assert made is not None, "this rank is a member"
    share_agreement(made, group)
    return made


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Make the communicators of ``groups`` now, so that none is made inside a step.

    Collective over each of ``groups``. A communicator that is made by the first collective stops
    the host in the middle of a step, cannot be made while a CUDA graph is recorded, and is where
    wrong devices and networks are found out.

    Raises:
        RuntimeError: it cannot be made.
    """
    for group in groups:
        if group in _connected or group.size() == 1 or is_fake_group(group):
            continue
        try:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(group)
            raise RuntimeError(
                f"the ranks {ranks} of process group {group.group_desc!r} cannot communicate on "
                f"{device}: {error}. Each needs a device of its own: call "
                "torch.cuda.set_device(local_rank) before the mesh is made, and pass "
                "device_id= to init_process_group"
            ) from error
        _connected.add(group)


def check_bound_device(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Warn where process groups are not bound to a device, and tell how to bind them.

    Raises:
        ValueError: they are bound to another device than the current one.
    """
    for group in groups:
        if not own_groups_pay(backend_of(group, device.type)):
            continue
        bound = group.bound_device_id
        if bound is None:
            warnings.warn(
                "the process group knows no device: pass device_id=torch.device('cuda', "
                "local_rank) to init_process_group. NCCL then connects at once and splits "
                "communicators instead of making each anew; compile_fsdp has connected them now, "
                "so that none is made inside a step",
                stacklevel=4,
            )
            return
        if bound != device:
            raise ValueError(
                f"the process group is bound to {bound} and the current device is {device}; call "
                f"torch.cuda.set_device({bound.index}) before the model is sharded"
            )
