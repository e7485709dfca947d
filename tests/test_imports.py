"""What may import what, beyond the layers that import-linter holds; and importing the packages stays cheap."""

from __future__ import annotations

import ast
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
HEAVY = ("torchvision", "opacus", "kornia", "sklearn", "matplotlib", "lpips", "flwr", "scipy")
LEAVES = ("_utils", "rng", "chunking", "locking")
"""Modules and packages of `distillkit` that import nothing of ours but each other."""
VALUES = ("sets", "normalization")
"""What a set is: the types that components hand to each other."""


class Import(NamedTuple):
    """`name` of `module` (None: the module itself), imported by `by`."""

    by: str
    module: str
    name: str | None


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages and the examples, by its dotted name."""
    found = {}
    for path in (path for top in (*PACKAGES, "examples") for path in sorted((ROOT / top).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(by: str, source: str) -> Iterator[Import]:
    """All imports of our packages in a module's source, wherever they stand in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [Import(by, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{by} imports by a relative name"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [
                Import(by, full, None) if full in modules() else Import(by, str(node.module), alias.name)
                for full, alias in zip(whole, node.names, strict=True)
            ]
        else:
            continue
        yield from (one for one in found if one.module.split(".")[0] in PACKAGES)


@cache
def everything() -> list[Import]:
    return [one for by, path in modules().items() for one in imports(by, path.read_text())]


@cache
def exported(module: str) -> frozenset[str]:
    """The names in a module's `__all__`."""
    for node in ast.parse(modules()[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def room(module: str) -> str:
    """The package's folder or flat file that a module belongs to."""
    return ".".join(module.split(".")[:2])


def strays_of_attacks(found: Iterator[Import] | list[Import]) -> list[Import]:
    """Imports that attacks may not make: all but leaves, losses and the value types of a set."""
    allowed = {"attacks", *(f"distillkit.{name}" for name in (*LEAVES, *VALUES, "losses"))}
    own = [one for one in found if one.by.split(".")[0] == "attacks"]
    return [one for one in own if not {one.module.split(".")[0], room(one.module)} & allowed]


def private(found: Iterator[Import] | list[Import]) -> list[Import]:
    """Imports from another package of a name that is in no `__all__`.

    A module with a leading underscore is private to users; inside this distribution its `__all__` counts.
    """
    across = [one for one in found if room(one.by) != room(one.module)]
    return [one for one in across if one.name is not None and one.name not in exported(one.module)]


def test_attacks_use_leaves_losses_and_value_types_alone() -> None:
    assert not strays_of_attacks(everything())


@pytest.mark.parametrize(
    "line",
    [
        "from distillkit.condense import herding",
        "from distillkit.new_room import new",
        "from distillkit import networks",
        "from distillkit import LabeledImages",
        "import fl",
        "from fl.engine.simulate import simulate",
        "def late():\n    from distillkit.privacy import Ledger",
    ],
)
def test_attacks_that_reach_for_more_are_caught(line: str) -> None:
    assert strays_of_attacks(imports("attacks.inversion.new", line))
    assert not strays_of_attacks(imports("attacks.new", "from distillkit.sets import LabeledImages"))


def test_leaves_import_nothing_of_ours_but_leaves() -> None:
    ours = [one for one in everything() if room(one.by) in {f"distillkit.{leaf}" for leaf in LEAVES}]
    assert {one.by for one in ours}
    assert [one for one in ours if room(one.module).removeprefix("distillkit.") not in LEAVES] == []


def test_rooms_share_only_what_is_public() -> None:
    assert private(everything()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from distillkit.losses._common import reduce",
        "from distillkit.networks._init import fill",
        "from distillkit.training import _step",
        "from distillkit.networks._base import cast",
    ],
)
def test_what_is_private_is_caught_in_another_room_alone(line: str) -> None:
    assert private(imports("distillkit.generate.new", line))
    assert not private(imports(f"{room(line.split()[1])}.new", line))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_over_others(package: str) -> None:
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


def test_the_packages_know_no_examples_tests_or_scripts() -> None:
    for name, path in modules().items():
        tops = {
            (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        scripts = {script.stem for script in (ROOT / "examples").glob("*.py")}
        if name.split(".")[0] in PACKAGES:
            assert not tops & {"examples", "tests", "docs", *scripts}, name


@pytest.mark.parametrize("package", PACKAGES)
def test_only_heavy_packages_are_imported_for_type_checkers_alone(package: str) -> None:
    for name, path in modules().items():
        blocks = [
            block
            for block in ast.walk(ast.parse(path.read_text()))
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        ]
        named = [line.split()[1].split(".")[0] for block in blocks for line in map(ast.unparse, block.body)]
        assert name.split(".")[0] != package or set(named) <= set(HEAVY), name


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distillkit.__version__ == project["version"]


def test_importing_a_module_of_the_packages_imports_nothing_heavy() -> None:
    ours = [name for name in modules() if name.split(".")[0] in PACKAGES]
    code = (
        "import importlib, sys\n"
        f"for name in {ours!r}:\n"
        "    importlib.import_module(name)\n"
        f"    assert not (heavy := [m for m in {HEAVY!r} if m in sys.modules]), (name, heavy)"
    )
    assert {"distillkit.networks", "fl.addons", "attacks.membership"} <= set(ours)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
