"""Designs are fixed before the first run: their files, what a study refuses, and the verdicts on claims."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from distillkit.study import (
    PowerAnalysis,
    Record,
    RecordError,
    RegisteredDesign,
    Study,
    grid,
    read_design,
    read_records,
    write_records,
)
from tests.distillkit.study.sample_records import record
from tests.distillkit.study.test_study import Known, known, task
from tests.refused import refused

PILOT = PowerAnalysis({10: 0.31, 11: 0.33, 12: 0.29, 13: 0.30, 14: 0.35}, effect=0.06)
SEEDS = tuple(range(PILOT.seeds))


@pytest.fixture(autouse=True)
def fresh() -> None:
    Known.executed.clear()
    Known.stop_at = ""


def make(folder: Path, *, registered: Path | None = None, **changes: Any) -> Study:
    candidates = {
        "Low": known(search=grid(value=[10, 30])),
        "High": known(search=grid(value=changes.pop("values", [50, 60])), settings=changes.pop("settings", {})),
        "Other": known(like="Low"),
    }
    options = {"seeds": SEEDS, "tune_seeds": (100, 101), **changes}
    return Study(folder / "runs", options.pop("task", task()), candidates, registered=registered, **options)


def register(folder: Path, study: Study | None = None, **changes: Any) -> RegisteredDesign:
    arguments = {"claim": "High is better.", "method": "High", "base": "Low", "power": PILOT, **changes}
    return (study or make(folder)).register(folder / "design.json", **arguments)


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> Path:
    git(folder, "init")
    git(folder, "add", "design.json")
    git(folder, "commit", "-m", "Register a design")
    return folder / "design.json"


def test_design_is_registered_committed_run_and_evaluated(tmp_path: Path) -> None:
    design = register(tmp_path)
    path = commit(tmp_path)
    study = make(tmp_path, registered=path)
    assert study.registered == read_design(path) == design
    found = study.run(trial=False, progress=False)
    result = design.evaluate(found)
    assert result.verdict == "shown"
    assert dict(result.differences) == pytest.approx(dict.fromkeys(SEEDS, 0.3))
    kept = write_records(study.out, tmp_path / "records.jsonl")
    assert str(design.evaluate(kept)) == str(design.evaluate(study.out)) == str(result)
    assert str(result).startswith(
        "Shown: High minus Low is +30.0 points in accuracy last, with the 95 % interval [+30.0"
    )


def test_file_holds_the_power_computation_and_both_searches(tmp_path: Path) -> None:
    register(tmp_path)
    content = json.loads((tmp_path / "design.json").read_text(encoding="utf-8"))
    assert content["power"]["std"] == pytest.approx(np.std([*PILOT.differences.values()], ddof=1))
    assert (content["power"]["seeds"], content["power"]["std_upper"]) == (PILOT.seeds, PILOT.std_upper)
    assert list(content["study"]["candidates"]) == ["High", "Low"]
    assert content["study"]["seeds"] == list(SEEDS)
    text = str(read_design(tmp_path / "design.json"))
    for part in (
        "**Claim:** High is better.", "Comparison: High with Low on made, by accuracy last.",
        "Search of High: value=50; value=60 (2 configurations).",
        "rule last on the validation part, tuning seeds 100, 101",
        f"Seeds: {', '.join(map(str, SEEDS))}. The pilot runs had the seeds 10, 11, 12, 13, 14.", str(PILOT),
        "shown: the whole confidence interval",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": (*SEEDS, 40)}, "seeds"),
        ({"seeds": SEEDS[:-1]}, "seeds"),
        ({"tune_seeds": (100,)}, "tune_seeds"),
        ({"values": [50, 70]}, "candidates"),
        ({"settings": {"classes": 3}}, "candidates"),
        ({"task": task(rounds=3)}, "task"),
        ({"rule": "late"}, "rule"),
        ({"late_rounds": 4}, "late_rounds"),
        ({"tune_on": task("public")}, "tune_on"),
    ],
)
def test_study_with_another_design_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    register(tmp_path)
    path = commit(tmp_path)
    study = make(tmp_path, registered=path, **changes)
    with pytest.raises(ValueError, match=f"must have the design in .*design.json, but differs in {named}$"):
        study.run(trial=False, progress=False)
    assert Known.executed == []
    assert not (study.out / "study.json").exists()


def test_only_a_committed_design_is_run(tmp_path: Path) -> None:
    register(tmp_path)
    path = tmp_path / "design.json"
    study = make(tmp_path, registered=path)
    git(tmp_path, "init")
    for step in (["status"], ["add", "design.json"]):
        git(tmp_path, *step)
        refused(lambda: study.run(trial=False, progress=False), ValueError, "must be committed before the first run")
    git(tmp_path, "commit", "-m", "Register a design")
    path.write_text(path.read_text(encoding="utf-8").replace("is better", "is much better"), encoding="utf-8")
    refused(lambda: make(tmp_path, registered=path).run(trial=False, progress=False), ValueError, "must be committed")
    assert Known.executed == []
    git(tmp_path, "checkout", "design.json")
    study.run(trial=False, progress=False)
    with pytest.raises(ValueError, match="study.json has registered=.*, got None"):
        make(tmp_path).run(trial=False, progress=False)
    with pytest.raises(ValueError, match="must be registered before the first run"):
        make(tmp_path).register(tmp_path / "new.json", claim="c", method="High", base="Low", power=PILOT)


def test_used_seeds_and_too_few_seeds_are_refused(tmp_path: Path) -> None:
    def earlier(seed: int, tuned: int) -> list[Record] | Path:
        kept = write_records([record(0.5, seed=seed)], tmp_path / f"{seed}.jsonl")
        head, *lines = kept.read_text(encoding="utf-8").splitlines()
        content = {**json.loads(head), "choices": [{"seeds": [tuned]}]}
        kept.write_text("\n".join([json.dumps(content), *lines]), encoding="utf-8")
        return kept

    for seeds, options, message in (
        (SEEDS[:-1], {}, f"at least {PILOT.seeds} seeds, as power requires; got {PILOT.seeds - 1}"),
        ((*SEEDS, 14), {}, r"runs of power have used \[14\]"),
        (SEEDS, {"earlier": [[record(0.5, seed=1)]]}, r"runs of earlier have used \[1\]"),
        (SEEDS, {"earlier": [earlier(40, 2)]}, r"runs of earlier have used \[2\]"),
        (SEEDS, {"claim": " "}, "claim must be a sentence"),
        (SEEDS, {"base": "High"}, "method and base must differ"),
        (SEEDS, {"power": replace(PILOT, compared=("X", "High", "Low"))}, "pilot runs of the design's task"),
        (SEEDS, {"power": replace(PILOT, compared=(task().name, "Low", "High"))}, "pilot runs of the design's task"),
        (SEEDS, {"method": "X"}, "a candidate must be one of"),
        (SEEDS, {"task": "X"}, "task must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            register(tmp_path, make(tmp_path, seeds=seeds), **options)
        assert not (tmp_path / "design.json").exists()
    same = replace(PILOT, compared=(task().name, "High", "Low"))
    design = register(tmp_path, power=same, earlier=[[record(0.5, seed=40)], earlier(41, 42)])
    assert design.used_seeds == (40, 41, 42)
    assert read_design(design.path) == design
    refused(lambda: register(tmp_path), ValueError, "path must be a new file")


def test_design_has_at_least_three_seeds(tmp_path: Path) -> None:
    large = PowerAnalysis(PILOT.differences, effect=0.9)
    assert large.seeds == 2
    with pytest.raises(ValueError, match="seeds must hold at least 3 seeds"):
        register(tmp_path, make(tmp_path, seeds=(0, 1)), power=large)
    assert len(register(tmp_path, make(tmp_path, seeds=(0, 1, 2)), power=large).seeds) == 3


def runs(differences: Sequence[float | None]) -> list[Record]:
    pairs = [record(None if d is None else 0.5 + d, "High", s, task="made") for s, d in enumerate(differences)]
    return [*pairs, *(record(0.5, "Low", s, task="made") for s in SEEDS)]


@pytest.mark.parametrize("mean", [-0.2, -0.02, 0.0, 0.015, 0.03, 0.045, 0.2])
@pytest.mark.parametrize("spread", [0.01, 0.04])
@pytest.mark.parametrize("level", [0.05, 0.3])
def test_verdict_follows_from_the_interval(tmp_path: Path, mean: float, spread: float, level: float) -> None:
    design = register(tmp_path, power=replace(PILOT, level=level))
    design = read_design(design.path)
    differences = mean + spread * np.linspace(-1, 1, len(SEEDS))
    n = len(SEEDS)
    low, high = stats.t.interval(1 - level, n - 1, differences.mean(), differences.std(ddof=1) / np.sqrt(n))
    result = design.evaluate(runs([*differences]))
    assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high))
    assert result.verdict == ("shown" if low > 0 else "refuted" if high < 0.06 else "not shown")
    assert str(result).startswith(result.verdict.capitalize())
    assert ("+6.0 points is above the interval" in str(result)) == (high < 0.06)
    assert f"with the {100 * (1 - level):.0f} % interval" in str(result)
    assert f"Verdict, by the {100 * (1 - level):.0f} % interval" in str(design)


def test_no_interval_is_shown_before_all_seeds_are_finished(tmp_path: Path) -> None:
    design, every = register(tmp_path), [0.1 + 0.01 * s for s in SEEDS]
    for differences in (every[:-1], [*every[:-1], None]):
        result = design.evaluate(runs(differences))
        assert (result.verdict, result.low, result.high) == ("unfinished", None, None)
        assert str(result).startswith(f"Unfinished: {len(SEEDS) - 1} of {len(SEEDS)} seeds have a result.")
    more = [*runs(every), record(0.1, "High", 50, task="made"), record(0.9, "Low", 50, task="made")]
    assert 50 not in design.evaluate(more).differences
    assert design.evaluate([record(0.5)]).verdict == "unfinished"


def test_changed_files_are_refused(tmp_path: Path) -> None:
    register(tmp_path)
    path = tmp_path / "design.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    changed: list[tuple[dict[str, Any], str]] = [
        ({"power": {**content["power"], "std_upper": 0.001}}, "does not follow from its pilot runs"),
        ({"power": {**content["power"], "effect": 0.5}}, "does not follow"),
        ({"power": {**content["power"], "differences": {"10": 0.3}}}, "at least 5 pilot pairs"),
        ({"study": {**content["study"], "seeds": [0]}}, "seeds must hold at least"),
        ({"verdicts": "shown: always"}, "has another rule for verdicts"),
        ({"format": "distillkit.design/2"}, "has the format"),
    ]
    for change, message in changed:
        path.write_text(json.dumps({**content, **change}), encoding="utf-8")
        refused(lambda: read_design(path), RecordError, message)
    with pytest.raises(FileNotFoundError, match="Study.register writes it"):
        Study(tmp_path, task(), {"A": known()}, registered=tmp_path / "x.json")


def test_registered_study_is_resumed(tmp_path: Path) -> None:
    register(tmp_path)
    path = commit(tmp_path)
    Known.stop_at = "made-high-1"
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, registered=path).run(trial=False, progress=False)
    Known.stop_at = ""
    done = len(Known.executed)
    study = make(tmp_path, registered=path)
    assert len(study.run(trial=False, progress=False)) == 3 * len(SEEDS)
    assert len(Known.executed) == len(set(Known.executed)) > done
    assert study.registered is not None
    assert study.registered.evaluate(read_records(study.out)).verdict == "shown"
