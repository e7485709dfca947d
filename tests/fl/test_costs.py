"""Costs of runs: until a target, at equal cost, and the accuracy of the worst clients."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.study import Record
from fl.study import at_equal, to_target, worst_clients
from fl.study.costs import BY, spent
from tests.distillkit.study.sample_records import record, row, write
from tests.refused import refused

curve = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=6)
costs = st.lists(st.integers(1, 10**6), min_size=6, max_size=6)
by = st.sampled_from(sorted(BY))


def run(accuracies: list[float | None], method: str = "A", seed: int = 0, each: list[int] | None = None) -> Record:
    """Return a run with a different cost in each round."""
    each = each or [7] * len(accuracies)
    rows = [row(t, a, up, up / 4) for t, (a, up) in enumerate(zip(accuracies, each), 1)]
    line = {"task": "t", "method": method, "seed": seed, "accuracy_last": accuracies[-1]}
    return Record(line, rows)


@given(curve, costs, by)
def test_cumulative_costs_are_sums_over_rounds(accuracies: list[float | None], each: list[int], what: str) -> None:
    rows = run(accuracies, each=each).rows
    total = sum(sum(r[c] for c in BY[what]) if BY[what] else 1 for r in rows)
    found = spent(rows, what)
    assert found[-1] == pytest.approx(total)
    assert len(found) == len(rows)
    assert found == sorted(set(found))


def test_costs_until_a_target_are_computed() -> None:
    runs = [
        run([0.1, 0.5, 0.7], "A", 0), run([0.5, 0.1, 0.5], "A", 1),
        run([0.1, None, 0.9], "B", 0), run([0.2, 0.2, 0.2], "B", 1),
        run([None, None], "C"), record(0.9, "D", task="t"),
    ]  # fmt: skip
    table = to_target(runs, accuracy=0.5)
    assert [cells[1:5] for cells in table.cells] == [
        ("A", "2", "2 of 2", "1.5 ± 0.7"), ("B", "2", "1 of 2", "–"), ("C", "1 of 2", "0 of 1", "–"),
        ("D", "1 of 2", "no rounds", "–"),
    ]  # fmt: skip
    a, b, c, d = table.rows
    assert (a["rounds"], a["bytes"], a["client_seconds"]) == pytest.approx((1.5, 1.5 * 21, 1.5 * 7 / 4))
    assert (a["mean_rounds"], a["mean_bytes"], a["mean_client_seconds"]) == pytest.approx((3, 63, 21 / 4))
    assert (b["reached"], b["rounds"], b["mean_rounds"]) == (1, None, 3)
    assert (c["rounds"], c["mean_rounds"], d["reached"], d["mean_bytes"]) == (None, None, 0, None)
    assert to_target(runs, accuracy=0.6).rows[0]["mean_rounds"] == 3


@given(curve, st.floats(0, 1), st.floats(0, 1))
def test_higher_target_never_costs_less(accuracies: list[float | None], one: float, other: float) -> None:
    low, high = (to_target([run(accuracies)], accuracy=a).rows[0] for a in sorted((one, other)))
    assert low["reached"] >= high["reached"]
    for name in ("rounds", "bytes", "client_seconds"):
        assert low[name] == low[f"mean_{name}"]
        assert high[name] is None or low[name] <= high[name]
    best = max((a for a in accuracies if a is not None), default=-1.0)
    assert bool(low["reached"]) == (best >= min(one, other))


def test_mean_curve_covers_the_rounds_evaluated_for_all_seeds() -> None:
    runs = [run([0.9, 0.1, None, 0.8], "A", 0), run([None, 0.1, 0.9, 0.8], "A", 1)]
    assert to_target(runs, accuracy=0.5).rows[0]["mean_rounds"] == 4


# Equal cost.


@given(curve, costs, by)
def test_single_candidate_keeps_its_own_last_accuracy(
    accuracies: list[float | None], each: list[int], what: str
) -> None:
    one = run(accuracies, each=each)
    tested = [a for a in accuracies if a is not None]
    assert at_equal([one], by=what).rows[0]["accuracy"] == (tested[-1] if tested else None)


@given(st.lists(curve, min_size=2, max_size=4), st.lists(costs, min_size=4, max_size=4), by, st.data())
def test_larger_budget_never_buys_fewer_rounds(
    curves: list[list[float | None]], each: list[list[int]], what: str, data: st.DataObject
) -> None:
    runs = [run(c, f"way {i}", each=e) for i, (c, e) in enumerate(zip(curves, each))]
    most = 2 * max(spent(r.rows, what)[-1] for r in runs)
    low, high = sorted(data.draw(st.tuples(*[st.floats(0.5, most)] * 2)))
    for less, more in zip(at_equal(runs, by=what, budget=low).rows, at_equal(runs, by=what, budget=high).rows):
        assert less["round"] is None or less["round"] <= more["round"]
        name = "round" if what == "rounds" else what
        assert less[name] is None or less[name] <= low
    default = at_equal(runs, by=what)
    smallest = min(spent(r.rows, what)[-1] for r in runs)
    assert {r["budget"] for r in default.rows} == {smallest}
    assert default.rows == at_equal(runs, by=what, budget=smallest).rows
    last = {"rounds": [], "client_seconds": ["client s spent"]}.get(what, ["MB spent"])
    assert [*default.header][-len(last) - 2 :] == ["accuracy %", "after round", *last]


def test_equal_bytes_differ_from_equal_rounds() -> None:
    runs = [run([0.1, 0.2, 0.3, 0.4], "A", seed, [1, 1, 1, 1]) for seed in (0, 1)] + [run([0.5, 0.9], "B", 0, [3, 5])]
    assert [r["accuracy"] for r in at_equal(runs).rows] == [pytest.approx(0.2), 0.9]
    bytes_ = at_equal(runs, by="bytes_up")
    assert [(r["budget"], r["accuracy"], r["bytes_up"]) for r in bytes_.rows] == [(4, 0.4, 4), (4, 0.5, 3)]
    assert at_equal(runs, by="bytes_up", budget=2).cells[1][3:] == ("–", "–", "–")
    mixed = at_equal([*runs, run([0.2], "B", 1, [1])], by="bytes_up", budget=2)
    assert mixed.cells[1][:4] == ("t", "B", "2", "20.0 (1 of 2 runs)")
    assert "within 4 rounds" in str(at_equal(runs, budget=4))
    assert "within 2.50 MB" in str(at_equal(runs, by="bytes_up", budget=2.5e6))


def test_study_folder_gives_the_same_tables(tmp_path: Path) -> None:
    runs = [record([0.1, 0.6], way, seed) for way in ("A", "B") for seed in (0, 1)]
    folder = str(write(tmp_path, runs))
    assert to_target(folder, accuracy=0.5) == to_target(runs, accuracy=0.5)
    assert at_equal(folder, by="bytes") == at_equal(runs, by="bytes")
    assert worst_clients(folder) == worst_clients(runs)


def test_every_task_has_its_own_budget_and_sets_have_none() -> None:
    runs = [record([0.1, 0.2], "A"), record([0.1, 0.2, 0.3], "A", task="other"), record(0.7, "DM")]
    table = at_equal(runs)
    assert [(r["task"], r["method"], r["accuracy"]) for r in table.rows] == [
        ("digits", "A", 0.2), ("digits", "DM", None), ("other", "A", 0.3),
    ]  # fmt: skip
    assert "within 2 rounds on digits, 3 rounds on other" in str(table)


def test_failed_runs_are_ignored_in_budgets() -> None:
    burnt = record([0.5], "B", 1, error="loss is nan", accuracy_last=None)
    [a, b] = at_equal([record([0.1, 0.2], "A"), record([0.1, 0.3], "B"), burnt]).rows
    assert (a["budget"], b["accuracy"]) == (2, 0.3)


# Clients.


def test_worst_clients_after_the_last_round() -> None:
    runs = [record([0.2, a], "A", seed) for seed, a in enumerate((0.4, 0.8))] + [record(0.5, "DM")]
    personal = {**row(1, 0.6), "accuracy_personal": {"mean": 0.9, "std": 0.0, "worst10": 0.7, "clients": 3}}
    runs.append(Record(record([0.6], "Ditto").line, [personal]))
    table = worst_clients(runs)
    assert table.header[3:] == (
        "clients tested", "mean %", "std over clients %", "worst tenth %", "personal: mean %",
        "personal: std over clients %", "personal: worst tenth %",
    )  # fmt: skip
    assert table.cells == (
        ("digits", "A", "2", "10", "60.0 ± 28.3", "10.0 ± 0.0", "30.0 ± 14.1", "–", "–", "–"),
        ("digits", "DM", "1 of 2", "–", *"––––––"),
        ("digits", "Ditto", "1 of 2", "3 to 10", "60.0", "10.0", "30.0", "90.0", "0.0", "70.0"),
    )
    assert table.rows[0]["accuracy_clients.worst10"] == pytest.approx(statistics.fmean((0.2, 0.4)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda r: to_target(r, accuracy=50), r"accuracy must be in \[0, 1\], got 50"),
        (lambda r: at_equal(r, by="seconds"), "by must be one of 'rounds'"),
        (lambda r: at_equal(r, budget=0), "budget must be greater than 0"),
        (lambda r: at_equal([record(0.5)]), "records must hold runs with rounds"),
        (lambda r: worst_clients([record(0.5)]), "records must hold runs whose clients have tests"),
        (lambda r: at_equal([Record(r[0].line, [{"round": 1, "accuracy": 0.5}])], by="bytes"), "lack: bytes_up"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(call: Any, said: str) -> None:
    refused(lambda: call([record([0.5])]), ValueError, said)
