"""The command line, as a value that is checked as a whole before anything is touched."""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from lm.data import BatchShape
from lm.errors import InputError
from lm.model import ModelConfig

DESCRIPTION = """\
Train a byte-level language model, fully sharded. Alone it is one process; under torchrun it is
sharded over all of them:

    torchrun --nproc-per-node=2 examples/train_lm.py --steps 300
"""


@dataclass(frozen=True)
class Options:
    """See --help; `dtype` and `inner` are what "auto" came to."""

    data: Path | None
    out: Path
    fresh: bool
    resume: bool
    json: Path | None
    model: ModelConfig
    length: int
    batch: int
    accumulate: int
    steps: int
    warmup: int
    learning_rate: float
    weight_decay: float
    clip: float
    seed: int
    dtype: torch.dtype
    mxfp8: bool
    eager: bool
    inner: str
    checkpoint_every: int
    log_every: int
    validation_batches: int
    sample_bytes: int
    prompt: str | None

    def batch_shape(self, world_size: int) -> BatchShape:
        return BatchShape(self.batch, self.length, self.accumulate, world_size)

    @property
    def dtype_name(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}, weights in MXFP8" if self.mxfp8 else name

    def trajectory(self, world_size: int, data_digest: str) -> dict[str, object]:
        """Everything that the losses of a run follow from, apart from the model's sizes."""
        return {
            "data": data_digest,
            "length": self.length,
            "sequences a step": self.batch_shape(world_size).sequences_per_step,
            "accumulate": self.accumulate,
            "steps": self.steps,
            "warmup": self.warmup,
            "learning rate": self.learning_rate,
            "weight decay": self.weight_decay,
            "clip": self.clip,
            "seed": self.seed,
            "dtype": self.dtype_name,
        }


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and lets one process of many print the help."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")

    def print_help(self, file: object = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help()


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Options from the arguments (None: the process's own). Raises InputError."""
    values = vars(_parser().parse_args(arguments))
    model = ModelConfig(
        **{name: values.pop(name) for name in ("dim", "layers", "heads", "kv_heads")}
    )
    values["dtype"] = _dtype(values["dtype"])
    values["eager"] = values.pop("mode") == "eager"
    values["inner"] = _inner(values["inner"])
    options = Options(model=model, **values)
    _check(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("data and output").add_argument
    add("--data", type=Path, help="a file or folder (default: Python's own library sources)")
    add("--out", type=Path, default=Path("runs/lm"), help="folder for checkpoints (%(default)s)")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add("--fresh", action="store_true", help="remove the checkpoints in --out and start anew")
    add("--json", type=Path, help="write losses and measurements to this file")
    add("--checkpoint-every", type=int, default=100, metavar="N", help="steps (%(default)s)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (%(default)s)")
    add("--sample-bytes", type=int, default=240, metavar="N", help="text to make (%(default)s)")
    add("--prompt", help="text to begin the sample with")

    add = parser.add_argument_group("model").add_argument
    add("--dim", type=int, default=192, help="width (%(default)s)")
    add("--layers", type=int, default=4, help="decoder blocks (%(default)s)")
    add("--heads", type=int, default=6, help="query heads (%(default)s)")
    add("--kv-heads", type=int, default=2, help="key and value heads (%(default)s)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=300, help="optimizer steps (%(default)s)")
    add("--length", type=int, default=128, help="bytes in a sequence (%(default)s)")
    add("--batch", type=int, default=4, help="sequences a rank and microbatch (%(default)s)")
    add("--accumulate", type=int, default=1, help="microbatches a step (%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="its peak (%(default)s)")
    add("--warmup", type=int, default=20, help="steps to reach the peak (%(default)s)")
    add("--weight-decay", type=float, default=0.1, help="of matrices (%(default)s)")
    add("--clip", type=float, default=1.0, help="largest gradient norm (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and data order (%(default)s)")
    add("--validation-batches", type=int, default=8, metavar="N", help="a rank (%(default)s)")

    add = parser.add_argument_group("how it runs").add_argument
    add(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of computation; the optimizer's weights are fp32 (auto: bf16 on CUDA, else fp32)",
    )
    add("--mxfp8", action="store_true", help="linear layers compute with weights in MXFP8")
    add("--compile", dest="mode", action="store_const", const="compile", default="compile")
    add("--eager", dest="mode", action="store_const", const="eager", help="do not compile")
    add(
        "--inner",
        choices=("auto", "inductor", "aot_eager"),
        default="auto",
        help="what compiles the graphs (auto: inductor where its compiler is installed)",
    )
    return parser


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        name = "bf16" if torch.cuda.is_available() else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _inner(name: str) -> str:
    """Inductor makes C++ for a CPU, which takes a compiler and Python's headers."""
    if name != "auto":
        return name
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    has_compiler = any(compiler and shutil.which(compiler) for compiler in compilers)
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    usable = torch.cuda.is_available() or (has_compiler and has_headers)
    return "inductor" if usable else "aot_eager"


def _check(options: Options) -> None:
    model = options.model
    positive = {
        "--dim": model.dim,
        "--layers": model.layers,
        "--heads": model.heads,
        "--kv-heads": model.kv_heads,
        "--steps": options.steps,
        "--length": options.length,
        "--batch": options.batch,
        "--accumulate": options.accumulate,
        "--learning-rate": options.learning_rate,
        "--clip": options.clip,
        "--checkpoint-every": options.checkpoint_every,
        "--log-every": options.log_every,
        "--validation-batches": options.validation_batches,
    }
    for name, value in positive.items():
        if not value > 0:
            raise InputError(f"{name} {value}: must be greater than 0")
    at_least_zero = {
        "--warmup": options.warmup,
        "--weight-decay": options.weight_decay,
        "--sample-bytes": options.sample_bytes,
        "--seed": options.seed,
    }
    for name, value in at_least_zero.items():
        if not value >= 0:
            raise InputError(f"{name} {value}: must not be negative")
    if model.dim % (2 * model.heads):
        raise InputError(
            f"--dim {model.dim}: must be a multiple of twice --heads {model.heads}"
            " (a head's width is even)"
        )
    if model.heads % model.kv_heads:
        raise InputError(
            f"--heads {model.heads}: must be a multiple of --kv-heads {model.kv_heads}"
        )
    if options.resume and options.fresh:
        raise InputError("--resume and --fresh exclude each other; leave one out")
    if options.prompt == "":
        raise InputError("--prompt is empty; give at least one character, or leave it out")
