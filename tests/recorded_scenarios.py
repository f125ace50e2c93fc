"""What is recorded to see that no stream races: trainings in every mode, and interruptions.

A scenario shards a model, compiles it where its driver is a compiler, runs once so that nothing is
compiled while it is recorded, and then runs again under recording lanes. What it does in a run is a
function of a `Training`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from compile_fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    microbatch,
    zero_missing_gradients,
)
from compile_fsdp.runtime.arena import Place
from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.happens_before import Record
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from compile_fsdp.runtime.recording import recorded_groups, recorded_step
from tests.models import LanguageModel, language_batches
from tests.modes import ONE_AXIS, OTHER_COMBINATIONS, TWO_AXES, Mode, mesh_of, shard_model
from tests.test_activation_checkpointing import Checkpointed, Reentrant, Selective
from tests.test_group_contracts import contribute, make_group
from tests.test_mishaps import FragileModel
from tests.training import drive, local_batch


class Training:
    """A sharded model, how to call it, and its optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        self.model = scenario.model()
        self.call: Callable[..., Any]
        mesh = mesh_of(scenario.shape)
        placements = scenario.mode.on(mesh, Shard(0))
        shard_model(self.model, placements, mesh, **scenario.sharding)
        if scenario.driver == "plain aot_eager":
            # Not the model: the hooks of the root are in the graph, and do nothing.
            def forward(*batch: torch.Tensor) -> Any:
                return self.model(*batch)

            self.call = torch.compile(forward, backend="aot_eager")
        else:
            self.call = drive(self.model, scenario.driver, **scenario.compiling)
        # Whether foreach operators are used by default depends on the device.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=scenario.foreach)
        if scenario.announced:
            fully_shard_optimizer(self.optimizer)
        self.batches = [local_batch(batch) for batch in language_batches(4, 4)]

    def backward(self, batch: int) -> None:
        """One forward and backward."""
        self.call(*self.batches[batch]).backward()

    def step(self, *, forget: bool = True) -> None:
        """One step of the optimizer, after which gradients are dropped."""
        self.optimizer.step()
        if forget:
            self.optimizer.zero_grad()

    def train(self, batch: int) -> None:
        """A whole step."""
        self.backward(batch)
        self.step()


def two_steps(training: Training) -> None:
    training.train(0)
    training.train(1)


def microbatches(training: Training) -> None:
    """Two steps of three."""
    for _ in range(2):
        for number in range(3):
            with microbatch(training.model, number == 2):
                training.backward(number)
        training.step()


def clipping(training: Training) -> None:
    for batch in range(2):
        training.backward(batch)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        training.step()


def gradients_kept(training: Training) -> None:
    """Gradients outlive a step: one is kept by the user, others are zeroed in place or grow."""
    training.backward(0)
    mine = [each.grad for each in training.model.parameters()]
    training.step()
    training.backward(1)
    training.step(forget=False)
    training.backward(2)
    training.optimizer.zero_grad(set_to_none=False)
    training.backward(3)
    for gradient in mine:
        if gradient is not None:
            gradient.mul_(2.0)
    next(iter(training.model.parameters())).grad = None
    training.train(0)


def stepping_within(training: Training) -> None:
    """A step between a forward and its backward, which gathers the weights that it writes."""
    training.backward(0)
    for batch in (1, 2):
        loss = training.call(*training.batches[batch])
        training.step()
        loss.backward()


def kept_over_microbatches(training: Training) -> None:
    """Finished gradients are set aside when microbatches follow, and come back."""
    for _ in range(2):
        microbatches_without_step(training)
    training.step()


def microbatches_without_step(training: Training) -> None:
    for number in range(2):
        with microbatch(training.model, number == 1):
            training.backward(number)


def gradients_replaced(training: Training) -> None:
    """The user puts other gradients into the parameters."""
    training.backward(0)
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    training.backward(1)
    training.step()
    training.train(2)


def hooked(training: Training) -> None:
    """Hooks look at gradients and change them."""
    parameters = list(training.model.parameters())
    handles = [parameters[0].register_hook(lambda gradient: gradient * 2.0)]

    def decay(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.9)

    handles.append(parameters[1].register_post_accumulate_grad_hook(decay))
    two_steps(training)
    for handle in handles:
        handle.remove()


def penalised(training: Training) -> None:
    """The loss reads the sharded parameters themselves."""
    for batch in range(2):
        loss = training.call(*training.batches[batch])
        norms = [each.square().sum() for each in training.model.parameters()]
        penalty = sum(norms[1:], norms[0]).full_tensor()
        (loss + 1e-3 * penalty).backward()
        training.step()


