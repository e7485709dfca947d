"""Import rules beyond the layers that import-linter checks, and the cost of importing the packages."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import distillkit

ROOT = Path(__file__).parents[1]
PACKAGES = ("distillkit", "attacks", "fl")
HEAVY = ("torchvision", "opacus", "kornia", "sklearn", "matplotlib", "lpips", "flwr", "scipy", "sympy", "torch._dynamo")
LATE = ("multiprocessing.", "concurrent.futures.process", "distillkit.study", "fl.addons", "fl.deploy", "attacks.audit")
"""Beginnings of modules that `import distillkit, fl, attacks` does not load unless `import torch` does."""


class Import(NamedTuple):
    """Import of `name` from `module` (None: of the module itself) in the module `by`."""

    by: str
    module: str
    name: str | None


@cache
def modules() -> dict[str, Path]:
    """Return the path of every module of the packages and the examples, by dotted name."""
    found = {}
    for path in (path for top in (*PACKAGES, "examples") for path in sorted((ROOT / top).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def read(module: str) -> list[ast.Import | ast.ImportFrom]:
    """Return all imports of a module, at any level."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(by: str) -> Iterator[Import]:
    """Yield a module's imports of our packages."""
    for node in read(by):
        if isinstance(node, ast.Import):
            found = [Import(by, alias.name, None) for alias in node.names]
        else:
            assert not node.level, f"{by} imports by a relative name"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [
                Import(by, full, None) if full in modules() else Import(by, str(node.module), alias.name)
                for full, alias in zip(whole, node.names, strict=True)
            ]
        yield from (one for one in found if one.module.split(".")[0] in PACKAGES)


def ours() -> list[str]:
    """Return the modules of the packages."""
    return [name for name in modules() if name.split(".")[0] in PACKAGES]


@cache
def everything() -> list[Import]:
    return [one for by in modules() for one in imports(by)]


def component(module: str) -> str:
    """Return the package or flat module directly below the top package that a module belongs to."""
    return ".".join(module.split(".")[:2])


def private(found: list[Import]) -> list[Import]:
    """Return the imports from another component of names with an underscore, and in the examples of private modules."""
    across = [one for one in found if component(one.by) != component(one.module)]
    hidden = [one for one in across if one.by.split(".")[0] == "examples" and "._" in one.module]
    return hidden + [one for one in across if str(one.name).startswith("_")]


def test_components_import_no_private_names_of_others() -> None:
    assert private(everything()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_no_import_cycles(package: str) -> None:
    edges: dict[str, set[str]] = {}
    for one in everything():
        if one.by.split(".")[0] == package and one.by != package:
            edges.setdefault(one.by, set()).add(one.module)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(edges.get(module, ())):
                walk(other, (*path, module))
            done.add(module)

    for module in sorted(edges):
        walk(module, ())
    assert len(done) > 5


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert distillkit.__version__ == project["version"]


def test_imports_are_late_and_nothing_heavy_is_imported() -> None:
    """In a new process: what each of the packages and all their modules import, and when."""
    assert {"distillkit.networks", "fl.addons", "attacks.membership"} <= set(ours())
    code = (
        "import importlib, sys, torch\n"
        "before = set(sys.modules)\n"
        "import distillkit\n"
        "assert not {'distillkit.condense', 'distillkit.privacy', 'distillkit.study'} & set(sys.modules)\n"
        "import fl, attacks\n"
        f"assert not (late := [m for m in set(sys.modules) - before if m.startswith({(*HEAVY, *LATE)!r})]), late\n"
        f"for name in {ours()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    assert not (heavy := [m for m in {HEAVY!r} if m in sys.modules]), (name, heavy)\n"
        "assert distillkit.condense.distribution_matching and distillkit.plot.grid\n"
        "assert fl.study.Federated and attacks.audit.__name__ == 'attacks.audit'\n"
        "for package in (fl, attacks, fl.history):\n"
        "    assert all(getattr(package, name) for name in package.__all__)\n"
        "assert fl.FedDM is fl.methods.FedDM and fl.history.accuracy_best([]) is None"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, encoding="utf-8")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_attributes_are_refused(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nowhere'"):
        _ = importlib.import_module(package).nowhere


PYTORCH = "distillkit.privacy.capture._pytorch"
"""The module in which every private or experimental name of PyTorch is imported."""


def names_of_pytorch(by: str) -> list[tuple[str, str]]:
    """Return what a module imports from private or experimental modules of PyTorch, or by a private name."""
    nodes = [node for node in read(by) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in nodes for alias in node.names if node.module]
    return [(m, n) for m, n in names if m.startswith("torch.") and ("._" in f"{m}.{n}" or "experimental" in m)]


def test_no_name_of_pytorch_has_moved() -> None:
    moved = []
    for module, name in names_of_pytorch(PYTORCH):
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            moved.append(f"{module}.{name}")
    assert not moved, f"this PyTorch has moved or removed {', '.join(moved)}, which {PYTORCH} must find elsewhere"


def test_private_names_of_pytorch_are_imported_in_one_module() -> None:
    assert [by for by in modules() if names_of_pytorch(by)] == [PYTORCH]
    assert len(list(modules()[PYTORCH].parent.glob("_[a-z]*.py"))) == 3
