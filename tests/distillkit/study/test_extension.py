"""Searches are extended beyond an edge, by equally many configurations for all candidates, and resumably."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.study import Study, equal_search_sizes, grid, read_choice, tuning_table
from distillkit.study._extension import _beyond, extend_searches
from tests.distillkit.study.test_study import Known, Number, executed, task


@pytest.fixture(autouse=True)
def fresh() -> None:
    Known.executed.clear()
    Known.stop_at = ""


def peaked(peak: float, values: Sequence[float] = (0.1, 1.0, 10.0), highest: float = math.inf, **options: Any) -> Known:
    """Return a candidate whose accuracy is highest at lr=`peak`, and that diverges above `highest`."""

    def make(factory: Any, lr: float) -> Number:
        return Number(-1.0 if lr > highest else 90 - 10 * abs(math.log10(lr / peak)))

    return Known(make, **{"search": grid(lr=list(values)), **options})


def rates(folder: Path) -> dict[str, list[float]]:
    return {one.method: [t["settings"]["lr"] for t in one.configurations] for one in read_choice(folder)[0]}


def study(folder: Path, peaks: dict[str, Any], times: int = 2, **options: Any) -> Study:
    candidates = {name: peak if isinstance(peak, Known) else peaked(peak) for name, peak in peaks.items()}
    return Study(folder, task(), candidates, seeds=(0,), extend={"lr": times}, **options)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ((1.0, 1.0), []),
        ((10.0, 1.0), [100.0]),
        ((100.0, 1.0), [100.0, 1000.0]),
        ((1e6, 1.0), [100.0, 1000.0]),
        ((1e-6, 1.0), [0.01, 0.001]),
        ((10.0, 0.1), [0.01, 100.0]),
        ((100.0, 0.1), [0.01, 100.0, 1000.0]),
    ],
)
def test_all_candidates_are_extended_alike(tmp_path: Path, peaks: tuple[float, float], expected: list[float]) -> None:
    made = study(tmp_path, {"A": peaks[0], "B": peaks[1]})
    executed(made)
    assert rates(tmp_path)["A"] == rates(tmp_path)["B"] == [0.1, 1.0, 10.0, *expected]
    assert equal_search_sizes(tmp_path) == {"made": 3 + len(expected)}
    for number, record in enumerate(made.records()[:2]):
        assert record.line["settings"]["lr"] == min(
            rates(tmp_path)["A"], key=lambda lr: abs(math.log(lr / peaks[number]))
        )
    shown = tuning_table(tmp_path).cells[0][3]
    assert shown == (f"{3 + len(expected)} ({len(expected)} added)" if expected else "3")


def test_control_takes_the_extended_choice(tmp_path: Path) -> None:
    made = study(tmp_path, {"A": 100.0, "B": peaked(1.0, search=[{}], like="A")})
    executed(made)
    assert [record.line["settings"] for record in made.records()] == [{"lr": 100.0}, {"lr": 100.0}]


def test_extension_that_diverges_is_not_chosen_and_ends_the_search(tmp_path: Path) -> None:
    made = study(tmp_path, {"A": peaked(1e6, highest=50.0)}, times=3)
    executed(made)
    assert rates(tmp_path)["A"] == [0.1, 1.0, 10.0, 100.0]
    assert made.records()[0].line["settings"] == {"lr": 10.0}
    assert tuning_table(tmp_path).cells[0][3] == "4 (1 added, 1 failed)"


@pytest.mark.slow
def test_extended_study_resumes_after_an_interruption(tmp_path: Path) -> None:
    def made(place: str) -> Study:
        return study(tmp_path / place, {"A": 1000.0, "B": 0.1}, tune_seeds=(100, 101))

    whole = executed(made("whole"))
    assert len(whole) == len(set(whole)) == 2 * (3 + 3) * 2 + 2
    for place in whole[10:]:
        Known.executed.clear()
        Known.stop_at = place
        with pytest.raises(KeyboardInterrupt):
            executed(made(place))
        Known.stop_at = ""
        assert executed(made(place)) == whole
        for file in ("choice.json", "summary.json"):
            found, wanted = ((tmp_path / name / file).read_text(encoding="utf-8") for name in (place, "whole"))
            assert found == wanted
    assert executed(made("whole")) == whole


def test_tasks_are_extended_on_their_own(tmp_path: Path) -> None:
    def make(factory: Any, lr: float, task: Any) -> Number:
        return Number(90 - 10 * abs(math.log10(lr / (100.0 if task.name == "two" else 1.0))))

    candidates = {name: Known(make, search=grid(lr=[0.1, 1.0, 10.0])) for name in ("A", "B")}
    executed(Study(tmp_path, [task("one"), task("two")], candidates, seeds=(0,), extend={"lr": 3}))
    assert equal_search_sizes(tmp_path) == {"one": 3, "two": 5}
    executed(Study(tmp_path, [task("one"), task("two"), task("three")], candidates, seeds=(0,), extend={"lr": 3}))
    assert equal_search_sizes(tmp_path) == {"one": 3, "two": 5, "three": 3}


def test_other_extensions_and_candidates_are_refused_in_the_same_folder(tmp_path: Path) -> None:
    executed(study(tmp_path, {"A": 10.0, "B": 1.0}))
    other = study(tmp_path, {"A": 10.0, "B": 1.0}, times=1)
    more = study(tmp_path, {"A": 10.0, "B": 1.0, "C": 1.0})
    without = Study(tmp_path, task(), {"A": peaked(10.0), "B": peaked(1.0)}, seeds=(0,))
    for one in (other, more, without):
        with pytest.raises(ValueError, match="study.json has extend="):
            executed(one)
    study(tmp_path, {"A": 10.0, "B": 1.0, "C": peaked(1.0, search=[{}], like="A")}).run(trial=False, progress=False)
    old = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    assert old["extend"] == {"settings": {"lr": 2}, "candidates": ["A", "B"]}


@pytest.mark.parametrize(
    ("extend", "search", "message"),
    [
        ({"lr": 0}, grid(lr=[0.1, 1.0]), r"extend\['lr'\] must be at least 1"),
        ({"mu": 1}, grid(lr=[0.1, 1.0]), "two positive values of 'mu' in every search"),
        ({"lr": 1}, grid(lr=[0.1], mu=[0.1, 1.0]), "two positive values of 'lr'"),
        ({"lr": 1}, grid(lr=[0.0, 0.1]), "two positive values of 'lr'"),
        ({"lr": 1}, grid(lr=[1, 10]), "written as 0.1 or 1.0"),
        ({"lr": 1}, grid(lr=["a", "b"]), "two positive values of 'lr'"),
    ],
)
def test_settings_that_cannot_be_extended_are_refused(
    tmp_path: Path, extend: dict[str, int], search: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Study(tmp_path, task(), {"A": peaked(1.0, search=search)}, extend=extend)


class Spec:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings


rate = st.floats(1e-4, 1e3)
searches = st.lists(rate, min_size=2, max_size=5, unique=True)


@given(st.lists(st.tuples(searches, searches), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 2), st.data())
def test_number_of_configurations_stays_equal(
    made: list[tuple[list[float], list[float]]], times: int, step: int, data: st.DataObject
) -> None:
    """Each candidate gets its best configuration, with one value moved beyond an edge of its own values."""
    runs, scores = {}, {}
    for number, (lrs, mus) in enumerate(made):
        configurations = grid(lr=lrs, mu=mus)
        runs["digits", str(number)] = [[Spec(one)] for one in configurations]
        drawn = data.draw(st.lists(st.integers(0, 9), min_size=len(configurations), max_size=len(configurations)))
        scores["digits", str(number)] = [{"score": score} for score in drawn]
    extend = {"lr": times, "mu": 2}
    found = extend_searches(extend, runs, scores, step)
    edges: set[tuple[str, bool]] = set()
    for key, search in runs.items():
        known = [one["score"] for one in scores[key]]
        best = search[known.index(max(known))][0].settings
        for setting in ("lr", "mu"):
            values = [one.settings[setting] for [one] in search]
            edges |= {(setting, up) for up, end in ((False, min(values)), (True, max(values))) if best[setting] == end}
    wanted = [(setting, up) for setting, up in edges if step < extend[setting]]
    assert {len(more) for more in found.values()} == ({len(wanted)} if wanted else set())
    assert set(found) == (set(runs) if wanted else set())
    for key, more in found.items():
        known = [one["score"] for one in scores[key]]
        best = runs[key][known.index(max(known))][0].settings
        moved = set()
        for one in more:
            [setting] = [name for name in best if one[name] != best[name]]
            values = [spec.settings[setting] for [spec] in runs[key]]
            assert one[setting] > max(values) or 0 < one[setting] < min(values)
            moved.add((setting, one[setting] > max(values)))
        assert moved == set(wanted)


def test_next_value_has_the_same_ratio() -> None:
    for outer, inner, wanted in ((0.3, 0.1, 0.9), (0.1, 0.03, 0.333), (0.1, 0.3, 0.0333), (0.01, 0.1, 0.001)):
        assert _beyond(outer, inner) == wanted
    assert _beyond(1.0001, 1.0) == pytest.approx(1.0001**2, rel=1e-12)
    assert _beyond(1.0001, 1.0) > 1.0001
    assert 1.0 > _beyond(1.0, 1.0001) > 0.9998