def evaluating(training: Training) -> None:
    """Evaluation and reading between steps, also between a backward and its step."""
    for mode in (torch.no_grad, torch.inference_mode):
        training.train(0)
        with mode():
            training.call(*training.batches[1])
        training.backward(1)
        with mode():
            training.call(*training.batches[1])
        training.step()


def reading(training: Training) -> None:
    """Whole values of parameters and gradients, and state dicts, between steps."""
    for batch in range(2):
        training.backward(batch)
        for parameter in training.model.parameters():
            parameter.full_tensor()  # type: ignore[attr-defined]
            if parameter.grad is not None:
                parameter.grad.full_tensor()  # type: ignore[attr-defined]
        training.step()
        training.model.state_dict()
        get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True))


def writing(training: Training) -> None:
    """The user writes weights between steps."""
    for batch in range(2):
        training.train(batch)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.99)
        with torch.no_grad():
            training.call(*training.batches[2])


def writing_locally(training: Training) -> None:
    """The user writes this rank's rows between two forwards, which nothing counts."""
    training.train(0)
    with torch.no_grad():
        training.call(*training.batches[2])
        for parameter in training.model.parameters():
            parameter.to_local().mul_(0.99)
    training.train(1)


def missing(training: Training) -> None:
    """Zeros for the gradients that a backward does not have."""
    zero_missing_gradients(training.model)
    two_steps(training)
    with microbatch(training.model, False):
        training.backward(2)
    training.train(3)


def interrupted(training: Training) -> None:
    """A forward and a backward fail, before a step and between two; each is tried again."""
    block = training.model.blocks[0]
    for where in ("forward", "backward"):
        for _ in range(2):
            block.fails_in = where
            try:
                training.backward(0)
            except KeyError:
                pass
            else:
                raise AssertionError(f"the {where} did not fail")
            block.fails_in = ""
            training.optimizer.zero_grad()
            training.train(1)


def stepping_after_failure(training: Training) -> None:
    """The gradients of the backward before are used although the next one failed."""
    block = training.model.blocks[0]
    for where in ("forward", "backward"):
        training.backward(0)
        block.fails_in = where
        try:
            training.backward(1)
        except KeyError:
            block.fails_in = ""
        assert not block.fails_in
        training.step()
    training.train(2)


def interrupted_microbatches(training: Training) -> None:
    """A failed backward's gradients stay, are zeroed in place, and grow."""
    block = training.model.blocks[0]
    with microbatch(training.model, False):
        training.backward(0)
        block.fails_in = "backward"
        try:
            training.backward(1)
        except KeyError:
            block.fails_in = ""
        assert not block.fails_in
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(2)
    training.train(3)


def replacing_within(training: Training) -> None:
    """Gradients are replaced between two parts of one backward."""
    for batch in range(2):
        training.model.between = [training.model.blocks[0].up.weight]
        training.train(batch)
        training.model.between = []
        training.train(batch)


def freezing(training: Training) -> None:
    """Parameters are frozen and made trainable again."""
    block = training.model.blocks[0]
    for flag in (False, True):
        for parameter in block.parameters():
            parameter.requires_grad_(flag)
        two_steps(training)


class Twice(LanguageModel):
    """Its first block is used twice, each time with a backward of its own, and what happens between
    the two may do what users do: put another gradient into each parameter of ``between``."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], self.embedding(tokens), use_reentrant=True)
        x = self.watched(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def watched(self, x: torch.Tensor) -> torch.Tensor:
        def replace(_: torch.Tensor) -> None:
            for parameter in self.between:
                if parameter.grad is not None:
                    parameter.grad = parameter.detach() * 0.1

        x = x * 1.0
        x.register_hook(replace)
        return x


class Wide(LanguageModel):
    """Its blocks have matrices that can be quantised."""

    def __init__(self) -> None:
        super().__init__(width=32)


class WideCheckpointed(Checkpointed):
    """Recomputed in backward."""

    def __init__(self) -> None:
        super().__init__(width=32)


def modes() -> dict[str, Mode]:
    """Rows of the placement table by a name for the axes they need."""
    named = {mode.name: mode for mode in ONE_AXIS}
    named |= {f"{mode.name} on two axes": mode for mode in TWO_AXES[:4]}
    named |= {mode.name: mode for mode in TWO_AXES[4:]}
    return named | {mode.placements: mode for mode in OTHER_COMBINATIONS}


@dataclass(frozen=True)
class Scenario:
    """See the module. ``placements`` is a key of `modes`; ``driver`` may be ``"plain aot_eager"``,
    which is torch's own backend."""

    what: Callable[[Training], None] = two_steps
    driver: str = "eager"
    placements: str = "ZeRO-3"
    shape: tuple[int, ...] = (2,)
    model: Callable[[], LanguageModel] = LanguageModel
    sharding: Mapping[str, Any] = field(default_factory=dict)
    compiling: Mapping[str, Any] = field(default_factory=dict)
    foreach: bool | None = None
    announced: bool = True
    note: str = ""

    @property
    def mode(self) -> Mode:
        """The row of the placement table."""
        return modes()[self.placements]

    @property
    def name(self) -> str:
        """For people."""
        mesh = "x".join(map(str, self.shape))
        words = [self.driver, self.placements, mesh, self.what.__name__, self.note]
        return " ".join(word.replace("_", " ") for word in words if word)


