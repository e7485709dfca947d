"""Tables show the content of records, and intervals have their stated coverage."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.study import (
    Records,
    Table,
    markdown_table,
    mean_std,
    paired_differences,
    summary_table,
)  # fmt: skip
from distillkit.study._tables import interval
from tests.distillkit.study.sample_records import record
from tests.refused import refused

RUNS = [
    *(record([0.1, last + 0.1, last], "FedAvg", seed) for seed, last in enumerate((0.5, 0.6, 0.7))),
    *(record([0.1, 0.8, last], "FedProx", seed, up=500_000) for seed, last in enumerate((0.6, 0.6))),
    *(record(last, "DM", seed, epsilon=eps) for seed, last, eps in ((0, 0.3, 8.0), (1, 0.5, 7.5), (2, 0.4, 8.0))),
    *(record([None, None, None], "Local", seed) for seed in range(3)),
]
HELD = "accuracy_clients.worst10"


def test_summary_table_shows_the_records() -> None:
    table = summary_table(RUNS, columns=["bytes_up", HELD])
    none = ("–", "–", "–")
    assert table.cells == (
        ("digits", "FedAvg", "3", "60.0 ± 10.0", "70.0 ± 10.0", "70.0 (round 2)", "–", "3.00 ± 0.00", "30.0 ± 5.0"),
        ("digits", "FedProx", "2 of 3", "60.0 ± 0.0", "80.0 ± 0.0", "80.0 (round 2)", "–", "1.50 ± 0.00", "30.0 ± 0.0"),
        ("digits", "DM", "3", "40.0 ± 10.0", "40.0 ± 10.0", "–", "8.00", "–", "–"),
        ("digits", "Local", "3", *none, "–", "3.00 ± 0.00", "–"),
    )
    assert table.header[-3:] == ("ε", "bytes up (MB)", "accuracy clients.worst10 (%)")
    assert table.header[:-3] == ("task", "method", "seeds", "last %", "best % *", "best of the seeds' mean % *")
    head, rule, *lines = str(table).splitlines()[:6]
    assert head.startswith("| task   | method  |  seeds |      last % |    best % * | best of the seeds' mean % * |")
    assert rule.startswith("| ------ | ------- | -----: | ----------: |")
    assert lines[1].startswith(
        "| digits | FedProx | 2 of 3 |  60.0 ± 0.0 |  80.0 ± 0.0 |              80.0 (round 2) |"
    )
    assert "DM on digits: ε is the largest of 7.50 to 8.00." in str(table)
    first, second = table.rows[:2]
    assert (first["method"], first["seeds"], first["seeds_wanted"]) == ("FedAvg", 3, 3)
    assert (second["method"], second["seeds"], second["seeds_wanted"]) == ("FedProx", 2, 3)
    assert [first[k] for k in ("accuracy_last", "accuracy_last_std")] == pytest.approx([0.6, 0.1])
    assert [first[k] for k in ("accuracy_best_mean", "accuracy_best_mean_round")] == pytest.approx([0.7, 2])
    assert (first["bytes_up"], first[HELD]) == pytest.approx((3e6, 0.3))
    assert all(row.keys() == first.keys() for row in table.rows)


def test_failures_and_missing_seeds_are_noted_beside_a_mean() -> None:
    runs = [record([0.5], "A", 0, failed=2), record([0.5], "A", 1, failed=1, epsilon=3.0)]
    said = str(summary_table(runs))
    assert "A on digits: 3 client replies failed and were left out." in said
    assert "A on digits: 1 of 2 runs have no epsilon, so the method has none." in said
    assert summary_table(runs).rows[0]["epsilon"] is None
    burnt = [record(None, "A", 0, error="loss is nan"), record([0.5], "A", 1)]
    assert "A on digits: 1 of 2 runs failed (loss is nan)." in str(summary_table(burnt))
    uneven = [record([0.5], "A", 0), record([0.5, 0.7], "A", 1)]
    assert summary_table(uneven).cells[0][5] == "– (other rounds)"
    some = [record([0.5], "A", 0), record(None, "A", 1)]
    assert summary_table(some).cells[0][3] == "50.0 (1 of 2 runs)"
    assert "a single seed has none" in str(summary_table([record(0.5)]))
    runs = [record([0.5], "A", 0, failed=2, epsilon=3.0), record([0.5], "A", 1, failed=1), record([0.5], "A", 2)]
    said = str(summary_table(runs))
    assert "A on digits: 3 client replies failed and were left out." in said
    assert "A on digits: 2 of 3 runs have no epsilon, so the method has none." in said
    assert summary_table(runs).rows[0]["epsilon"] is None
    stopped = replace(record([0.9]), line={**record(None, "A", 1).line, "error": "too late"})
    burnt = [record(None, "A", 0, error="loss is nan"), stopped, record([0.5], "A", 2)]
    assert "A on digits: 2 of 3 runs failed (loss is nan)." in str(summary_table(burnt))
    assert summary_table(burnt).cells[0][5] == "50.0 (round 1)"
    uneven = [record([0.5, None], "A", 0), record([None, 0.7], "A", 1)]
    assert summary_table(uneven).cells[0][5] == "– (other rounds)"


def test_settings_are_strings_and_not_measurements() -> None:
    runs = [record(0.5, "A", seed, settings={"lr": lr, "on": True}) for seed, lr in ((0, 0.3), (1, 0.3), (2, 0.1))]
    assert summary_table(runs, columns=["settings.lr", "settings.on"]).cells[0][-2:] == ("0.3, 0.1", "true")


def test_epsilon_has_its_unit_of_privacy_and_its_absence_a_reason() -> None:
    facts = {"delta": 1e-5, "relation": "add or remove one record"}
    runs = [
        record(0.5, "A", epsilon=8.0, epsilon_remarks=["loose by 4 %"], **facts),
        record(0.5, "B", epsilon_reason="the noise was seeded.", **facts),
    ]
    said = str(summary_table(runs))
    assert "ε (delta 1e-05, add or remove one record) of one run. Every further run" in said
    assert "A on digits: loose by 4 %." in said
    assert "B on digits: the noise was seeded." in said
    runs = [
        *(record(0.5, "A", s, epsilon=8.0 + s / 9, epsilon_remarks=["loose by 4 %"], **facts) for s in (0, 1)),
        record(0.5, "B", epsilon_reason="the noise was seeded.", **facts),
        record(0.5, "C", epsilon=8.0, delta=1e-6),
    ]
    assert summary_table(runs).notes[2:] == (
        "ε (delta 1e-05, add or remove one record; delta 1e-06) of one run. Every further run on the same records adds "
        "to it.",
        "A on digits: loose by 4 %.", "A on digits: ε is the largest of 8.00 to 8.12.",
        "B on digits: the noise was seeded.",
    )  # fmt: skip
    shown = [summary_table([record(0.5, epsilon=e)]).cells[0][-1] for e in (7.999999999, 8.0, 8.001, 7.991)]
    assert shown == ["8.00", "8.00", "8.01", "8.00"]  # never less than the ledger says
    assert "ε of one run" in str(summary_table([record(0.5, epsilon=8.0)]))
    assert "of one run" not in str(summary_table([record(0.5)]))


def test_candidates_without_a_finished_run_have_a_row() -> None:
    table = summary_table(Records([record([0.5])], [("digits", "FedDM", 0)]))
    assert table.cells[1] == ("digits", "FedDM", "0 of 1", "–", "–", "–")
    assert table.rows[1]["accuracy_last"] is None


def test_best_rounds_are_printed_if_there_are_rounds() -> None:
    made = summary_table([record(0.5, "DM", accuracy_best=None)])
    assert made.header == ("task", "method", "seeds", "last %")
    assert "best round" not in str(made)
    assert made.rows[0]["accuracy_best"] is None
    assert "best % *" in summary_table([record([0.5])]).header


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        (["nothing"], ValueError, r"be among those of the runs \(accuracy, .*bytes_up, .*task\), got 'nothing'"),
        ("bytes_up", TypeError, "be"), ([3], TypeError, "be names, got int"),
        (None, TypeError, "be"), (3, TypeError, "be"),
    ],
)  # fmt: skip
def test_columns_of_no_run_are_refused(columns: Any, error: type[Exception], said: str) -> None:
    refused(lambda: summary_table(RUNS, columns=columns), error, f"columns must {said}")


def test_name_with_a_bar_stays_one_cell_and_html_is_escaped() -> None:
    table = summary_table([record([0.5], "a|b <i>")])
    assert "| a\\|b <i> |" in str(table)
    html = table._repr_html_()
    assert '<td style="text-align: left">a|b &lt;i&gt;</td>' in html
    assert html.count("<td") == html.count("<th ") == len(table.header)


# Paired differences.

seeds = st.integers(2, 6)
accuracy = st.floats(0.2, 0.8)


def runs_of(a: list[float], b: list[float]) -> list[Any]:
    candidates = (("A", a), ("B", b))
    return [record(value, candidate, seed) for candidate, values in candidates for seed, value in enumerate(values)]


@given(seeds.flatmap(lambda n: st.tuples(*[st.lists(accuracy, min_size=n, max_size=n)] * 2)))
def test_interval_equals_the_textbook_formula(pair: tuple[list[float], list[float]]) -> None:
    """Mean ± t s / sqrt(n), with t of 95 % from the table of Student's distribution."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706}
    d = np.array(pair[1]) - np.array(pair[0])
    half = table[len(d) - 1] * math.sqrt(sum((d - d.mean()) ** 2) / (len(d) - 1)) / math.sqrt(len(d))
    [row] = paired_differences(runs_of(*pair), "A").rows
    assert (row["method"], row["base"], row["seeds"]) == ("B", "A", len(d))
    assert row["difference"] == pytest.approx(d.mean(), abs=1e-12)
    assert [row["low"], row["high"]] == pytest.approx([d.mean() - half, d.mean() + half], abs=1e-4)


