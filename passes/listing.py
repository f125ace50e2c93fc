"""Print a whole graph for people: one line for each node, with shapes and the user's own lines.

    primals_1: f32[1024]
    full_root: f32[4096] = compile_fsdp.unshard(primals_1, '0//0', [])
    # model.py:38 in forward: x = self.embedding(tokens)
    embedding: f32[2, 5, 64] = aten.embedding(embedding_weight, primals_2)

Much cheaper than ``GraphModule.print_readable``, so it can be made of every graph that is
compiled: about ten microseconds a node.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.*)')

# What Dynamo calls the rest of a function after a graph break.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

# Reading a parameter is a line of ours; the user's is the one that led there.
_OWN_FILES = str(Path(__file__).parent.parent)

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def listing(graph: Graph) -> str:
    """Every node of ``graph`` as text; lines that start with ``#`` are the user's code."""
    lines = []
    source = ""
    for node in graph.nodes:
        origin = user_line(node)
        if origin and origin != source:
            lines.append(f"# {origin}")
            source = origin
        lines.append(_line(node))
    return "\n".join(lines)


def user_line(node: Node) -> str:
    """Where the user's program computes ``node``: ``model.py:38 in forward: x = ...``, or
    nothing."""
    frames = [
        frame
        for frame in _FRAME.findall(node.meta.get("stack_trace") or "")
        if not frame[0].startswith(_OWN_FILES)
    ]
    if not frames:
        return ""
    path, line, function, code = frames[-1]
    function = _RESUMED.sub(r"\1", function)
    return f"{path.rsplit('/', 1)[-1]}:{line} in {function}: {code}"


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = _value(node.meta.get("val"))
    name = f"{node.name}: {value}" if value else node.name
    if node.op == "placeholder":
        return name
    arguments = [repr(argument) for argument in node.args]
    arguments += [f"{key}={value!r}" for key, value in node.kwargs.items()]
    return f"{name} = {_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    name = str(getattr(target, "__name__", target)).removesuffix(".default")
    return f"{target.namespace}.{name}" if hasattr(target, "namespace") else name


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
