"""What a backend raises is raised again with the collective, the group, the ranks and the place.

That a rank which dies or hangs is noticed is in ``test_agreement.py``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import fully_shard
from compile_fsdp.runtime import announcing, collectives
from compile_fsdp.runtime.agreement import Step
from compile_fsdp.runtime.announcing import LOG_VARIABLE, in_agreement
from compile_fsdp.runtime.communication_errors import CommunicationError
from compile_fsdp.runtime.streams import Waitable, make_lane
from tests.distributed import distributed
from tests.training import cpu_mesh, drive

CUDA = torch.device("cuda", 0)
STEP = Step("all_gather", "'blocks.0'", 8, torch.float32)

pytestmark = pytest.mark.compat


class FailingWork:
    """What a work of an aborted communicator does."""

    def __init__(self, text: str) -> None:
        self._text = text

    def wait(self) -> None:
        raise RuntimeError(self._text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "NCCL communicator was aborted on rank 1.",
            "aborted: by NCCL's watchdog after a time-out",
        ),
        ("Invalid process group specified", "was destroyed while the model was in use"),
        ("NCCL error: unhandled cuda error, NCCL version 2.27", "NCCL_DEBUG=WARN in the env"),
        ("Connection closed by peer [127.0.0.1]:1", "one of these ranks has ended; its own output"),
    ],
)
@distributed(2)
def test_a_stream_that_waits_for_a_failed_communicator(text: str, cause: str) -> None:
    """On CUDA nobody waits on the host: the error comes when the work is ordered."""
    work = in_agreement(lambda: FailingWork(text), STEP, dist.group.WORLD, CUDA)()
    assert work is not None
    with pytest.raises(CommunicationError) as raised:
        work.wait()
    message = str(raised.value)
    assert "could not complete the all_gather of 'blocks.0' (8 x float32)" in message
    assert "with ranks 0, 1 in process group 'default_pg'" in message
    assert cause in message
    assert str(raised.value.__cause__) == text
    # Whatever comes next on these ranks says the same.
    with pytest.raises(CommunicationError, match="could not complete the all_gather"):
        in_agreement(lambda: None, STEP, dist.group.WORLD, CUDA)()


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@distributed(2)
def test_a_collective_that_cannot_start(error: type[Exception]) -> None:
    def refuse() -> Waitable | None:
        raise error("NCCL communicator was aborted on rank 0.")

    reason = r"rank \d could not start the all_gather of 'blocks.0' .* with ranks 0, 1 in .*aborted"
    with pytest.raises(CommunicationError, match=reason) as raised:
        in_agreement(refuse, STEP, dist.group.WORLD, CUDA)()
    assert type(raised.value.__cause__) is error


def small_model() -> nn.Module:
    sharded = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    fully_shard(sharded[0], cpu_mesh())
    fully_shard(sharded, cpu_mesh())
    return sharded


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_failure_in_a_step_names_the_group_and_in_a_graph_the_operator(driver: str) -> None:
    call = drive(small_model(), driver)
    x = torch.randn(2, 4)
    call(x).sum().backward()
    original = collectives._all_to_all_single

    def fail(*_: Any, **__: Any) -> Waitable | None:
        raise RuntimeError("the network is gone")

    loss = call(x).sum()
    collectives._all_to_all_single = fail
    try:
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
    finally:
        collectives._all_to_all_single = original
    message = str(raised.value)
    assert isinstance(raised.value, CommunicationError)
    assert "could not start the reduce_scatter of gradients of 'root': all 2 (" in message
    assert "with ranks 0, 1 in process group" in message
    assert "the network is gone" in str(raised.value.__cause__)
    place = "noticed at compile_fsdp.reduce_inner of '"
    assert (place in message) == (driver != "eager"), message


@distributed(2)
def test_each_collective_can_be_logged_with_the_number_that_the_backend_gives_it() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("compile_fsdp.collectives")
    log.addHandler(handler)
    model = small_model()
    try:
        model(torch.randn(2, 4)).sum().backward()
        assert lines == []
        log.setLevel(logging.DEBUG)
        model(torch.randn(2, 4)).sum().backward()
    finally:
        log.setLevel(logging.WARNING)
        log.removeHandler(handler)
    description = cpu_mesh().get_group().group_desc
    assert all(line.startswith(f"process group '{description}', collective ") for line in lines)
    numbers = [int(line.split("collective ")[1].split(":")[0]) for line in lines]
    assert numbers == sorted(numbers)
    assert ": all_gather of 'root' (" in lines[0], lines
    assert any("reduce_scatter of gradients of '0': all 2 (" in line for line in lines)


@pytest.mark.parametrize(("value", "level"), [("0", "WARNING"), ("1", "DEBUG")])
def test_the_log_is_switched_on_by_its_own_variable(value: str, level: str) -> None:
    script = "import logging, compile_fsdp; log = logging.getLogger('compile_fsdp.collectives');"
    script += "print(logging.getLevelName(log.level), len(log.handlers))"
    environment = {**os.environ, LOG_VARIABLE: value, "TORCH_LOGS": "+compile_fsdp"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [level, value], done.stderr


@distributed(2)
def test_a_process_gives_gloo_a_moment_at_exit() -> None:
    """Unless it has destroyed its process groups, which waits for gloo's threads."""
    announcing._expect_exit.cache_clear()
    with mock.patch.object(announcing.atexit, "register") as register:
        lane, output = make_lane(torch.device("cpu"), "gather"), torch.empty(4)
        for _ in range(2):
            collectives.all_gather(lane, output, torch.ones(2), dist.group.WORLD)
            lane.synchronize()
        ((leave,), _), *others = register.call_args_list
    announcing._expect_exit.cache_clear()
    assert not others
    with mock.patch.object(announcing.time, "sleep") as sleep:
        leave()
        assert sleep.call_count == 1
        dist.destroy_process_group()
        leave()
        assert sleep.call_count == 1
