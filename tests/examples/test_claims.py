"""The script of the registered experiments: equal searches, disjoint seeds, and designs with enough power."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distillkit.study import read_design
from tests.examples.studies import requested_study
from tests.scripts import load_script

DESIGNS = Path(__file__).parents[2] / "docs" / "results" / "designs"


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


def test_runs_without_a_registered_design_are_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DESIGNS", Path("nowhere"))
    with pytest.raises(SystemExit):
        script.main(["vhl", "--preset", "smoke"])


def test_design_is_registered_from_a_pilot_and_then_required(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "DESIGNS", tmp_path / "designs")
    (tmp_path / "designs").mkdir()
    words = ["vhl", "--preset", "smoke", "--workers", "1", "--device", "cpu", "--out"]
    script.main([*words, str(tmp_path / "pilot"), "--pilot"])
    assert "seeds give a power of" in capsys.readouterr().out
    script.main([*words, str(tmp_path / "result"), "--register", str(tmp_path / "pilot")])
    design = read_design(tmp_path / "designs" / "vhl.json")
    assert (design.method, design.base, design.column) == ("FedAvg + VHL", "FedAvg", "accuracy_late")
    assert design.seeds[0] == script.FIRST
    with pytest.raises(ValueError, match="must be committed"):
        script.main([*words, str(tmp_path / "result")])


@pytest.mark.parametrize("path", sorted(DESIGNS.glob("*.json")), ids=lambda path: path.stem)
def test_registered_design_belongs_to_the_script(script: Any, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    design = read_design(path)
    study = requested_study(script, monkeypatch, path.stem)
    assert study.design.seeds == design.seeds
    assert not set(design.seeds) & {*script.PILOT, *script.TUNING}
