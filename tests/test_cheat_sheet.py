"""The cheat sheet lists every public name once."""

from __future__ import annotations

import re
from pathlib import Path

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
API = load_script("docs/scripts/api.py")


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
