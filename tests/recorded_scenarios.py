"""What is recorded to see that no stream races: trainings in every mode, and interruptions.

A scenario shards a model, compiles it where its driver is a compiler, runs once so that nothing is
compiled while it is recorded, and then runs again under recording lanes. What it does in a run is a
function of a `Training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from compile_fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    microbatch,
    zero_missing_gradients,
)
from compile_fsdp.runtime.happens_before import Record
from compile_fsdp.runtime.recording import recorded_step
from tests.models import LanguageModel, language_batches
from tests.modes import ONE_AXIS, OTHER_COMBINATIONS, TWO_AXES, Mode, mesh_of, shard_model
from tests.test_activation_checkpointing import Checkpointed, Reentrant, Selective
from tests.test_mishaps import FragileModel
from tests.training import drive, local_batch


class Training:
    """A sharded model, how to call it, and its optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        self.model = scenario.model()
        mesh = mesh_of(scenario.shape)
        placements = scenario.mode.on(mesh, torch.distributed.tensor.Shard(0))
        shard_model(self.model, placements, mesh, **scenario.sharding)
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


def freezing(training: Training) -> None:
    """Parameters are frozen and made trainable again."""
    block = training.model.blocks[0]
    for flag in (False, True):
        for parameter in block.parameters():
            parameter.requires_grad_(flag)
        two_steps(training)


def modes() -> dict[str, Mode]:
    """Rows of the placement table by a name for the axes they need."""
    named = {mode.name: mode for mode in ONE_AXIS}
    named |= {f"{mode.name} on two axes": mode for mode in TWO_AXES[:4]}
    named |= {mode.name: mode for mode in TWO_AXES[4:]}
    return named | {mode.placements: mode for mode in OTHER_COMBINATIONS}


@dataclass(frozen=True)
class Scenario:
    """See the module. ``placements`` is a key of `modes`."""

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


def _scenarios() -> dict[str, Scenario]:
    bf16 = {"mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float64)}
    doubles = {
        "mixed_precision_policy": MixedPrecisionPolicy(
            main_params_dtype=torch.float64, main_grads_dtype=torch.float64
        )
    }
    both = [
        scenario
        for driver in ("eager", "aot_eager")
        for scenario in (
            Scenario(driver=driver, placements="ZeRO-1", what=microbatches),
            Scenario(driver=driver, placements="ZeRO-2", what=microbatches),
            Scenario(driver=driver, what=microbatches),
            Scenario(driver=driver, placements="HSDP", shape=(2, 2), what=microbatches),
            Scenario(driver=driver, placements="HFSDP", shape=(2, 2), what=microbatches),
            Scenario(driver=driver, what=interrupted, model=FragileModel),
            Scenario(driver=driver, what=evaluating),
            Scenario(driver=driver, sharding=doubles, note="main weights in fp64"),
            Scenario(driver=driver, model=Checkpointed, note="checkpointed"),
            Scenario(
                driver=driver,
                what=microbatches,
                placements="HFSDP",
                shape=(2, 2),
                sharding={"unify_communication_stream": True},
                note="one lane",
            ),
        )
    ]
    return {
        scenario.name: scenario
        for scenario in (
            *both,
            Scenario(shape=(1,), what=microbatches),
            Scenario(placements="DDP", what=microbatches),
            Scenario(placements="ZeRO-3 on two axes", shape=(2, 2)),
            Scenario(placements="ZeRO-2 on two axes", shape=(2, 2), what=microbatches),
            Scenario(placements="HFSDP", shape=(2, 1), what=microbatches),
            Scenario(placements="HFSDP", shape=(2, 2), what=kept_over_microbatches),
            Scenario(placements="HFSDP", shape=(2, 2), what=interrupted_microbatches,
                     model=FragileModel),
            Scenario(placements="HFSDP", shape=(2, 2), what=gradients_replaced),
            Scenario(placements="ZeRO-1", what=reading),
            Scenario(placements="ZeRO-1", what=missing),
            Scenario(what=clipping, foreach=True, note="foreach"),
            Scenario(what=gradients_kept),
            Scenario(what=gradients_replaced),
            Scenario(what=hooked),
            Scenario(what=penalised),
            Scenario(what=reading, sharding=bf16, note="gradients in fp64"),
            Scenario(what=writing, announced=False, note="unannounced"),
            Scenario(what=missing),
            Scenario(what=freezing),
            Scenario(model=Reentrant, note="reentrant"),
            Scenario(model=Selective, note="selective"),
            Scenario(driver="aot_eager", compiling={"merge_below": "1MiB"}, note="merged"),
            Scenario(driver="aot_eager", compiling={"memory_budget": "unlimited"}, note="kept"),
            Scenario(driver="aot_eager", what=writing, compiling={"memory_budget": "unlimited"},
                     note="kept"),
            Scenario(driver="aot_eager", compiling={"reshard_after_forward": True},
                     note="not kept"),
            Scenario(driver="aot_eager", what=gradients_kept),
            Scenario(sharding={"unify_communication_stream": True}, note="one lane"),
            *(
                Scenario(driver="aot_eager", compiling={"arena": True, **more}, note="arena", **how)
                for more, how in (
                    ({"merge_below": "1MiB"}, {"what": microbatches}),
                    ({}, {"what": evaluating}),
                    ({}, {"what": interrupted, "model": FragileModel}),
                    ({}, {"what": microbatches, "placements": "HFSDP", "shape": (2, 2)}),
                    ({}, {"what": kept_over_microbatches, "placements": "HSDP", "shape": (2, 2)}),
                )
            ),
        )
    }  # fmt: skip


SCENARIOS = _scenarios()


def log_of(name: str) -> list[Record]:
    """What scenario ``name`` asks of this rank's streams. Every rank of its mesh calls this."""
    scenario = SCENARIOS[name]
    training = Training(scenario)
    scenario.what(training)
    with recorded_step(training.model) as recorder:
        scenario.what(training)
    return recorder.log
