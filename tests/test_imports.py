"""The layers and what they may import: read from the sources, and from a fresh interpreter.

compile_fsdp  ->  compile_fsdp.passes  ->  compile_fsdp.runtime  ->  torch
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "compile_fsdp"

# Lower layers first: a module may import from its own layer and from those before it.
LAYERS = (f"{PACKAGE}.runtime", f"{PACKAGE}.passes", PACKAGE)
NOT_IN_RUNTIME = ("torch.fx", "torch._dynamo", "torch._inductor", "torch._functorch", "functorch")


@dataclass(frozen=True)
class Source:
    """A Python file and the name that it is imported by."""

    path: Path
    module: str
    is_package: bool

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}"


def library_sources() -> list[Source]:
    folders = {
        ROOT / "compile_fsdp": PACKAGE,
        ROOT / "compile_fsdp" / "report": f"{PACKAGE}.report",
        ROOT / "compile_fsdp" / "planning": f"{PACKAGE}.planning",
        ROOT / "compile_fsdp" / "cli": f"{PACKAGE}.cli",
        ROOT / "passes": f"{PACKAGE}.passes",
        ROOT / "runtime": f"{PACKAGE}.runtime",
    }
    sources = []
    for folder, package in folders.items():
        for path in sorted(folder.glob("*.py")):
            is_package = path.stem == "__init__"
            module = package if is_package else f"{package}.{path.stem}"
            sources.append(Source(path, module, is_package))
    return sources


def imported_names(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every dotted name that an import statement anywhere in the file asks for."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(source, node)
            for alias in node.names:
                yield node, f"{base}.{alias.name}"


def absolute_base(source: Source, node: ast.ImportFrom) -> str:
    """The module part of `from ... import`, relative dots resolved."""
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    kept = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_of(name: str) -> int:
    """Position in LAYERS; the most deeply nested package that holds the name decides."""
    return next(rank for rank, package in enumerate(LAYERS) if is_within(name, package))


def used_names(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Imported names, and attribute chains that start at an imported name (`dist._x`)."""
    names = list(imported_names(source))
    yield from names
    bound: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name
                bound[alias.asname or whole.split(".")[0]] = (
                    whole if alias.asname else whole.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{absolute_base(source, node)}.{alias.name}"
    for node in ast.walk(source.tree):
        chain = attribute_chain(node)
        if chain and chain[0] in bound:
            yield node, ".".join([bound[chain[0]], *chain[1:]])


def attribute_chain(node: ast.AST) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; empty for anything that is not a plain chain of two or more."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(parts)]


def is_private_torch(name: str) -> bool:
    """Operators are exempt: their names (`aten._to_copy`) are the dispatcher's, not a module's."""
    root, *rest = name.split(".")
    if root not in ("torch", "functorch") or rest[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_the_sources_are_found() -> None:
    modules = {source.module for source in library_sources()}
    assert {PACKAGE, f"{PACKAGE}.passes", f"{PACKAGE}.runtime"} <= modules, (
        "an __init__.py is missing: packages.find would not see the package"
    )


def test_imports_point_downwards_only() -> None:
    upward = [
        f"{source.at(node)}: {source.module} imports {name}"
        for source in library_sources()
        for node, name in imported_names(source)
        if is_within(name, PACKAGE) and layer_of(name) > layer_of(source.module)
    ]
    assert not upward, "imports that point upwards:\n" + "\n".join(upward)


def test_the_folders_are_imported_by_their_package_names_only() -> None:
    top_level = [
        f"{source.at(node)}: import {name}"
        for source in library_sources()
        for node, name in imported_names(source)
        if name.split(".")[0] in ("passes", "runtime", "tests", "examples")
    ]
    assert not top_level, "\n".join(top_level)


def test_the_runtime_knows_neither_fx_nor_dynamo() -> None:
    found = [
        f"{source.at(node)}: {name}"
        for source in library_sources()
        if layer_of(source.module) == 0
        for node, name in used_names(source)
        if any(is_within(name, banned) for banned in NOT_IN_RUNTIME)
    ]
    assert not found, "compile_fsdp.runtime must not use the compiler:\n" + "\n".join(found)


def test_private_torch_names_live_in_torch_internals() -> None:
    found = sorted(
        {
            f"{source.at(node)}: {name}"
            for source in library_sources()
            if source.path.name != "torch_internals.py"
            for node, name in used_names(source)
            if is_private_torch(name)
        }
    )
    assert not found, "move these to a torch_internals.py:\n" + "\n".join(found)


@pytest.mark.compat
def test_every_private_torch_name_is_there() -> None:
    """One line for each name that this torch does not have, and where we use it."""
    used = {
        (source.at(node), name)
        for source in library_sources()
        if source.path.name == "torch_internals.py"
        for node, name in used_names(source)
        if is_private_torch(name) and source.at(node) not in may_be_missing(source)
    }
    assert len(used) > 20
    missing = sorted(f"{where}: {name}" for where, name in used if not is_there(name))
    assert not missing, (
        f"private names that torch {torch.__version__} does not have; the comment at each place "
        "says what it is needed for:\n" + "\n".join(missing)
    )


def may_be_missing(source: Source) -> set[str]:
    """The places at which an ImportError is expected: some releases lack what is imported."""
    tries = [node for node in ast.walk(source.tree) if isinstance(node, ast.Try)]
    return {
        source.at(statement)
        for each in tries
        if any(ast.unparse(handler.type or each) == "ImportError" for handler in each.handlers)
        for statement in each.body
    }


def is_there(name: str) -> bool:
    """Whether ``name`` is a module or an attribute of one; of what only a running compilation sets
    up (``V.graph``), whether the place for it is."""
    parts = name.partition(".V.")[0].split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[count:])
    return False


def test_sources_are_ascii() -> None:
    folders = ("compile_fsdp", "passes", "runtime", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if not line.isascii()
    ]
    assert not found, "\n".join(found)


def run_python(code: str) -> str:
    """Standard output of the code in a fresh interpreter that sees no CUDA device."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_pulls_in_neither_inductor_nor_triton() -> None:
    out = run_python(
        "import sys, torch; before = set(sys.modules); import compile_fsdp;"
        "print(*sorted(set(sys.modules) - before))"
    )
    added = [
        name
        for name in out.split()
        if any(is_within(name, heavy) for heavy in ("torch._inductor", "triton"))
    ]
    assert not added, f"import compile_fsdp loads {added}"


def test_import_without_cuda_and_nccl() -> None:
    """A torch that was built with neither has no ProcessGroupNCCL and says so when asked."""
    out = run_python(
        """
import torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
torch.cuda.is_available = lambda: False
dist.is_nccl_available = c10d.is_nccl_available = lambda: False
for module in (dist, c10d):
    vars(module).pop("ProcessGroupNCCL", None)
import compile_fsdp, compile_fsdp.backend
print(torch.cuda.is_initialized(), compile_fsdp.fully_shard.__name__)
"""
    )
    assert out.split() == ["False", "fully_shard"]


def test_dynamo_finds_the_backend() -> None:
    out = run_python(
        "import torch, compile_fsdp; print('compile_fsdp' in torch._dynamo.list_backends())"
    )
    assert out.strip() == "True", "the entry point is missing: was the package installed?"


def test_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    """Built from a copy: a build writes beside the sources."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("compile_fsdp", "passes", "runtime"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps"]
    command += ["--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {PACKAGE}
    expected = {
        f"{source.module.replace('.', '/')}{'/__init__' if source.is_package else ''}.py"
        for source in library_sources()
    }
    report = {f"compile_fsdp/report/{name}" for name in ("page.css", "page.js", "picture.css")}
    assert expected | report | {"compile_fsdp/py.typed"} <= names
