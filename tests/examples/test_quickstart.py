"""The demo runs as a user runs it, and does not run twice what is finished."""

from __future__ import annotations

import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl.study.experiment import Experiment
from tests.kill_quickstart import killed_and_resumed, record, rounds_of
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]


def demo(out: Path, *more: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--preset", "smoke", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=out.parent).stdout


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of the same runs, made one after the other in this process."""
    quickstart = load_script("examples/quickstart.py")
    out = tmp_path_factory.mktemp("untouched")
    for split, name in itertools.product(quickstart.SPLITS, quickstart.METHODS):
        quickstart.one(Experiment(out), quickstart.PRESETS["smoke"], (split, 0, name))
    return record(out)


def test_the_demo_is_killed_and_resumed_at_once_prints_its_table_and_writes_the_same_records_and_pictures(
    tmp_path: Path, untouched: dict[str, Any]
) -> None:
    """The parent alone is killed, in the middle; `python -m tests.kill_quickstart --kills 10` does it at random."""
    out = tmp_path / "run"
    done, _ = killed_and_resumed(out, lambda: rounds_of(out) >= 1)
    assert 1 <= done < 16
    assert record(out) == untouched
    assert {name.split("/")[0] for name in untouched} == {p.parent.name for p in out.glob("*/history.jsonl")}
    said = demo(out)
    lines = json.loads((out / "summary.json").read_text())
    assert {(x["split"], x["method"]) for x in lines} == {
        (s, m) for s in ("Dirichlet 0.1", "Dirichlet 0.01") for m in ("FedAvg", "FedProx", "FedDM", "Real")
    }
    for line in lines:
        rows = [json.loads(x) for x in (out / line["run"] / "history.jsonl").read_text().splitlines()]
        assert line["accuracy_last"] == rows[-1]["accuracy"]
        assert line["bytes_up"] == sum(r["bytes_up"] for r in rows)
        assert line["epsilon"] is None
        assert f"{100 * line['accuracy_last']:.1f}" in said
    assert "Local epochs a round: FedAvg 1, FedProx 1." in said
    for name in ("accuracy_by_round", "accuracy_by_bytes_up", "accuracy_by_client_seconds", "synthetic_digits"):
        assert (out / f"{name}.png").stat().st_size > 5000
    assert "Written to" in said, "what was finished is not run again, and told all the same"
    assert record(out) == untouched


def test_fedavg_and_fedprox_have_the_same_choice_of_epochs_and_the_demo_says_what_was_chosen() -> None:
    place = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    presets, tries = place["PRESETS"], place["TRIES"]
    assert {t["epochs"] for t in tries["FedAvg"]} == {t["epochs"] for t in tries["FedProx"]} == {1, 5}
    assert len(tries["FedAvg"]) == len(tries["FedProx"]) == len(tries["FedDM"])
    for preset in (presets["look"], presets["cpu"], presets["paper"]):
        assert [place["method"](name, preset).settings.phases[0].epochs for name in ("FedAvg", "FedProx")] == [5, 5]
        assert place["closing"](preset).startswith("Local epochs a round: FedAvg 5, FedProx 5. ")


def test_what_the_demo_takes_is_the_best_of_the_recorded_tries() -> None:
    """The rows of FedDM are older: seeded draws have changed since they were made."""
    place = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    rows = json.loads((ROOT / "docs" / "results" / "quickstart_tuning.json").read_text())
    for name, tries in place["TRIES"].items():
        own = [row for row in rows if row["method"] == name]
        assert [row["settings"] for row in own if row["settings"] in tries] == [row["settings"] for row in own]
        best = max(own, key=lambda row: sum(row["accuracy_last"]))
        taken = {"epochs": place["PRESETS"]["cpu"]["epochs"], **place["SETTINGS"][name]}
        assert all(taken[key] == value for key, value in best["settings"].items())