@given(seeds.flatmap(lambda n: st.tuples(*[st.lists(accuracy, min_size=n, max_size=n)] * 3)))
def test_shift_of_each_seed_changes_nothing_and_sides_are_opposite(drawn: tuple[list[float], ...]) -> None:
    a, b, shift = drawn
    [row] = paired_differences(runs_of(a, b), "A").rows
    moved = [[x + (s - 0.5) / 3 for x, s in zip(values, shift)] for values in (a, b)]
    [same] = paired_differences(runs_of(*moved), "A").rows
    [opposite] = paired_differences(runs_of(a, b), "B").rows
    for key, other, sign in (("difference", "difference", -1), ("low", "high", -1), ("high", "low", -1)):
        assert same[key] == pytest.approx(row[key], abs=1e-9)
        assert opposite[other] == pytest.approx(sign * row[key], abs=1e-12)


def test_only_common_seeds_count_and_a_missing_interval_is_noted() -> None:
    runs = [
        *(record(0.5, "FedAvg", seed) for seed in range(3)),
        *(record(0.5 + 0.1 * seed, "one", seed) for seed in (1,)),
        *(record(a, "clear", seed) for seed, a in enumerate((0.7, 0.71, 0.72))),
        *(record(a, "unclear", seed) for seed, a in enumerate((0.4, 0.61, 0.7))),
        *(record(a, "untested", seed) for seed, a in ((0, None), (1, 0.6), (2, 0.62))),
        record(0.9, "apart", 9),
        *(record(0.5, "same", seed) for seed in range(3)),
    ]
    table = paired_differences(runs)
    found = {row["method"]: row for row in table.rows}
    assert {m: (r["seeds"], r["caution"]) for m, r in found.items()} == {
        "one": (1, "one seed: no interval"), "clear": (3, ""), "unclear": (3, "the interval contains 0"),
        "untested": (2, "the interval contains 0"), "apart": (0, "no seed of both"),
        "same": (3, "the interval contains 0"),
    }  # fmt: skip
    assert (found["one"]["difference"], found["one"]["low"]) == (pytest.approx(0.1), None)
    assert table.cells[0][2:] == ("1 of 4", "+10.0", "–", "one seed: no interval")
    assert table.cells[4][3:] == ("–", "–", "no seed of both")
    assert table.cells[1][3] == "+21.0"


