"""Numbers of the docs about attacks equal those of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

SCRIPT = load_script("docs/scripts/attacks_page.py")
LINES = SCRIPT.read(SCRIPT.RECORDS) if SCRIPT.RECORDS.exists() else []


@pytest.mark.parametrize("path", SCRIPT.pages(), ids=lambda path: path.stem)
def test_tables_and_numbers_of_pages_equal_the_records(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert SCRIPT.filled(text, LINES) == text, "run python docs/scripts/attacks_page.py"


def test_page_has_every_table() -> None:
    text = SCRIPT.RECORDS.with_suffix(".md").read_text(encoding="utf-8")
    assert [name for _, name, _ in SCRIPT.TABLE.findall(text)] == list(SCRIPT.TABLES)
    assert text.count("<!-- end of table -->") == len(SCRIPT.TABLES)
    assert len(SCRIPT.COMMITS.findall(text)) == 1


def line(row: str, attack: str, kind: str, tpr: float, **more: Any) -> dict[str, Any]:
    rates = {name: [value, value - 0.005, value + 0.005] for name, value in (("tpr", tpr), ("fpr", 0.01), ("auc", 0.6))}
    return {"row": row, "attack": attack, "kind": kind, **rates, "few": False, "shadows": 66, "accuracy": 0.98,
            "commit": "abc", **more}  # fmt: skip


NUMBERS = {"ipc": 10, "clients": 4, "steps": 100, "round_steps": 20, "records": 1438}
GROUPS = {"share": 0.139, "tpr": [0.7, 0.6, 0.8], "rest": [0.011, 0.009, 0.013]}
MADE = [
    line("raw", "threshold", "model", 0.0129), line("raw", "LiRA online", "model", 0.0531),
    line("raw", "LiRA offline, two-sided", "choice", 0.01),
    line("dm", "nearest", "set", 0.15, numbers=NUMBERS, started=GROUPS),
    line("dm-noise", "nearest", "set", 0.01, numbers=NUMBERS, started=None),
    line("feddm", "nearest", "set", 0.2, numbers=NUMBERS, started=GROUPS),
    line("transcript", "distance", "transcript", 0.55, images=4000, auc=0.844,
         above={"25": {"training": [0.55, 0.5, 0.6], "held-out": [0.0, 0.0, 0.01], "random": [0.6, 0.5, 0.7]}}),
]  # fmt: skip


def test_tables_show_per_cent_and_name_missing_rows() -> None:
    page = "".join(f"<!-- table: {name} -->\nbefore\n<!-- end of table -->\n" for name in SCRIPT.TABLES)
    text = SCRIPT.filled(page, MADE)
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in text.splitlines() if row.startswith("|")]
    assert ["trained on", "shadows", "accuracy %", "global threshold", "LiRA online, pooled"] in rows
    assert ["raw data", "66", "98.0", "1.3 (0.8 to 1.8)", "5.3 (4.8 to 5.8)"] in rows
    assert ["FedLGD", "not run yet", "–", "–", "–"] in rows
    assert ["raw data", "66", "98.0", ".600 (.595 to .605)", ".600 (.595 to .605)"] in rows
    assert ["LiRA offline, two-sided", "1.0 (0.5 to 1.5)", "1.00 (0.50 to 1.50)", ".600 (.595 to .605)"] in rows
    found = {row[0]: row for row in rows if row[0] in ("DM, real start", "FedDM, real start") and "nearest" in row}
    assert found["DM, real start"][1:4] == ["10, 719, 100", "66", "nearest"]
    assert found["DM, real start"][-3:] == ["13.9", "70.0 (60.0 to 80.0)", "1.1 (0.9 to 1.3)"]
    assert found["FedDM, real start"][1] == "5 x 4, 719, 20"
    assert ["training records", "55.0 (50.0 to 60.0)"] in rows
    assert "AUC 0.844, TPR 55.0 (54.5 to 55.5) % at FPR 1.00 (0.50 to 1.50) %" in text
    assert "before" not in text
    assert SCRIPT.filled(text, MADE) == text


def test_single_numbers_are_inserted_in_sentences() -> None:
    def said(words: str) -> str:
        text = SCRIPT.filled(f"a <!-- found: {words} -->old<!-- end of found --> b", MADE)
        return text.removeprefix(f"a <!-- found: {words} -->").removesuffix("<!-- end of found --> b")

    assert said("raw LiRA_online tpr") == "5.3 (4.8 to 5.8) %"
    assert said("raw threshold accuracy") == "98.0 %"
    assert said("dm nearest tpr") == "15.0 (14.5 to 15.5) %"
    assert said("dm nearest started") == "70.0 (60.0 to 80.0) %"
    assert said("dm nearest rest") == "1.1 (0.9 to 1.3) %"
    assert said("dm nearest share") == "14 %"
    assert said("transcript distance training") == "55.0 %"
    assert said("transcript distance held-out") == "0.0 %"
    with pytest.raises(ValueError, match="one record of fedlgd, nearest, found 0"):
        said("fedlgd nearest tpr")


def test_newer_records_of_a_row_replace_older_ones() -> None:
    newer = [line("raw", "threshold", "model", 0.02), line("feddm", "nearest", "set", 0.3)]
    both = SCRIPT.merged(MADE, newer)
    assert [one["row"] for one in both] == ["raw", "dm", "dm-noise", "feddm", "transcript"]
    assert both[0]["tpr"][0] == 0.02
    assert both[3]["tpr"][0] == 0.3
