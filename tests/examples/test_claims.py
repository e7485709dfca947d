"""The script of the registered experiments: equal searches, disjoint seeds, and designs with enough power."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from claims.claim import described
from claims.registration import read_design
from distillkit.study import Study, read_records
from tests.examples.studies import requested_study
from tests.refused import refused

DESIGNS = Path(__file__).parents[2] / "docs" / "results" / "designs"
REGISTERED = sorted(path.stem for path in DESIGNS.glob("*.json"))
CLAIMS = ["fedcog", "feddm", "fedlgd", "single_image", "vhl", "vhl_cifar10"]


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("preset", ["smoke", "cpu"])
def test_both_sides_search_equally_many_configurations_by_late_rounds(
    script: Any, monkeypatch: pytest.MonkeyPatch, name: str, preset: str
) -> None:
    asked = script.CLAIMS[name](Namespace(preset=preset))
    study = Study(Path(name), asked.tasks, asked.candidates, rule="late", late_rounds=asked.rounds)
    assert len(study.design.candidates) == 2
    assert {len(c.search) for c in study.design.candidates.values() if c.like is None} == {study.num_configurations}
    assert set(asked.pilot) == {label for label, c in asked.candidates.items() if c.like is None}
    study = requested_study(script, monkeypatch, name, "--preset", preset, "--pilot")
    assert study.num_configurations == 1
    assert study.rule == "late"
    assert study.late_rounds is not None
    assert len(study.design.tune_seeds) == 2
    assert len(study.design.seeds) == 5
    assert not set(study.design.seeds) & set(study.design.tune_seeds)


def test_both_sides_of_fedlgd_condense_with_as_many_steps(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = requested_study(script, monkeypatch, "fedlgd", "--pilot")
    [task] = study.design.tasks.values()
    steps = {}
    for name, candidate in study.design.candidates.items():
        method = candidate.make(**{"factory": lambda outputs: None, **candidate.settings, **candidate.search[0]})
        condensed = next(addon for addon in method.addons if type(addon).__name__ == "Condensed")
        later = sum(1 < r <= task.rounds for r in condensed.selected)
        steps[name] = condensed.steps + condensed.refine_steps * later
    assert steps == {"FedAvg": 200, "FedLGD": 200}


def test_measured_pilot_has_the_accuracies_of_the_pilot(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for kind in ("--pilot", "--inside"):
        script.main(["vhl", *smoke(tmp_path / kind), kind, "--seeds", "200"])
        found[kind] = read_records(tmp_path / kind)
    for plain, measured in zip(*found.values(), strict=True):
        assert [r["accuracy"] for r in plain.rows] == [r["accuracy"] for r in measured.rows]
        assert all("client_drift" not in row for row in plain.rows)
        assert all(set(row["client_drift"]) == {"distance", "relative", "features"} for row in measured.rows)
    with pytest.raises(SystemExit):
        script.main(["vhl_cifar10", *smoke(tmp_path / "none"), "--inside"])
    assert "vhl_cifar10 has no measurements of its own" in capsys.readouterr().err


@pytest.mark.parametrize("name", CLAIMS)
def test_every_pilot_runs(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    script.main([name, *smoke(tmp_path), "--pilot", "--seeds", "200", "201"])
    assert "accuracy late" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fedlgd", "feddm"])
def test_both_sides_measure_their_sets(script: Any, tmp_path: Path, name: str) -> None:
    script.main([name, *smoke(tmp_path), "--inside", "--seeds", "200"])
    base, candidate = read_records(tmp_path)
    for row, other in zip(base.rows, candidate.rows, strict=True):
        assert set(row["set_quality"]) == {"update_real", "sample_real", "sample_update"}
        assert {"set_real", "set_update"} <= set(other["set_quality"])


def smoke(folder: Path) -> list[str]:
    return ["--preset", "smoke", "--workers", "1", "--device", "cpu", "--out", str(folder)]


def test_pilot_prints_the_power_and_registers_a_design(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.main(["vhl", *smoke(tmp_path / "pilot"), "--pilot"])
    assert "seeds give a power of" in capsys.readouterr().out
    monkeypatch.setattr(script, "DESIGNS", tmp_path)
    monkeypatch.setenv("DISTILLKIT_DATA", "unset")
    words = ["vhl", "--data", str(tmp_path), *smoke(tmp_path / "claim")]
    script.main([*words, "--register", str(tmp_path / "pilot")])
    design = read_design(tmp_path / "vhl.json")
    assert str(tmp_path) not in json.dumps(design.study)
    assert len(design.seeds) >= design.power.seeds
    assert design.power.column == "accuracy_late"
    assert design.power.effect == 0.062
    refused(lambda: script.main(words), ValueError, "must be committed")


def test_runs_without_a_registered_design_are_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DESIGNS", Path("nowhere"))
    with pytest.raises(SystemExit):
        script.main(["vhl", "--preset", "smoke"])


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_design_is_that_of_the_script(script: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    study = requested_study(script, monkeypatch, name, "--estimate")
    design = read_design(DESIGNS / f"{name}.json")
    described_now = described(study, design.task, (design.method, design.base), design.study["extend"])
    assert described_now == design.study
    assert not set(design.seeds) & {*script.PILOT, *script.TUNING}
