"""Numbers of the page on inversion equal its records, and an interrupted measurement continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import ROOT, load_script

PAGE = load_script("docs/scripts/inversion_page.py")
RECORDS: list[dict[str, Any]] = PAGE.read(PAGE.RECORDS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    found = load_script("docs/scripts/inversion.py")
    monkeypatch.setattr(found, "RECORDS", tmp_path / "lines.jsonl")
    monkeypatch.setattr(found, "write_page", lambda: None)
    return found


def test_tables_of_the_page_equal_the_records() -> None:
    text = PAGE.PAGE.read_text(encoding="utf-8")
    assert {part for _, part, _ in PAGE.TABLE.findall(text)} == set(PAGE.TABLES)
    assert PAGE.filled(text, RECORDS) == text, "run python docs/scripts/inversion_page.py"


def test_every_case_has_all_seeds_and_a_clean_commit() -> None:
    wanted = {"images": 20, "formulas": 1, "defences": 5, "classes": 1, "clients": 6}
    for part, seeds in wanted.items():
        for rows in PAGE.cases([r for r in RECORDS if r["part"] == part]).values():
            assert [r["seed"] for r in rows] == list(range(seeds))
    assert all(r["commit"] and "+" not in r["commit"] and "--cifar" in r["command"] for r in RECORDS)


def test_table_shows_medians_with_their_range_and_counts_labels() -> None:
    common = {"case": "here", "method": "dlg", "steps": 2, "guess": 10.0, "guess_aligned": 11.0, "seconds": 1.0}
    rows = [{**common, "label": k > 0, "psnr": 10.0 * k, "aligned": 30.0} for k in range(3)]
    line = PAGE.images(rows).splitlines()[-1]
    cells = ['here; "dlg", 2 steps', "2 of 3", "10.0 (0.0 to 20.0)", "30.0 (30.0 to 30.0)", "10.0, 11.0", "1.0"]
    assert line == f"| {' | '.join(cells)} |"


def test_recorded_cases_are_not_measured_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def part(done: set[str]) -> Iterator[dict[str, Any]]:
        for seed in range(3):
            if f"it {seed}" not in done:
                measured.append(seed)
                if measured == [0, 1]:
                    raise KeyboardInterrupt
                yield {"case": "it", "seed": seed, "seconds": 0.0}

    monkeypatch.setattr(script, "PARTS", {"stub": part})
    monkeypatch.setattr(sys, "argv", ["inversion.py"])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    script.main()
    lines = [json.loads(line) for line in script.RECORDS.read_text(encoding="utf-8").splitlines()]
    assert [r["seed"] for r in lines] == [0, 1, 2]
    assert measured == [0, 1, 1, 2]
    assert all(r["part"] == "stub" and r["command"] == "python docs/scripts/inversion.py" for r in lines)


def test_nearest_record_is_itself_and_measured_defences_are_skipped(script: ModuleType) -> None:
    clients = sys.modules["inversion_clients"]
    digits = clients.load("digits", size=16).train[:5]
    assert clients.nearest(digits.pixels()[2:3], digits) > 100
    assert clients.nearest(digits.pixels()[2:3], digits[:2]) < 30
    first = next(clients.defences(set()))
    assert (first["case"], first["seed"], first["label"]) == ("as it is", 0, True)
    assert first["aligned"] > 20
    second = next(clients.defences({"as it is 0"}))
    assert second["case"] == "clipped to a norm of 0.1"
