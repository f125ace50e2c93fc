"""Train a byte-level language model, fully sharded, with compiled communication.

    torchrun --nproc-per-node=2 examples/train_lm.py

The parts that concern sharding are `build`, `train_step` and `lm/checkpoints.py`; the rest is what
every training program needs. See --help.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from lm import checkpoints
from lm.checkpoints import Checkpoint
from lm.data import Corpus, load_corpus, training_batch, validation_batches
from lm.errors import InputError
from lm.generate import generate, readable
from lm.model import Decoder
from lm.options import Options, parse_options
from lm.processes import World, check_devices, join_world
from lm.progress import Progress, Report, Throughput, make_progress, peak_bytes


@dataclass
class Run:
    """A training run: what stays the same, and how far it has come."""

    world: World
    options: Options
    corpus: Corpus
    model: Decoder
    compute: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    step: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)

    @property
    def trajectory(self) -> dict[str, object]:
        return self.options.trajectory(self.world.size, self.corpus.digest)

    def last_loss(self) -> float:
        """Mean training loss of the last report's steps; NaN when there was no step to do."""
        last = [loss for _, loss in self.losses[-self.options.log_every :]]
        return sum(last) / len(last) if last else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 0, or 2 after a one-line error on the first rank."""
    world = join_world()
    code = 0
    try:
        train(world, world.collectively(lambda: parse_options(arguments)))
    except InputError as error:
        if world.rank == 0:
            print(f"train_lm: error: {error}", file=sys.stderr, flush=True)
        code = 2
    # All leave together: the launcher stops the others when one fails, and the line above must be
    # out by then. The groups go first, with the cycles of modules that hold them: a group's thread
    # that still frees a tensor while the interpreter shuts down aborts the process.
    world.barrier()
    dist.destroy_process_group()
    gc.collect()
    return code


def train(world: World, options: Options) -> None:
    """Everything between the command line and the exit. Raises InputError on all ranks alike."""
    corpus, checkpoint = world.collectively(lambda: read_inputs(options))
    world.collectively(lambda: check_same_data(world.gather(corpus.digest)))
    if options.fresh and world.rank == 0:
        checkpoints.remove_checkpoints(options.out)
    world.barrier()
    run = build(world, options, corpus)
    say = print if world.rank == 0 else (lambda *_: None)
    say(describe(run))
    if checkpoint is not None:
        found = checkpoint
        world.collectively(lambda: checkpoints.restore(found, run.model, run.optimizer))
        run.step = checkpoint.step
        say(f"resumed from {checkpoint.folder}")
        for change in checkpoints.changed_settings(checkpoint, run.trajectory):
            say(f"this run will not repeat the saved one: {change}")

    speed = train_steps(run)
    validation_loss = evaluate(run)
    say(
        f"trained to step {run.step}: train loss {run.last_loss():.3f}, validation loss"
        f" {validation_loss:.3f} ({validation_loss / math.log(2):.2f} bits a byte),"
        f" {speed.mean():,.0f} tokens/s, peak memory {peak_bytes(world.device) / 2**20:,.0f} MiB"
    )
    if options.sample_bytes:
        text = sample(run)
        say(f"--- a sample, {options.sample_bytes} bytes after the prompt ---\n{text}\n---")
    if options.json is not None and world.rank == 0:
        write_metrics(run, options.json, speed, validation_loss)


def read_inputs(options: Options) -> tuple[Corpus, Checkpoint | None]:
    """Read and check all that the user named, before anything is built or written."""
    check_devices()
    checkpoint = checkpoints.choose_checkpoint(
        options.out, options.model, resume=options.resume, fresh=options.fresh
    )
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json {options.json}: no folder {options.json.parent}; make it first")
    return load_corpus(options.data, options.length), checkpoint


def check_same_data(digests: list[str]) -> None:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise InputError(
            f"--data: the bytes on rank {different[0]} differ from those on rank 0; give every"
            " machine the same files"
        )


def build(world: World, options: Options, corpus: Corpus) -> Run:
    """The sharded, compiled model and its optimizer."""
    torch.manual_seed(options.seed)  # the same full weights everywhere, before each keeps a part
    model = Decoder(options.model).to(device=world.device, dtype=options.dtype)
    mesh = world.mesh()
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        compute_weights="mxfp8" if options.mxfp8 else None,
    )
    for block in model.blocks:
        fully_shard(block, mesh, mixed_precision_policy=policy)
    fully_shard(model, mesh, mixed_precision_policy=policy)

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
    )
    fully_shard_optimizer(optimizer)

    compute: Callable[..., Tensor] = model
    if not options.eager:
        compute = torch.compile(
            model, backend="compile_fsdp", dynamic=False, options={"inner": options.inner}
        )
    return Run(world, options, corpus, model, compute, optimizer)


def train_steps(run: Run) -> Throughput:
    """All steps that are left, with reports and checkpoints."""
    options, world = run.options, run.world
    shape = options.batch_shape(world.size)
    speed = Throughput(shape.tokens_per_step)
    pending: list[Tensor] = []
    progress = make_progress(run.step, options.steps, shown=world.rank == 0)
    with progress:
        started = time.perf_counter()
        while run.step < options.steps:
            pending.append(train_step(run))
            run.step += 1
            speed.step()
            progress.advance()
            first = len(pending) == 1 and not run.losses
            last = run.step == options.steps
            if first or last or run.step % options.log_every == 0:
                report(run, pending, speed, progress)
            if first:
                progress.note(f"first step took {time.perf_counter() - started:.1f} s")
            if last or run.step % options.checkpoint_every == 0:
                folder = checkpoints.save(
                    world,
                    options.out,
                    run.step,
                    run.model,
                    run.optimizer,
                    options.model,
                    run.trajectory,
                )
                progress.note(f"saved {folder}")
                speed.restart()
    return speed


def train_step(run: Run) -> Tensor:
    """One optimizer step over all microbatches; this rank's mean loss, a 0-D fp32 tensor."""
    options, device = run.options, run.world.device
    shape = options.batch_shape(run.world.size)
    total = torch.zeros((), device=device)
    for micro in range(options.accumulate):
        tokens, targets = training_batch(
            run.corpus, shape, seed=options.seed, step=run.step, micro=micro, rank=run.world.rank
        )
        with microbatch(run.model, is_last=micro == options.accumulate - 1):
            loss = run.compute(tokens.to(device), targets.to(device)) / options.accumulate
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(run.model.parameters(), options.clip, foreach=True)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(options, run.step)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return total


