"""What the command line accepts."""

from __future__ import annotations

import argparse
from typing import NoReturn

from compile_fsdp.passes.hardware import DEVICES, LINKS

from ..planning.predict import OPTIMIZER_STATES
from ..planning.sharding import MODES

TARGET = """\
TARGET is MODULE:FUNCTION, a function that returns (model, args) or (model, args, kwargs), or
hf:CONFIG.json, a configuration file of a transformers model (no weights are read). A function with
a parameter named `mesh` is given the device mesh and may call fully_shard itself; otherwise the
elements of the largest nn.ModuleList and the root are sharded."""

PLAN = f"""\
Plan training on a cluster that is not there: no GPU, no other rank, no memory for weights.

{TARGET}

The mesh is dp_outer x dp_inner: --mesh 64x8 is 64 nodes of 8 ranks, --mesh 8x64 is 8 replicas of
64 ranks, which are 8 nodes of 8 (--ranks-per-node). Modes on one axis (ddp, zero1, zero2, zero3)
take all ranks together."""

PLAN_EXAMPLES = """\
examples:
  python -m compile_fsdp plan hf:examples/configs/llama3_8b.json --mesh 8x8 --device h100
  python -m compile_fsdp plan hf:examples/configs/llama3_70b.json --mesh 64x8 --mode zero3 \\
      --activation-checkpointing --budget 70GiB --html plan.html
  python -m compile_fsdp plan my_package.model:build --mesh 4x8 --mode hsdp --json plan.json
  python -m compile_fsdp plan hf:examples/configs/llama3_8b.json --mesh 2x8 --search
"""

EXPLAIN = f"""\
Explain the communication of a compiled step here and now: on the CPU, with one rank or, with
--mesh, with ranks that are not there.

{TARGET}"""

EXPLAIN_EXAMPLES = """\
examples:
  python -m compile_fsdp explain my_package.model:build
  python -m compile_fsdp explain my_package.model:build --mesh 2 --html step.html
"""


class Parser(argparse.ArgumentParser):
    """One line on stderr and exit status 2 for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    top = Parser(
        prog="python -m compile_fsdp",
        description="Look at the communication of sharded training before you train.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{plan,explain}")
    for name, text, examples, about in (
        ("plan", PLAN, PLAN_EXAMPLES, "bytes, times and options on a cluster that is not there"),
        ("explain", EXPLAIN, EXPLAIN_EXAMPLES, "what is compiled here and now, step by step"),
    ):
        command = commands.add_parser(
            name,
            help=about,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _shared(command, required=name == "plan")
        if name == "plan":
            _plan(command)
        else:
            command.add_argument(
                "--graphs",
                choices=("none", "communication", "whole"),
                default="none",
                help="print the graphs themselves (default: none)",
            )
    return top


def _shared(command: argparse.ArgumentParser, *, required: bool) -> None:
    add = command.add_argument
    add("target", metavar="TARGET", help="MODULE:FUNCTION or hf:CONFIG.json")
    add(
        "--mesh",
        required=required,
        metavar="OUTERxINNER",
        help="ranks on dp_outer x dp_inner, such as 64x8; or one number of ranks",
    )
    add("--ranks-per-node", type=int, metavar="N", help="ranks that share a node (default: 8)")
    add(
        "--mode",
        choices=tuple(MODES),
        help="what is sharded (default: hsdp where dp_outer has several ranks, else zero3)",
    )
    add(
        "--device",
        metavar="NAME",
        default="h100" if required else "cpu",
        help=f"device of the cost model: {', '.join(DEVICES)} (default: %(default)s)",
    )
    add(
        "--interconnect",
        metavar="NAME",
        help=f"network between nodes: {', '.join(LINKS)} (default: the device's usual one)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="compute dtype (default: as TARGET makes it; bf16 for hf:)",
    )
    add("--batch", type=int, default=1, metavar="N", help="sequences of a rank (hf: only)")
    add(
        "--seq",
        type=int,
        metavar="N",
        help="tokens of a sequence (hf: only; default: 8192, or what the model can do)",
    )
    add(
        "--inner",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="the compiler whose graphs are planned (default: inductor)",
    )
    add("--activation-checkpointing", action="store_true", help="recompute each block in backward")
    add("--prefetch", metavar="N", default="auto", help="groups gathered ahead (default: auto)")
    add("--json", metavar="FILE", help="write all of it as JSON")
    add("--html", metavar="FILE", help="write a page with the lanes over time and the memory")
    add("--debug", action="store_true", help="on bad input, show where it was found as well")


def _plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--budget",
        metavar="BYTES",
        help="what a rank may hold, all in all, such as 70GiB: groups are kept unsharded between "
        "forward and backward as far as it goes",
    )
    add(
        "--optimizer",
        choices=tuple(OPTIMIZER_STATES),
        default="adamw",
        help="whose state counts (default: adamw)",
    )
    add(
        "--compute-share",
        type=float,
        metavar="X",
        help="what part of the device's peak rate matrix products reach (default: 0.5)",
    )
    add(
        "--search",
        action="store_true",
        help="try modes, meshes, budgets and prefetching on as many ranks, and rank them",
    )
    add("--top", type=int, default=10, metavar="N", help="lines of a search (default: 10)")
