"""Every Python block of the README and of docs/ runs, in the order of its page.

One rank, gloo, a small model. Pages after the first go on where docs/index.md ends. What a reader
has of their own (a model, a batch) is there before; `BEFORE` has the rest, by a block's first line.
"""

from __future__ import annotations

import ast
import importlib
import re
import socket
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models import LanguageModel, language_batches

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

# As the page's own `compiled`, but nothing has to be compiled to machine code.
AOT_EAGER = """
import torch
compiled = torch.compile(model, backend="compile_fsdp", options={"inner": "aot_eager"})
"""

BEFORE = {
    "import compile_fsdp": AOT_EAGER,
    "from compile_fsdp import microbatch": AOT_EAGER,
    "whole = Placements": """
from compile_fsdp import Placements, TensorAtomic, fully_shard, fully_shard_optimizer
model = new_model()
block = model.blocks[0]
owners = {parameter: 0 for parameter in block.parameters()}
""",
}


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of Python.

    Attributes:
        place: the page and the line that the block starts at.
        code: without the indentation that it has in a list.
    """

    place: str
    code: str


def blocks(page: str) -> list[CodeBlock]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        CodeBlock(f"{page}:{text.count(chr(10), 0, found.start()) + 2}", textwrap.dedent(found[2]))
        for found in FENCE.finditer(text)
    ]


def preparation(block: CodeBlock) -> str:
    first = block.code.lstrip().split("\n", 1)[0]
    return next((code for start, code in BEFORE.items() if first.startswith(start)), "")


def execute(block: CodeBlock, names: dict[str, Any]) -> None:
    code = block.code if torch.cuda.is_available() else block.code.replace('"cuda"', '"cpu"')
    exec(preparation(block), names)
    exec(compile(code, block.place, "exec"), names)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a reader has: one process that torchrun started, a model and a batch."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    tokens, targets = language_batches(1, 2)[0]
    yield {
        "model": LanguageModel(),
        "new_model": LanguageModel,
        "tokens": tokens,
        "targets": targets,
        "batch": (tokens, targets),
    }
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_blocks_of_a_page_run(page: str, reader: dict[str, Any]) -> None:
    first = [] if page in ("README.md", "docs/index.md") else blocks("docs/index.md")
    for block in [*first, *blocks(page)]:
        execute(block, reader)
    if page == "docs/reading-a-schedule.md":
        assert Path("step.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_pages_have_blocks() -> None:
    """None is missed because of how it is fenced."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert len(blocks(page)) == len(re.findall(r"```python", text)), page
    assert len(blocks("README.md")) >= 3 and len(blocks("docs/reading-a-schedule.md")) == 3


def test_the_reference_names_what_there_is() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
        assert found is not None or importlib.import_module(name), name


def test_links_and_pictures_are_there() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not target.startswith(("http://", "https://")):
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_public_name_has_a_docstring() -> None:
    """What the reference is made of."""
    for module in ("explain", "explanation", "backend"):
        tree = ast.parse((ROOT / "compile_fsdp" / f"{module}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name}"
