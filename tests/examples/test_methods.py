"""The table of methods: every candidate can be built, searched equally often and repeated from its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distillkit.study import Study, read_choice
from tests.distillkit.study.sample_records import search_sizes
from tests.examples.studies import configurations


def test_every_candidate_has_four_distinct_serializable_configurations(script: Any, tmp_path: Path) -> None:
    found = {**script.candidates(9, 1), **script.controls()}
    assert len(found) == 56
    task = script.task(10)
    assert Study(tmp_path, task, found).num_configurations == 4
    said = {
        (one, found[name].settings.get("rounds"), name == script.OWN)
        for name, own in configurations(found, task, tmp_path).items() for one in own
    }  # fmt: skip
    assert len(said) == 4 * 56


def test_personal_methods_and_baselines_are_chosen_by_own_tests(script: Any) -> None:
    rules = {name: candidate.rule for name, candidate in script.candidates(9, 1).items()}
    own = {name for name, rule in rules.items() if rule == "own"}
    assert own == {
        "Ditto", "Fine-tuned FedAvg", "FedRep", "FedProto", "FedProto, distance as released", script.OWN
    }  # fmt: skip
    assert script.kind("FedRep") == script.kind(script.OWN) != script.kind("FedAvg")
    assert script.kind("VHL, 30 rounds") == script.kind("FedAvg, 30 rounds") != script.kind("VHL")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["methods.py", "--preset", "smoke", "--workers", "1", *words])
    script.main()


def test_script_prints_its_tables_and_runs_nothing_twice(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path), "--methods", "FedDF, 20 steps", "FedRep"]
    said, stamps = [], []
    for _ in range(2):
        run(script, monkeypatch, *words)
        said.append(capsys.readouterr().out)
        stamps.append({path: path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/summary.json"))})
    assert stamps[0] == stamps[1]
    lines = {line["method"]: line for line in json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))}
    assert set(lines) == {"FedAvg", script.OWN, "FedDF", "FedRep", "FedDF, 20 steps"}
    assert all(line["failed"] == 0 and line["rounds"] == 2 for line in lines.values())
    assert lines["FedRep"]["accuracy_own"] == lines["FedRep"]["accuracy_last"]
    assert lines["FedAvg"]["hash"] == lines[script.OWN]["hash"]
    assert lines["FedDF"]["hash"] != lines["FedDF, 20 steps"]["hash"]
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert all(table.strip() in text for text in said)
    assert "accuracy own minus FedAvg, chosen by own tests's" in table
    assert search_sizes(tmp_path) == {"digits": 1}
    configs = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*/config.json")]
    assert [config["recipe"] is not None for config in configs] == [True] * 5


def test_searches_on_record_are_equal(script: Any, tmp_path: Path) -> None:
    found = script.candidates(2, 20)
    few = {name: found[name] for name in ("FedAvg", script.OWN)}
    study = Study(tmp_path, script.task(1), few, seeds=(0,))
    study.run(trial=False, progress=False)
    assert search_sizes(tmp_path) == {"digits": 4}
    assert [one.rule for one in read_choice(tmp_path)[0]] == ["last", "own"]


def test_unknown_method_is_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--methods", "FedNothing")
    assert "got FedNothing" in capsys.readouterr().err