def test_impossible_bases_and_confidences_are_refused() -> None:
    runs = runs_of([0.1], [0.2])
    with pytest.raises(ValueError, match="base must be on every task; 'digits' has no 'FedAvg', but 'A', 'B'"):
        paired_differences(runs)
    for confidence in (0.0, 1.0, 95):
        with pytest.raises(ValueError, match="confidence must"):
            paired_differences(runs, "A", confidence=confidence)
    refused(lambda: paired_differences(runs, "A", column="run"), ValueError, "column must hold numbers; 'run' holds")
    refused(lambda: paired_differences(runs, "A", column="nothing"), ValueError, "columns must be among")
    runs += [record(0.1, "C", good=True)]
    for column, held in (("run", "'digits-A-0'"), ("good", "True")):
        said = f"column must hold numbers; '{column}' holds {held}"
        refused(lambda column=column: paired_differences([*runs[::2], runs[1]], "A", column=column), ValueError, said)
    refused(lambda: paired_differences(runs, "A", column="nothing"), ValueError, "columns must be among")
    some = [*runs, record(0.5, "D", task="other"), record(0.5, "D", task="third")]
    refused(lambda: paired_differences(some, "A"), ValueError, "base must be .*; 'other' has no 'A', but 'D'$")


def test_other_columns_keep_their_units() -> None:
    runs = [record([0.5], candidate, seed, seconds=s) for candidate, s in (("A", 2.0), ("B", 4.0)) for seed in (0, 1)]
    table = paired_differences(runs, "A", column="client_seconds")
    assert table.header[3] == "client seconds minus A's (s)"
    assert table.cells[0][3] == "+2.0"
    far = [record([0.5], c, seed, gap=g) for c, g in (("A", -500.25), ("B", -0.25)) for seed in (0, 1)]
    assert paired_differences(far, "A", column="gap").cells[0][3] == "+500.0"