_DOUBLES = {
    "mixed_precision_policy": MixedPrecisionPolicy(
        main_params_dtype=torch.float64, main_grads_dtype=torch.float64
    )
}
_FP64 = {"mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float64)}
_MXFP8 = {"mixed_precision_policy": MixedPrecisionPolicy(compute_weights="mxfp8")}
_ONE_LANE = {"unify_communication_stream": True}
_Compiled = functools.partial(Scenario, driver="aot_eager")


def _by_name(*scenarios: Scenario) -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in scenarios}


# Between them they reach every line of the runtime that asks something of a lane.
SCENARIOS = _by_name(
    Scenario(what=microbatches, placements="ZeRO-1"),
    Scenario(what=microbatches, placements="ZeRO-2"),
    Scenario(what=microbatches, placements="HSDP", shape=(2, 2)),
    Scenario(what=microbatches, placements="HFSDP", shape=(2, 2), sharding=_ONE_LANE, note="unify"),
    Scenario(what=gradients_replaced, placements="HFSDP", shape=(2, 2)),
    Scenario(what=microbatches, shape=(1,)),
    Scenario(what=interrupted, model=FragileModel),
    Scenario(what=stepping_after_failure, model=FragileModel),
    Scenario(what=evaluating),
    Scenario(what=clipping, foreach=True, note="foreach"),
    Scenario(what=stepping_within),
    Scenario(what=gradients_kept),
    Scenario(what=hooked),
    Scenario(what=replacing_within, model=Twice),
    Scenario(what=reading, placements="ZeRO-1"),
    Scenario(what=writing, announced=False, sharding=_DOUBLES, note="unannounced, weights in fp64"),
    Scenario(sharding=_DOUBLES, note="weights in fp64"),
    Scenario(model=Checkpointed, note="checkpointed"),
    _Compiled(what=microbatches),
    _Compiled(what=microbatches, placements="HFSDP", shape=(2, 2)),
    _Compiled(what=interrupted, model=FragileModel),
    _Compiled(model=Checkpointed, sharding=_ONE_LANE, note="checkpointed, unify"),
    _Compiled(compiling={"merge_below": "1MiB"}, note="merged"),
    _Compiled(what=microbatches, compiling={"arena": True}, note="in an arena"),
    Scenario(what=writing_locally, driver="plain aot_eager"),
    Scenario(what=microbatches, model=Wide, sharding=_MXFP8, note="in MXFP8"),
)

