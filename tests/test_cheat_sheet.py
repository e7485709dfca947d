"""The cheat sheet lists every public name once, and `dir()` shows public names only."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
API = load_script("docs/scripts/api.py")
PACKAGES = [package for group in API.PACKAGES.values() for package in group]


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


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_shows_public_names_and_subpackages_only(package: str) -> None:
    module = importlib.import_module(package)
    if hasattr(module, "__path__"):
        further = {name for name in dir(module) if name not in module.__all__}
        assert set(module.__all__) <= set(dir(module))
        assert {f"{package}.{name}" for name in further} <= {*PACKAGES, "fl.deploy"}