@pytest.mark.parametrize(
    ("column", "values", "unit", "cells"),
    [
        ("client_seconds", (2.0, 4.0, 4.5), " (s)", ("+2.2", "[+0.7, +3.8]")),
        ("gap", (-500.25, -0.25, 0.75), "", ("+500.5", "[+497.3, +503.7]")),
        ("gap", (0.25, -0.25, 0.5), "", ("-0.125", "[-2.493, +2.243]")),
        ("accuracy_last", (0.5, 0.75, 0.25), " (points)", ("+0.0", "[-157.8, +157.8]")),
    ],
)
def test_differences_have_the_units_of_their_column(column: str, values: Any, unit: str, cells: Any) -> None:
    base, first, second = values
    held = [("A", 0, base), ("A", 1, base), ("B", 0, first), ("B", 1, second)]
    runs = [record([0.5], method, seed, **{column: value}) for method, seed, value in held]
    table = paired_differences(runs, "A", column=column, confidence=0.9)
    shown = f"{column.replace('_', ' ')} minus A's{unit}"
    assert table.header == ("task", "method", "seeds of both", shown, "90 % interval", "caution")
    caution = "" if cells[1][1] == "+" else "the interval contains 0"
    assert table.cells == (("digits", "B", "2", *cells, caution),)
    assert table.rows[0]["caution"] == caution


@pytest.mark.parametrize(
    ("column", "values", "header", "cell"),
    [
        ("images", [10, 10], "images", "10"), ("images", [10, 13], "images", "11.5 ± 2.1"),
        ("images", [10, None, None], "images", "10 (1 of 3 runs)"), ("images", [None], "images", "–"),
        ("client_seconds", [2.0, 2.0], "client seconds (s)", "2.0 ± 0.0"), ("more_bytes", [None], "more bytes", "–"),
        ("part.seconds", [2, 4], "part.seconds (s)", "3.0 ± 1.4"), ("seconds.of", [2, 4], "seconds.of", "3.0 ± 1.4"),
        ("all_bytes.up", [1e6, 2e6], "all bytes.up (MB)", "1.50 ± 0.71"),
        ("accuracy", [0.5, 0.6], "accuracy (%)", "55.0 ± 7.1"),
        ("loss", [0.5, 0.25], "loss", "0.375 ± 0.177"), ("loss", [0.5, 100.0], "loss", "50.2 ± 70.4"),
        ("loss", [-100.5, -50.25], "loss", "-75.4 ± 35.5"), ("loss", [0.5, 0.5], "loss", "0.500"),
        ("on", [True, False, True], "on", "true, false"), ("name", ["a", "b", "a"], "name", "a, b"),
        ("pair", [[1, 2]], "pair", "[1, 2]"), ("settings.steps", [3, 5], "settings.steps", "3, 5"),
    ],
)  # fmt: skip
def test_values_have_the_unit_and_digits_of_their_column(column: str, values: Any, header: str, cell: str) -> None:
    table = summary_table([record(0.5, seed=seed, **{column: v}) for seed, v in enumerate(values)], columns=[column])
    assert (table.header[-1], table.cells[0][-1]) == (header, cell)


