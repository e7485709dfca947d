"""Public names come from the packages' `__init__` files, and pages and examples import them from there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fl

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]
PUBLIC = ("fl", "fl.addons", "fl.deploy.flower", "fl.methods", "fl.study")
"""Public packages of the federated layer."""


def code(path: Path) -> str:
    """Return the Python code of a file; for a page, its fenced lines without prompts."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    fenced = "\n".join(re.findall(r"```(?:python|pycon)\n(.*?)```", text, re.DOTALL))
    return re.sub(r"^(>>>|\.\.\.) ?", "", fenced, flags=re.MULTILINE)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every `from fl... import`."""
    for module, names in re.findall(r"^\s*from (fl(?:\.\w+)*) import (\([^)]*\)|.*)$", code(path), re.MULTILINE):
        for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)):
            yield module, name


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_are_imported_from_public_packages(path: Path) -> None:
    packages: list[Any] = [importlib.import_module(name) for name in PUBLIC]
    inner = [(module, name) for module, name in imports(path) if module not in PUBLIC]
    assert not [f"{m}.{n}" for m, n in inner if any(n in package.__all__ for package in packages)]
    assert not [f"{m}.{n}" for m, n in inner if path.suffix == ".md"]


NEEDED = """
    start: AveragingServer Server Message Entry Tensors
    check: Settings require_full_models
    begin: Local
    loss: Step Output
    own_batches: Batch Phase shuffled_indices
    expect: EntrySpec Schema
    receive: AggregatedReplies NoUsableReply
    a server's rule: ServerAdaptive
    a method: Method Client Predictor evaluation_spec Networks Factory LabelTask
    a filter: Filter Filtered
    a run: simulate ClientData RunFolder Run history CheckpointError
"""


@pytest.mark.parametrize("line", NEEDED.strip().splitlines(), ids=lambda line: line.split(":")[0].strip())
def test_fl_exports_every_type_that_add_ons_methods_and_filters_need(line: str) -> None:
    assert set(line.split(":")[1].split()) <= set(fl.__all__)


def test_fl_exports_every_type_in_the_annotations_of_hooks() -> None:
    """The hooks are the methods of the base classes that users derive from."""
    others = {"str", "int", "float", "bool", "tuple", "list", "Any", "Sequence", "Mapping", "Iterator", "Callable"}
    others |= {"Tensor", "nn", "LabeledImages", "KeyedObject"}
    used = set()
    for base in (fl.AddOn, fl.Method, fl.Filter):
        tree = ast.parse(Path(importlib.import_module(base.__module__).__file__ or "").read_text(encoding="utf-8"))
        [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__]
        for node in (n for n in cls.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")):
            notes = [a.annotation for a in node.args.args if a.annotation is not None] + [node.returns]
            used |= {n.id for note in notes if note for n in ast.walk(note) if isinstance(n, ast.Name)}
    assert used - others <= set(fl.__all__)


def test_exported_names_are_unique_and_exist() -> None:
    for name in PUBLIC:
        package = importlib.import_module(name)
        assert len(set(package.__all__)) == len(package.__all__)
        assert all(hasattr(package, exported) for exported in package.__all__)
