"""Every `>>>` snippet of the documentation and the README runs with the printed output."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from fl import AddOn
from fl.averaging.addon import SLOTS
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md")])


@pytest.mark.slow
@pytest.mark.parametrize(  # these two have tests of their own
    "page", [p for p in PAGES if p.stem not in ("tutorial", "publish_a_set")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failures, _ = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert failures == 0


def test_every_component_and_method_page_has_a_snippet() -> None:
    bare = [
        str(p.relative_to(ROOT))
        for p in PAGES
        if p.parent.name in ("components", "methods") and ">>> " not in p.read_text(encoding="utf-8")
    ]
    assert not bare


PACKAGES = [
    package
    for group in load_script("docs/scripts/api.py").PACKAGES.values()
    for package in group
    if package not in ("fl.secure", "fl.study", "fl.deploy.flower")
]


@cache
def sections() -> list[str]:
    """Yield every part of a page from one heading to the next."""
    found: list[list[str]] = []
    for page in PAGES:
        fenced = False
        found.append([])
        for line in page.read_text(encoding="utf-8").splitlines():
            fenced ^= line.startswith("```")
            if line.startswith("#") and not fenced:
                found.append([])
            found[-1].append(line)
    return ["\n".join(lines) for lines in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_a_section_with_a_snippet(package: str) -> None:
    runnable = [s for s in sections() if ">>> " in s]
    names = [n for n in importlib.import_module(package).__all__ if not n.startswith("__")]
    assert [n for n in names if not any(re.search(rf"\b{re.escape(n)}\b", s) for s in runnable)] == []


def test_table_of_hooks_names_every_hook_with_its_arguments() -> None:
    page = (ROOT / "docs" / "user_methods.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)\(([\w, ]*)\)`", page, flags=re.M))
    slots = set(re.findall(r"^\| `(\w+)\([\w, ]*\)` \(slot\)", page, flags=re.M))
    hooks = {
        name: ", ".join(inspect.signature(value).parameters).removeprefix("self, ")
        for name, value in vars(AddOn).items()
        if inspect.isfunction(value) and name != "whole"
    }
    assert rows == hooks
    assert slots == set(SLOTS)
