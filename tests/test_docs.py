"""Every `>>>` snippet of the documentation and the README runs and prints what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
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
        if p.parent.name in ("components", "methods") and ">>> " not in p.read_text()
    ]
    assert not bare
