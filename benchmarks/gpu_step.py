"""A training step of compile_fsdp beside plain torch.compile, DDP and FSDP2, in one run.

    python3 benchmarks/gpu_step.py                               one GPU
    torchrun --nproc-per-node=8 benchmarks/gpu_step.py           any number of them
    python3 benchmarks/gpu_step.py --device cpu                  tiny, shows that the script works

A pre-norm transformer (MLP ratio 4), bf16 compute with fp32 main weights, AdamW. All candidates are
built first; then a step of each, in turn, again and again, so that whatever else the machine does
meets all of them alike. Ratios are medians over the rounds of the ratio within a round. A step is
forward, backward, optimizer step and zero_grad, until the device is through.

    tokens/s   of one rank
    MFU        model FLOPs utilisation: (6 N + 12 L width length) FLOPs a token, N the parameters
               without the embedding, L the blocks (Chowdhery et al., PaLM, 2022, appendix B), over
               the dense peak of the device (compile_fsdp/passes/hardware.py, or --peak-tflops)
    peak       most bytes that the allocator has had in use during a step: the candidate's own state
               and whatever the step adds to it

What cannot run says why and has no numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:
    # A script finds its folder on the path; its packages, which need not be installed, lie above.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu_candidates import CANDIDATES, DTYPES, FSDP2, PLAIN, Job, Step
from benchmarks.workloads import Shape, Transformer
from compile_fsdp.passes.hardware import DEVICES


@dataclass
class Row:
    """What was found of one candidate.

    Attributes:
        seconds: of every counted step, the slowest rank's.
        peak: bytes.
        loss: after the last step, of rank 0.
        problem: why it could not run; then there are no numbers.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    loss: float | None = None
    problem: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Clock:
    """Waits for a device and asks its allocator; a CPU has no such allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"

    def wait(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)

    def in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_cuda else 0

    def peak_of(self, step: Step, before: int) -> int | None:
        """The most bytes in use during ``step`` that were not at the time of ``before``."""
        if not self._on_cuda:
            step()
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        self.wait()
        return torch.cuda.max_memory_allocated(self._device) - before

    def time(self, step: Step) -> float:
        self.wait()
        if dist.get_world_size() > 1:
            dist.barrier()
            self.wait()
        began = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - began


def prepare(
    job: Job, names: Sequence[str], warmup: int, clock: Clock
) -> tuple[dict[str, Row], dict[str, Step]]:
    """Build and warm up candidates: a row for each, and the steps of those that can run."""
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for name in names:
        before = clock.in_use()
        rows[name] = Row(name)
        say(f"{name}: building")
        try:
            step = CANDIDATES[name](job)
            for _ in range(warmup):
                step()
            rows[name].peak = clock.peak_of(step, before)
            steps[name] = step
        except Exception as error:  # whatever one of them raises, the others can be measured
            rows[name].problem = in_one_line(error)
            say(f"{name}: cannot run: {rows[name].problem}")
    return rows, steps


def in_one_line(error: BaseException) -> str:
    """The kind and the first line of what was raised first: compilers wrap it in their own."""
    # Dynamo's errors have the one that they wrap as an attribute and hide it as a cause.
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def measure(
    rows: Mapping[str, Row], steps: Mapping[str, Step], rounds: int, clock: Clock, device: Any
) -> None:
    """A step of each in turn, ``rounds`` times, every round beginning with another one."""
    order = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in order}
    losses: dict[str, torch.Tensor] = {}
    for number in range(rounds):
        first = number % len(order) if order else 0
        for name in order[first:] + order[:first]:

            def step(name: str = name) -> torch.Tensor:
                losses[name] = steps[name]()
                return losses[name]

            taken[name].append(clock.time(step))
    for name in order:
        slowest = torch.tensor(taken[name], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rows[name].seconds = slowest.tolist()
        rows[name].loss = losses[name].item()


def ratio(row: Row, other: Row) -> float:
    """The median over the rounds of the ratio within a round."""
    pairs = zip(row.seconds, other.seconds, strict=True)
    return statistics.median(own / theirs for own, theirs in pairs)


def flops_of_token(job: Job) -> int:
    """See the module: 6 N + 12 L width length."""
    shape = job.shape
    with torch.device("meta"):
        model = Transformer(shape, job.vocabulary)
    count = sum(each.numel() for each in model.parameters()) - model.embedding.weight.numel()
    return 6 * count + 12 * shape.blocks * shape.width * shape.length


def peak_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device is sold with, None where nobody says."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    rates = next((row[0] for known, row in DEVICES.items() if known in name), None)
    return None if rates is None else rates[str(dtype).removeprefix("torch.")]


def summary(rows: Mapping[str, Row], job: Job, peak: float | None) -> list[dict[str, Any]]:
    """The rows with what follows from them."""
    measured = {name: row for name, row in rows.items() if row.seconds}
    peers = [measured[name] for name in FSDP2 if name in measured]
    best = min(peers, key=lambda row: row.median, default=None)
    tokens = job.shape.batch * job.shape.length
    found = []
    for row in rows.values():
        line: dict[str, Any] = asdict(row)
        if row.seconds:
            line["tokens_per_second"] = tokens / row.median
            rate = flops_of_token(job) * tokens / row.median
            line["mfu"] = None if peak is None else rate / peak
            line["ratio_to_plain"] = ratio(row, measured[PLAIN]) if PLAIN in measured else None
            line["ratio_to_best_fsdp2"] = None if best is None else ratio(row, best)
        found.append(line)
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """As text."""
    head = ("", "ms/step", "tokens/s", "MFU", "peak GiB", "/ plain", "/ best FSDP2", "loss")
    texts = [head]
    for line in lines:
        if not line["seconds"]:
            texts.append((line["name"], f"cannot run: {line['problem']}", *[""] * 6))
            continue
        texts.append(
            (
                line["name"],
                f"{1e3 * statistics.median(line['seconds']):.2f}",
                f"{line['tokens_per_second']:,.0f}",
                _shown(line["mfu"], "{:.1%}"),
                "-" if line["peak"] is None else f"{line['peak'] / 2**30:.2f}",
                _shown(line["ratio_to_plain"], "{:.3f}"),
                _shown(line["ratio_to_best_fsdp2"], "{:.3f}"),
                f"{line['loss']:.4f}",
            )
        )
    columns = list(zip(*(row for row in texts if not row[1].startswith("cannot")), strict=True))
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(len(row[0]) for row in texts)
    shown = [zip(row, widths, strict=True) for row in texts]
    padded = [
        [text.rjust(width) if at else text.ljust(width) for at, (text, width) in enumerate(row)]
        for row in shown
    ]
    return ["  ".join(row).rstrip() for row in padded]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def draw(lines: Sequence[Mapping[str, Any]], title: str, path: str) -> None:
    """Write a bar chart of the median step times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [line for line in lines if line["seconds"]]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(ran) + 1.5))
    values = [1e3 * statistics.median(line["seconds"]) for line in ran]
    bars = axes.barh([line["name"] for line in ran], values)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds for a step (median)")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def say(text: str) -> None:
    """Print on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def start(device: torch.device) -> None:
    """The process group: torchrun's, or one of this process alone."""
    keywords: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keywords["device_id"] = device
    if "RANK" not in os.environ:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        keywords.update(store=store, rank=0, world_size=1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **keywords)