MORE_SCENARIOS = _by_name(
    Scenario(what=microbatches),
    Scenario(what=microbatches, placements="HFSDP", shape=(2, 2)),
    Scenario(what=microbatches, placements="DDP"),
    Scenario(what=microbatches, placements="ZeRO-2 on two axes", shape=(2, 2)),
    Scenario(what=microbatches, placements="HFSDP", shape=(2, 1)),
    Scenario(placements="ZeRO-3 on two axes", shape=(2, 2)),
    Scenario(what=kept_over_microbatches, placements="HFSDP", shape=(2, 2)),
    Scenario(what=interrupted_microbatches, placements="HFSDP", shape=(2, 2), model=FragileModel),
    Scenario(sharding=_ONE_LANE, note="unify"),
    Scenario(what=missing, placements="ZeRO-1"),
    Scenario(what=missing),
    Scenario(what=gradients_replaced),
    Scenario(what=penalised),
    Scenario(what=reading, sharding=_FP64, note="gradients in fp64"),
    Scenario(what=freezing),
    Scenario(model=Reentrant, note="reentrant"),
    Scenario(model=Selective, note="selective"),
    _Compiled(what=microbatches, placements="ZeRO-1"),
    _Compiled(what=microbatches, placements="ZeRO-2"),
    _Compiled(what=microbatches, placements="HSDP", shape=(2, 2)),
    _Compiled(what=microbatches, placements="HFSDP", shape=(2, 2), sharding=_ONE_LANE,
              note="unify"),
    _Compiled(what=stepping_after_failure, model=FragileModel),
    _Compiled(what=evaluating),
    _Compiled(sharding=_DOUBLES, note="weights in fp64"),
    _Compiled(compiling={"memory_budget": "unlimited"}, note="kept"),
    _Compiled(what=writing, compiling={"memory_budget": "unlimited"}, note="kept"),
    _Compiled(compiling={"reshard_after_forward": True}, note="not kept"),
    _Compiled(what=gradients_kept),
    _Compiled(what=interrupted, model=FragileModel, note="in an arena, kept",
              compiling={"arena": True, "memory_budget": "unlimited"}),
    _Compiled(what=evaluating, compiling={"arena": True}, note="in an arena"),
    _Compiled(what=kept_over_microbatches, placements="HSDP", shape=(2, 2), note="in an arena",
              compiling={"arena": True}),
    _Compiled(what=microbatches, placements="HFSDP", shape=(2, 2), note="in an arena, merged",
              compiling={"arena": True, "merge_below": "1MiB"}),
    Scenario(model=WideCheckpointed, sharding=_MXFP8, note="checkpointed, in MXFP8"),
    Scenario(what=writing, placements="HFSDP", shape=(2, 2), model=Wide, announced=False,
             sharding=_MXFP8, note="unannounced, in MXFP8"),
    Scenario(what=stepping_within, placements="ZeRO-2", model=Wide, sharding=_MXFP8,
             note="in MXFP8"),
    _Compiled(what=microbatches, placements="HFSDP", shape=(2, 2), model=Wide, sharding=_MXFP8,
              note="in MXFP8"),
    _Compiled(model=WideCheckpointed, sharding=_MXFP8, note="checkpointed, in an arena, in MXFP8",
              compiling={"arena": True}),
    _Compiled(model=Wide, sharding=_MXFP8, note="merged, in MXFP8",
              compiling={"merge_below": "1MiB"}),
)  # fmt: skip


def log_of(name: str) -> list[Record]:
    """What scenario ``name`` asks of this rank's streams. Every rank of its mesh calls this."""
    scenario = (SCENARIOS | MORE_SCENARIOS)[name]
    training = Training(scenario)
    scenario.what(training)
    with recorded_step(training.model) as recorder:
        scenario.what(training)
    return recorder.log


def log_without_driver() -> list[Record]:
    """What a group asks for that is used by itself, its main weight apart from its model weight,
    and what buffers ask for that are used by themselves."""
    doubles = MixedPrecisionPolicy(main_params_dtype=torch.float64)
    group = make_group(nn.Linear(4, 4), policy=doubles)
    with recorded_groups(lambda: [group]) as recorder:
        for _ in range(2):
            group.unshard_parameters()
            group.wait_for_unshard()
            contribute(group, 1.0, 2.0)
            group.reshard_parameters()
            for _ in range(2):  # the gather before the second step nobody has waited for
                with torch.no_grad():
                    group.main_weight.local.mul_(0.9)
                group.sync_model_weight_from_main_weight()
                group.unshard_parameters()
            group.reshard_parameters()
            hold_in_two_places(group)
            redistribute_at_once(group.main_weight)
    return recorder.log


def hold_in_two_places(group: FsdpParameterGroup) -> None:
    """A graph with an arena holds the full parameters, then one without."""
    placed = group.acquire(place=Place(0, 4096))
    group.wait_for_unshard(full=placed)
    own = group.acquire()
    placed.sum()
    group.drop(placed)
    group.wait_for_unshard(full=own)
    own.sum()
    group.drop(own)


def redistribute_at_once(shard: DBuffer) -> None:
    """Without a lane: the results are compute's."""
    full = shard.redistribute([Replicate()])
    full.local.mul_(2.0)
    partial = full.redistribute([Partial("avg")])
    partial.redistribute([Replicate()]).local.mul_(2.0)
    partial.local.mul_(0.5)
    partial.redistribute([Shard(0)], shard)
    shard.local.mul_(0.5)
