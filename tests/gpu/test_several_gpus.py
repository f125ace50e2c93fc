"""Two ranks with a device each: what one GPU cannot show. On a CPU, two processes with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.gpu.support import ON_CUDA, ROUNDING, SLOW, drive, floats, shard, stack
from tests.gpu.traces import beside_compute, trace_of
from tests.training import adamw, assert_close, train, train_reference

RANKS = 2

pytestmark = pytest.mark.skipif(
    ON_CUDA and torch.cuda.device_count() < RANKS,
    reason=f"needs {RANKS} GPUs, one for each rank: NCCL refuses two ranks on one",
)


def on_each_rank(rank: int, port: int, driver: str, folder: str) -> None:
    """What each of `RANKS` processes does."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    device = torch.device("cuda", rank) if ON_CUDA else torch.device("cpu")
    bound = {"device_id": device} if ON_CUDA else {}
    if ON_CUDA:
        torch.cuda.set_device(device)
    name = "nccl" if ON_CUDA else "gloo"
    dist.init_process_group(name, store=store, rank=rank, world_size=RANKS, **bound)
    try:
        batches = [tuple(part.to(device) for part in batch) for batch in floats(3)]
        model = shard(stack().to(device))
        run = train(model, batches, call=drive(model, driver))
        assert_close(run, train_reference(stack().to(device), batches), **ROUNDING)
        if ON_CUDA:
            _check_overlap(driver, device, Path(folder, f"{rank}.json"))
    finally:
        dist.destroy_process_group()


def _check_overlap(driver: str, device: torch.device, path: Path) -> None:
    model = shard(stack(width=256, blocks=4, cycles=SLOW // 4).to(device))
    call = drive(model, driver, **({} if driver == "eager" else {"prefetch": 1}))
    optimizer = adamw(model)
    (batch,) = floats(1, width=256)
    batch = tuple(part.to(device) for part in batch)

    def step() -> None:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    for what in ("allgather", "reducescatter"):
        found, beside = beside_compute(trace_of(step, path), what)
        assert found >= 4 and beside >= found - 3, f"{beside} of {found} {what}s overlap compute"


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_two_ranks_train_as_one_and_overlap(driver: str, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(on_each_rank, (store.port, driver, str(tmp_path)), nprocs=RANKS)