# Defaults by device type.
SIZES = {
    "cuda": {"width": 2048, "blocks": 8, "batch": 4, "length": 2048, "vocabulary": 8192},
    "cpu": {"width": 64, "blocks": 2, "batch": 2, "length": 16, "vocabulary": 128},
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it makes no sense.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIZES, default="cuda", help="default: cuda")
    for name, what in (
        ("width", "of the model, a multiple of 64"),
        ("blocks", "number of them, each a unit that is sharded"),
        ("batch", "sequences of a rank in a step"),
        ("length", "tokens of a sequence"),
        ("vocabulary", "tokens that there are"),
    ):
        defaults = ", ".join(f"{size[name]} on {device}" for device, size in SIZES.items())
        parser.add_argument(f"--{name}", type=_positive, help=f"{what} (default: {defaults})")
    parser.add_argument("--dtype", choices=DTYPES, help="of compute (default: bf16, fp32 on cpu)")
    parser.add_argument("--steps", type=_positive, default=20, help="counted steps of each (20)")
    parser.add_argument("--warmup", type=_positive, default=5, help="steps before (5)")
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="candidates"
    )
    parser.add_argument(
        "--inner",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="what compiles, for all candidates that are compiled (inductor)",
    )
    parser.add_argument("--foreach", action="store_true", help="AdamW foreach instead of fused")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense peak of the device, for MFU (by its name)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--png", metavar="FILE", help="draw it; needs matplotlib")
    found = parser.parse_args(given)
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU; --device cpu runs a tiny model, to try the script")
    if found.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed; leave it out, or install it")
    for name, value in SIZES[found.device].items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    if found.width % 64:
        parser.error(f"--width must be a multiple of 64, got {found.width}")
    found.dtype = found.dtype or ("bf16" if found.device == "cuda" else "fp32")
    return found


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", index) if options.device == "cuda" else torch.device("cpu")
    start(device)
    try:
        ranks = dist.get_world_size()
        job = Job(
            device,
            init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp",)),
            Shape(options.width, options.blocks, options.batch, options.length),
            options.vocabulary,
            DTYPES[options.dtype],
            options.inner,
            not options.foreach,
        )
        clock = Clock(device)
        rows, steps = prepare(job, options.only, options.warmup, clock)
        measure(rows, steps, options.steps, clock, device)
        told = options.peak_tflops
        peak = peak_rate(device, job.dtype) if told is None else told * 1e12
        lines = summary(rows, job, peak)
        if dist.get_rank() == 0:
            report(lines, options, device, ranks)
    finally:
        dist.destroy_process_group()
    return 0


def report(
    lines: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    device: torch.device,
    ranks: int,
) -> None:
    """Print, and write what was asked for."""
    on_cuda = device.type == "cuda"
    card = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    title = (
        f"{ranks} x {card}, torch {torch.__version__}, {options.dtype}, width {options.width}, "
        f"{options.blocks} blocks, batch {options.batch} x {options.length} a rank, "
        f"{options.steps} steps"
    )
    print(title)
    print("\n".join(table(lines)))
    if options.json:
        what = {
            "title": title,
            "device": card,
            "ranks": ranks,
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": vars(options),
            "candidates": list(lines),
        }
        Path(options.json).write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")
    if options.png:
        draw(lines, title, options.png)


if __name__ == "__main__":
    sys.exit(main())
