"""What users need comes from the packages' front doors, and that is where pages and examples take it from."""

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
SCRIPTS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]
ROOMS = ("fl", "fl.addons", "fl.deploy.flower", "fl.methods", "fl.study")
"""Where the federated layer's public names are."""


def code(path: Path) -> str:
    """The Python of a file: of a page its fenced lines, without prompts."""
    text = path.read_text()
    if path.suffix == ".py":
        return text
    fenced = "\n".join(re.findall(r"```(?:python|pycon)\n(.*?)```", text, re.DOTALL))
    return re.sub(r"^(>>>|\.\.\.) ?", "", fenced, flags=re.MULTILINE)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from fl... import`."""
    for module, names in re.findall(r"^\s*from (fl(?:\.\w+)*) import (\([^)]*\)|.*)$", code(path), re.MULTILINE):
        for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)):
            yield module, name


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_what_the_front_doors_have_is_not_taken_from_inner_files(path: Path) -> None:
    doors: list[Any] = [importlib.import_module(room) for room in ROOMS]
    inner = [(module, name) for module, name in imports(path) if module not in ROOMS]
    assert not [f"{m}.{n}" for m, n in inner if any(n in door.__all__ for door in doors)]
    assert not [f"{m}.{n}" for m, n in inner if path.suffix == ".md"]


def test_imports_of_pages_and_scripts_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n>>> from fl import FedAvg  # the ground\n>>> from fl.x import (\n...     A as B,\n... )\n```\n"
    )
    assert list(imports(page)) == [("fl", "FedAvg"), ("fl.x", "A")]
    assert sum(1 for path in [*PAGES, *SCRIPTS] for _ in imports(path)) > 100


NEEDED = """
    start: AveragingServer Server Message Entry Tensors
    check: Settings require_replied
    begin: Local
    loss: Step Output
    own_batches: Batch Phase shuffled
    expect: Like Schema
    receive: Reduced NoUsableReply
    a server's rule: ServerAdaptive
    a method: Method Client Predictor sums_like Networks Factory LabelTask
    a filter: Filter Filtered
    a run: simulate ClientData RunFolder Run history CheckpointError
"""


@pytest.mark.parametrize("line", NEEDED.strip().splitlines(), ids=lambda line: line.split(":")[0].strip())
def test_who_writes_an_add_on_a_method_or_a_filter_finds_every_type_in_fl(line: str) -> None:
    assert set(line.split(":")[1].split()) <= set(fl.__all__)


def test_every_type_that_a_hook_takes_or_gives_is_in_fl() -> None:
    """From the annotations of the bases that users write subclasses of."""
    others = {"str", "int", "float", "bool", "tuple", "list", "Any", "Sequence", "Mapping", "Iterator", "Callable"}
    others |= {"Tensor", "nn", "LabeledImages", "Keyed"}
    used = set()
    for base in (fl.AddOn, fl.Method, fl.Filter):
        tree = ast.parse(Path(importlib.import_module(base.__module__).__file__ or "").read_text())
        [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__]
        for node in (n for n in cls.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")):
            notes = [a.annotation for a in node.args.args if a.annotation is not None] + [node.returns]
            used |= {n.id for note in notes if note for n in ast.walk(note) if isinstance(n, ast.Name)}
    assert used - others <= set(fl.__all__)


def test_names_are_sorted_and_there() -> None:
    for room in ROOMS:
        door = importlib.import_module(room)
        assert len(set(door.__all__)) == len(door.__all__)
        assert all(hasattr(door, name) for name in door.__all__)
