"""The table of methods: every row can be built, a few run as a user runs them, the published one is the file's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "methods.py"


@pytest.fixture
def script() -> Any:
    return load_script("examples/methods.py")


def test_every_method_can_be_built(script: Any) -> None:
    for preset in script.PRESETS.values():
        chosen = script.methods(preset, script.TUNED)
        assert set(script.TRIES) | set(script.PERSONAL) <= set(chosen)
        reprs = [repr(make()) for make in chosen.values()]
        assert len(set(reprs)) == len(reprs)


def test_it_prints_its_table_and_runs_nothing_twice(tmp_path: Path) -> None:
    names = ["FedAvg", "FedDF", "FedRep", "FedProto"]
    command = [sys.executable, str(SCRIPT), "--preset", "smoke", "--out", str(tmp_path), "--workers", "2", "--methods"]
    said = [subprocess.run([*command, *names], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    rows = json.loads((tmp_path / "methods.json").read_text())
    assert [row["method"] for row in rows] == ["FedAvg", "FedDF", "FedRep", "FedProto"]
    assert all(row["failed"] == 0 and row["seeds"] == [0] and row["rounds"] == 2 for row in rows)
    personal = [row for row in rows if row["method"] in ("FedRep", "FedProto")]
    assert all(row["accuracy_own"] == row["accuracy_last"] for row in personal)
    table = (tmp_path / "table.md").read_text()
    assert all(table.strip() in text for text in said)
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 4


def test_trailing_methods_are_named(script: Any) -> None:
    def row(name: str, last: list[float], own: list[float]) -> dict[str, Any]:
        return {"method": name, "seeds": [0, 1][: len(last)], "accuracy_last": last, "accuracy_own": own}

    rows = [row("FedAvg", [0.9, 0.8], [0.9, 0.9]), row("MOON", [0.86], [0.9]), row("FedSAM", [0.88], [0.1])]
    assert script.behind([*rows, row("Ditto", [0.1], [0.85])]).endswith("MOON (4.0), Ditto (5.0).")
    assert script.behind(rows[:1]).endswith("none.")


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("name", ["methods.json", "methods_rerun.json"])
def test_the_published_table_is_made_of_the_published_rows(script: Any, name: str) -> None:
    rows = json.loads((RESULTS / name).read_text())
    page = (RESULTS / "methods.md").read_text()
    assert script.table(rows) in page
    assert script.behind(rows) in page


def test_the_settings_are_those_of_the_best_try_on_record(script: Any) -> None:
    tries = json.loads((RESULTS / "methods_tuning.json").read_text())
    for name, wanted in script.TRIES.items():
        own = [one for one in tries if one["method"] == name]
        assert [one["settings"] for one in own] == list(wanted), name
        assert max(own, key=lambda one: one["accuracy_last"])["settings"] == script.TUNED[name]
