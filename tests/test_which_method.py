"""Numbers of the page on choosing a method equal the records; it names every method's card."""

from __future__ import annotations

import re

import pytest

from tests.refused import refused
from tests.scripts import load_script

SCRIPT = load_script("docs/scripts/which_method.py")
TEXT = SCRIPT.PAGE.read_text(encoding="utf-8")


def test_tables_of_the_page_equal_the_records() -> None:
    assert SCRIPT.filled(TEXT) == TEXT, "run python docs/scripts/which_method.py"
    assert [name for _, name, _ in SCRIPT.CHOICE.findall(TEXT)] == list(SCRIPT.TABLES)


def test_numbers_are_beside_their_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {("digits", "DM"): {"last %": "12.3 ± 0.4", "ε": "–"}}
    row = SCRIPT.Row(("a set", "DM"), "DM", (("dm", "nearest", "by the set"), ("dm", "LiRA offline", "by the model")))
    choice = SCRIPT.Choice("any", "digits", ("for", "way"), (("ε", "ε"), ("last %", "accuracy %")), (row,), "found %")
    lines = [{"row": "dm", "attack": a, "tpr": [v, v, v]} for a, v in (("nearest", 0.13), ("LiRA offline", 0.02))]
    monkeypatch.setattr(SCRIPT, "summary", lambda records: made)
    monkeypatch.setattr(SCRIPT, "read", lambda path: lines)
    monkeypatch.setitem(SCRIPT.TABLES, "sets", choice)
    table = SCRIPT.table("sets")
    assert table.header == ("for", "way", "ε", "accuracy %", "found %")
    assert table.cells == (
        ("a set", "DM", "–", "12.3 ± 0.4", "13.0 (13.0 to 13.0) by the set; 2.0 (2.0 to 2.0) by the model"),
    )
    monkeypatch.setitem(SCRIPT.TABLES, "sets", choice._replace(rows=(row._replace(way="DSA"),)))
    refused(lambda: SCRIPT.table("sets"), ValueError, "has no run of DSA on digits")
    refused(lambda: SCRIPT.table("other"), ValueError, "a choice must be one of sets, federated")


def test_every_card_is_an_answer() -> None:
    cards = {path.stem for path in (SCRIPT.DOCS / "methods").glob("*.md")}
    named = set(re.findall(r"\(methods/(\w+)\.md\)", TEXT))
    assert named == cards, "say of each method when it is the one to take"
