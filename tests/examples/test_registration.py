"""Registered designs: what they refuse, the law of the verdict, and the extension of searches."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from claims.claim import described
from claims.extension import beyond, extended
from claims.registration import Design, read_design, used_seeds
from distillkit.data import load, partition
from distillkit.study import PowerAnalysis, Record, Records, Study, Task, grid, read_choice, write_records
from tests.distillkit.study.sample_records import record, search_sizes
from tests.distillkit.study.test_study import Known, Number, known, task
from tests.refused import refused

PILOT = PowerAnalysis({10: 0.31, 11: 0.33, 12: 0.29, 13: 0.30, 14: 0.35}, effect=0.06, column="accuracy_late")
SEEDS = tuple(range(PILOT.seeds))


@pytest.fixture(autouse=True)
def fresh() -> None:
    Known.executed.clear()
    Known.stop_at = ""


def digits(**options: Any) -> Task:
    return Task("made", partial(load, "digits", size=16), partial(partition.iid, clients=2), **options)


def description(folder: Path, *, extend: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    values = changes.pop("values", [50, 60])
    candidates = {"Low": known(search=grid(value=[10, 30])), "High": known(search=grid(value=values))}
    options = {"seeds": SEEDS, "tune_seeds": (100, 101), "rule": "late", "late_rounds": 2, **changes}
    study = Study(folder, options.pop("task", digits()), candidates, **options)
    return described(study, "made", ("High", "Low"), extend or {})


def design(folder: Path, power: PowerAnalysis = PILOT, used: Sequence[int] = (), **changes: Any) -> Design:
    return Design("High is better.", "High", "Low", power, tuple(used), description(folder, **changes))


def written(folder: Path, one: Design, **changes: Any) -> Path:
    path = folder / "design.json"
    path.write_text(json.dumps({**one.content(), **changes}), encoding="utf-8")
    return path


def test_only_the_committed_design_is_accepted(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    path = written(tmp_path, design(tmp_path, extend={"lr": 1}))
    found = read_design(path)
    assert found == design(tmp_path, extend={"lr": 1})
    assert found.study["candidates"]["High"]["search"] == [{"value": 50}, {"value": 60}]
    assert "Largest number of extensions of a search: 1 for lr." in str(found)
    same = description(tmp_path, extend={"lr": 1})
    git("init")
    for step in (["status"], ["add", "design.json"]):
        git(*step)
        refused(lambda: found.require(same, path), ValueError, "must be committed before the first run")
    git("commit", "-m", "Register a design")
    found.require(same, path)
    changes: dict[str, dict[str, Any]] = {
        "seeds": {"seeds": (*SEEDS, 40)}, "tune_seeds": {"tune_seeds": (100,)}, "candidates": {"values": [50, 70]},
        "task": {"task": digits(rounds=3)}, "rule": {"rule": "last"}, "late_rounds": {"late_rounds": 4},
    }  # fmt: skip
    for name, change in changes.items():
        other = description(tmp_path, extend={"lr": 1}, **change)
        refused(lambda other=other: found.require(other, path), ValueError, f"but differs in {name}$")
    refused(lambda: found.require(description(tmp_path), path), ValueError, "differs in extend$")
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    refused(lambda: found.require(same, path), ValueError, "must be committed")


def test_used_seeds_and_too_few_seeds_are_refused(tmp_path: Path) -> None:
    earlier = Records([record(0.5, seed=1)], [("digits", "FedAvg", 3)], [{"seeds": [2]}])
    kept = write_records(earlier, tmp_path / "earlier.jsonl")
    assert used_seeds([kept]) == (1, 2, 3)
    for seeds, used, message in (
        (SEEDS[:-1], (), f"at least {PILOT.seeds} "), ((*SEEDS, 14), (), r"have used \[14\]"),
        (SEEDS, used_seeds([kept]), r"have used \[1, 2, 3\]"),
    ):  # fmt: skip
        refused(lambda s=seeds, u=used: design(tmp_path, used=u, seeds=s), ValueError, message)
    large = PowerAnalysis(PILOT.differences, effect=0.9, column="accuracy_late")
    assert large.seeds == 2
    refused(lambda: design(tmp_path, large, seeds=(0, 1)), ValueError, "at least 2 and 3 seeds")


def test_changed_files_are_refused(tmp_path: Path) -> None:
    one = design(tmp_path)
    power = one.content()["power"]
    for change in ({"power": {**power, "std_upper": 0.001}}, {"power": {**power, "effect": 0.5}}, {"verdicts": "all"}):
        refused(lambda c=change: read_design(written(tmp_path, one, **c)), ValueError, "is damaged")


def runs(differences: Sequence[float | None]) -> list[Record]:
    pairs = [
        record([0.1, None if d is None else 0.5 + d], "High", s, task="made") for s, d in enumerate(differences)
    ]  # fmt: skip
    return [*pairs, *(record([0.1, 0.5], "Low", s, task="made") for s in SEEDS), record(0.1, "Low", 0)]


@pytest.mark.parametrize("mean", [-0.2, -0.02, 0.0, 0.015, 0.03, 0.045, 0.2])
@pytest.mark.parametrize("spread", [0.01, 0.04])
@pytest.mark.parametrize("level", [0.05, 0.3])
def test_verdict_follows_from_the_interval(tmp_path: Path, mean: float, spread: float, level: float) -> None:
    power = PowerAnalysis(PILOT.differences, effect=0.06, level=level, column="accuracy_late")
    differences = mean + spread * np.linspace(-1, 1, n := len(SEEDS))
    low, high = stats.t.interval(1 - level, n - 1, differences.mean(), differences.std(ddof=1) / np.sqrt(n))
    said = design(tmp_path, power).evaluate([*runs([*differences]), record([0.9], "High", 99, task="made")])
    verdict = "Shown" if low > 0 else "Refuted" if high < 0.06 else "Not shown"
    interval = f"{100 * (1 - level):g} % interval [{100 * low:+.1f}, {100 * high:+.1f}] over {n} seeds"
    assert said.startswith(
        f"{verdict}: High minus Low is {100 * mean:+.1f} points in accuracy late, with the {interval}"
    )
    assert ("+6.0 points is above the interval" in said) == (high < 0.06)


def test_no_interval_is_shown_before_all_seeds_are_finished(tmp_path: Path) -> None:
    one, every = design(tmp_path), [0.1 + 0.01 * s for s in SEEDS]
    for differences in (every[:-1], [*every[:-1], None]):
        count = f"Unfinished: {len(SEEDS) - 1} of {len(SEEDS)} seeds"
        assert one.evaluate(runs(differences)) == f"{count} have a result. No interval is shown before."
    assert one.evaluate([]).startswith("Unfinished: 0 of")


def peaked(peak: float) -> Known:
    """Return a candidate whose accuracy is highest at lr=`peak`."""

    def make(factory: Any, lr: float) -> Number:
        return Number(90 - 10 * abs(math.log10(lr / peak)))

    return Known(make, search=grid(lr=[0.1, 1.0, 10.0]))


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ((1.0, 1.0), []), ((10.0, 1.0), [100.0]), ((1e6, 1.0), [100.0, 1000.0]), ((1e-6, 1.0), [0.01, 0.001]),
        ((10.0, 0.1), [0.01, 100.0]), ((100.0, 0.1), [0.01, 100.0, 1000.0]),
    ],
)  # fmt: skip
def test_searches_are_extended_alike_and_resumed(
    tmp_path: Path, peaks: tuple[float, float], expected: list[float]
) -> None:
    def study() -> Study:
        control = Known(lambda factory, lr: Number(1.0), like="A")
        return Study(tmp_path, task(), {"A": peaked(peaks[0]), "B": peaked(peaks[1]), "C": control}, seeds=(0,))

    how = {"trial": False, "progress": False}
    Known.stop_at = "made-a-3-100"
    if expected:
        with pytest.raises(KeyboardInterrupt):
            extended(study(), {"lr": 2}, **how)
    Known.stop_at = ""
    for again in range(2):
        longer = extended(study(), {"lr": 2}, **how)
        assert longer is not None
        found = longer.run(**how)
        assert len(Known.executed) == len(set(Known.executed)) == 2 * (3 + len(expected)) + 3, again
    searched = {t.method: [c["settings"]["lr"] for c in t.configurations] for t in read_choice(tmp_path)[0]}
    assert searched == {"A": [0.1, 1.0, 10.0, *expected], "B": [0.1, 1.0, 10.0, *expected], "C": []}
    assert search_sizes(tmp_path) == {"made": 3 + len(expected)}
    for index, peak in enumerate((*peaks, peaks[0])):
        best = min(searched["A"], key=lambda lr, peak=peak: abs(math.log(lr / peak)))
        assert found[index].line["settings"]["lr"] == best
    assert extended(study(), {"lr": 2}, **how, seconds=1e-9) is not None


def test_next_value_has_the_same_ratio() -> None:
    for outer, inner, wanted in ((0.3, 0.1, 0.9), (0.1, 0.03, 0.333), (0.1, 0.3, 0.0333), (0.01, 0.1, 0.001)):
        assert beyond(outer, inner) == wanted
    assert beyond(1.0001, 1.0) == pytest.approx(1.0001**2, rel=1e-12)
    assert 1.0 > beyond(1.0, 1.0001) > 0.9998