def learning_rate(options: Options, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to a tenth of it at the last step."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def report(run: Run, pending: list[Tensor], speed: Throughput, progress: Progress) -> None:
    """Show the mean over all ranks and over the steps since the last report; empties `pending`.

    The losses of several steps are averaged in one collective, and the host waits for the device
    here alone.
    """
    values = run.world.mean(torch.stack(pending)).tolist()
    first = run.step - len(values) + 1
    run.losses.extend(enumerate(values, first))
    pending.clear()
    rate = learning_rate(run.options, run.step - 1)
    peak = peak_bytes(run.world.device)
    progress.report(Report(run.step, sum(values) / len(values), rate, speed.lap(), peak))


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def evaluate(run: Run) -> float:
    """Mean validation loss over all ranks."""
    options, world = run.options, run.world
    shape = options.batch_shape(world.size)
    batches = validation_batches(
        run.corpus, shape, count=options.validation_batches, rank=world.rank
    )
    with evaluation(run.model):
        losses = [run.compute(x.to(world.device), y.to(world.device)) for x, y in batches]
        return float(world.mean(torch.stack(losses).mean()))


def sample(run: Run) -> str:
    """Text that the model goes on with; every rank takes part, and gets the same."""
    options = run.options
    if options.prompt is not None:
        prompt = options.prompt.encode()
    elif options.data is None:
        prompt = b"def "
    else:
        prompt = bytes(run.corpus.validation[:32].tolist())
    with evaluation(run.model):
        text = generate(
            run.compute,
            prompt,
            count=options.sample_bytes,
            length=options.length,
            device=run.world.device,
            seed=options.seed,
        )
    return readable(text)


def describe(run: Run) -> str:
    """What is about to run, in two lines."""
    options, world, corpus = run.options, run.world, run.corpus
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    how = "eager" if options.eager else f"compiled with {options.inner}"
    data = (len(corpus.train) + len(corpus.validation)) / 1e6
    tokens = options.batch_shape(world.size).tokens_per_step
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    return (
        f"{parameters / 1e6:.2f} M parameters sharded over {processes} on"
        f" {world.device.type}, {options.dtype_name}, {how}\n"
        f"{data:.1f} MB from {corpus.name} ({corpus.files} files), {tokens:,} tokens a step"
    )


def write_metrics(run: Run, path: Path, speed: Throughput, validation_loss: float) -> None:
    metrics = {
        "losses": [[step, loss] for step, loss in run.losses],
        "train_loss": run.last_loss() if run.losses else None,
        "validation_loss": validation_loss,
        "tokens_per_second": speed.mean(),
        "peak_bytes": peak_bytes(run.world.device),
        "world_size": run.world.size,
        "mode": "eager" if run.options.eager else run.options.inner,
        "trajectory": run.trajectory,
    }
    checkpoints.write_json(path, metrics)


if __name__ == "__main__":
    sys.exit(main())
