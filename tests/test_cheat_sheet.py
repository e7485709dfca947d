"""The cheat sheet lists every public name once, and `dir()` shows public names only."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
API = load_script("docs/scripts/api.py")
PUBLIC: dict[str, list[str]] = json.loads((Path(__file__).parent / "public_names.json").read_text(encoding="utf-8"))
"""Expected `dir()` of every public package."""


def listed() -> list[tuple[str, str]]:
    """Return (package, name) of every entry of the page."""
    found: list[tuple[str, str]] = []
    package = ""
    for line in (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"### `([\w.]+)`", line):
            package = heading[1]
        elif line.startswith("- "):
            found += [(package, name) for name in re.findall(r"`(\w+)`", line.partition(":")[0])]
    return found


def test_cheat_sheet_lists_all_public_names_and_nothing_else() -> None:
    assert len(set(listed())) == len(listed())
    assert sorted(set(listed())) == sorted({(home, name) for (_, name), home in API.homes().items()})


def test_table_has_every_public_package() -> None:
    modules = {
        "distillkit.evaluate",
        "distillkit.normalization",
        "distillkit.rng",
        "distillkit.robustness",
        "distillkit.scores",
        "distillkit.serialization",
    }
    modules |= {
        "distillkit.training",
        "distillkit.protocols",
        "distillkit.data.partition",
        "attacks.matching",
        "attacks.metrics",
    }
    modules |= {"attacks.statistics", "attacks.transcript"}
    assert {p for group in API.PACKAGES.values() for p in group} - modules <= set(PUBLIC)


@pytest.mark.parametrize("package", PUBLIC)
def test_dir_shows_public_names_only(package: str) -> None:
    assert dir(importlib.import_module(package)) == PUBLIC[package]
