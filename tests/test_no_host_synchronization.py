"""The runtime orders streams by events: no call in it makes the host wait for a device.

Read from the sources. A call is by name: ``x.item()`` waits on a CUDA tensor, whatever ``x`` is
called. What is allowed is listed with the reason; a line of the list that fits nothing is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *sorted((ROOT / "runtime").glob("*.py")),
    ROOT / "compile_fsdp" / "eager.py",
    ROOT / "compile_fsdp" / "context.py",
    ROOT / "compile_fsdp" / "module.py",
)

# Each waits for a device, or hands memory over in a way that delays its reuse.
WAITING = {
    "synchronize",
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "is_nonzero",
    "record_stream",
    "monitored_barrier",
    "barrier",
}

ORDERS_STREAMS = "Lane.synchronize: the current stream waits, on CUDA by an event"
ALLOWED = {
    ("context.py", "self.lanes.gather.synchronize"): ORDERS_STREAMS,
    ("context.py", "self.lanes.reduce_inner.synchronize"): ORDERS_STREAMS,
    ("context.py", "self.lanes.reduce_outer.synchronize"): ORDERS_STREAMS,
    ("context.py", "lane.synchronize"): ORDERS_STREAMS,
    ("dtensor.py", "lane.synchronize"): ORDERS_STREAMS,
    ("gradient_hooks.py", "lane.synchronize"): ORDERS_STREAMS,
    ("main_gradient.py", "lane.synchronize"): ORDERS_STREAMS,
    ("redistribute.py", "own_lane.synchronize"): ORDERS_STREAMS,
    ("symmetric_memory.py", "failed.item"): "while sharding: ranks agree on what they can",
    ("torch_internals.py", "mesh.mesh.flatten().tolist"): "a mesh's ranks are on the host",
}


def waiting_calls(path: Path) -> Iterator[tuple[str, int]]:
    """Calls in ``path`` that make the host wait, as written, and their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in WAITING:
                yield ast.unparse(node.func), node.lineno


def test_the_host_never_waits_for_a_device() -> None:
    found = {
        (path.name, call): f"{path.relative_to(ROOT)}:{line}: {call}()"
        for path in SOURCES
        for call, line in waiting_calls(path)
    }
    waits = [where for key, where in found.items() if key not in ALLOWED]
    assert not waits, "order streams by events (runtime/streams.py) instead:\n" + "\n".join(waits)
    unused = [key for key in ALLOWED if key not in found]
    assert not unused, f"nothing does this any more: {unused}"


@pytest.mark.parametrize("call", sorted(WAITING))
def test_each_such_call_is_found(call: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(f"def step(x):\n    return [x.grad.{call}()]\n")
    assert list(waiting_calls(path)) == [(f"x.grad.{call}", 2)]
