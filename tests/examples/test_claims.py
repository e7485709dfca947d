"""The script of the registered experiments: equal searches, disjoint seeds, and designs with enough power."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from distillkit.study import PowerAnalysis
from tests.examples.studies import requested_study
from tests.scripts import load_script

DESIGNS = Path(__file__).parents[2] / "docs" / "results" / "designs"
REGISTERED = sorted(path.stem for path in DESIGNS.glob("*.toml"))


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("examples/claims.py")


@pytest.mark.parametrize("name", ["fedcog", "vhl", "single_image"])
@pytest.mark.parametrize("preset", ["smoke", "cpu"])
def test_both_sides_search_equally_many_configurations_by_late_rounds(
    script: Any, monkeypatch: pytest.MonkeyPatch, name: str, preset: str
) -> None:
    study = requested_study(script, monkeypatch, name, "--preset", preset, "--pilot")
    assert study.rule == "late"
    assert len(study.design.candidates) == 2
    assert {len(c.search) for c in study.design.candidates.values() if c.like is None} == {study.num_configurations}
    assert len(study.design.tune_seeds) == 2
    assert len(study.design.seeds) == 5
    assert not set(study.design.seeds) & set(study.design.tune_seeds)


def test_pilot_prints_the_power(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["vhl", "--preset", "smoke", "--pilot", "--workers", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert "seeds give a power of" in capsys.readouterr().out


def test_runs_without_a_registered_design_are_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DESIGNS", Path("nowhere"))
    with pytest.raises(SystemExit):
        script.main(["vhl", "--preset", "smoke"])


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_design_has_power_and_new_seeds(script: Any, name: str) -> None:
    design = tomllib.loads((DESIGNS / f"{name}.toml").read_text(encoding="utf-8"))
    pilot = {int(seed): value for seed, value in design["pilot"].items()}
    analysis = PowerAnalysis(pilot, design["effect"], column="accuracy_late")
    assert len(set(design["seeds"])) >= analysis.seeds
    assert not set(design["seeds"]) & {*pilot, *script.PILOT, *script.TUNING}
    assert {"claim", "task", "metric", "rule"} <= set(design)
