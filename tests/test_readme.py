"""The README's table of methods is what the code says, and every row has a golden test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import fl.addons
import fl.methods

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_methods", ROOT / "docs" / "make_methods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_table_is_what_the_script_writes(script: Any) -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition(script.START)
    written, mark, _ = rest.partition(script.END)
    assert mark
    assert written.strip() == script.table(), "run python docs/make_methods.py"


def test_every_row_has_a_card_and_a_golden_test_and_every_golden_test_a_row(script: Any) -> None:
    names = set(script.public())
    assert names == {"FedAvg", "ClientDP", *fl.addons.__all__, *fl.methods.__all__} - {"ClippedCrossEntropy"}
    assert set(script.golden_tests()) == names
    for row in script.table().splitlines()[2:]:
        for target in (cell.partition("](")[2].rstrip(" )") for cell in row.split("|")[3:5]):
            assert (ROOT / target).is_file(), row


def test_a_name_without_a_golden_test_cannot_stand(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = script.golden_tests()
    monkeypatch.setattr(script, "golden_tests", lambda: {n: t for n, t in tests.items() if n != "Scaffold"})
    with pytest.raises(ValueError, match="marked golden for Scaffold"):
        script.table()