@pytest.mark.parametrize(("seeds", "named"), [(1, []), (2, ["B on digits has 2"]), (3, [])])
def test_intervals_from_two_seeds_have_a_caution(seeds: int, named: list[str]) -> None:
    runs = [record(0.5 + 0.01 * seed, name, seed) for name in ("A", "B") for seed in range(seeds)]
    runs += [record(0.1 * seed, "C", seed) for seed in range(4)] + [record(0.2 * seed, "A", seed) for seed in (3,)]
    notes = paired_differences(runs, "A").notes
    cautions = [note for note in notes if note.startswith("Caution: an interval from fewer than 3 seeds")]
    assert len(notes) == 1 + len(cautions)
    few = named if seeds > 1 else ["C on digits has 2"]
    assert [note.partition(": ")[2].partition(": ")[2] for note in cautions] == [f"{'; '.join(few)}."] * bool(few)


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        ((3,), "."),
        ((1, 3), "; a single seed has none."),
        ((2, 3), "; that of two seeds is very uncertain."),
        ((1, 2), "; a single seed has none; that of two seeds is very uncertain."),
    ],
)
def test_deviations_of_few_seeds_are_named(sizes: tuple[int, ...], ends: str) -> None:
    runs = [record(0.5, str(size), seed) for size in sizes for seed in range(size)]
    assert summary_table(runs).notes[0] == f"± gives the sample standard deviation over seeds (n - 1){ends}"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_mean_and_standard_deviation_are_those_of_the_sample(values: list[float]) -> None:
    mean, std = map(float, mean_std(values, 100, 3).split(" ± "))
    assert mean == pytest.approx(100 * statistics.mean(values), abs=6e-4)
    assert std == pytest.approx(100 * statistics.stdev(values), abs=6e-4)


def test_columns_are_aligned_and_cells_kept_whole() -> None:
    assert markdown_table(["a", "b"], [["x", "1"], ["x|y", "2\n3"]]) == (
        "| a    |   b |\n| ---- | --: |\n| x    |   1 |\n| x\\|y | 2 3 |"
    )
    assert markdown_table(["a", "b"], [], left=2) == "| a   | b   |\n| --- | --- |"
    with pytest.raises(ValueError, match=r"rows\[1\] must have 2 cells, one per name in header, got 3"):
        markdown_table(["a", "b"], [["x", "1"], ["y", "2", "3"]])


def test_columns_are_added_and_removed() -> None:
    rows = [{"task": "a"}, {"task": "b"}]
    table = Table(("task", "method", "last %"), (("a", "DM", "1.0"), ("b", "DM", "2.0")), rows)
    more = table.with_column("published %", lambda row: {"a": "3.0"}.get(row["task"], ""))
    assert more.cells == (("a", "DM", "1.0", "3.0"), ("b", "DM", "2.0", "–"))
    less = more.without("task", "last %")
    assert (less.header, less.cells, less.rows) == (("method", "published %"), (("DM", "3.0"), ("DM", "–")), rows)
    assert str(less).splitlines()[1] == "| ------ | ----------: |"
    starred = Table(("task", "best *"), (("a", "1"),), [{"task": "a"}], ("±: spread.", "*: chosen on the test set."), 1)
    assert starred.without("task").notes == starred.notes
    assert starred.without("best *").notes == ("±: spread.",)
    refused(lambda: table.without("x"), ValueError, "names must be columns of the table, task, method, last %; got 'x'")


def test_interval_widens_with_the_confidence() -> None:
    """The table has 1.5332 for 80 % and 4 degrees of freedom."""
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    half = 1.5332 * statistics.stdev(values) / math.sqrt(5)
    assert interval(values, 0.8) == pytest.approx((0.3 - half, 0.3 + half), abs=1e-4)
