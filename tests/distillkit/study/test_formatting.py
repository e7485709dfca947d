"""Formatting of numbers and curves."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.study import Table, markdown_table, mean_std, sparkline
from distillkit.study._tables import Unit, unit_of


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_mean_and_standard_deviation_are_those_of_the_sample(values: list[float]) -> None:
    mean, std = map(float, mean_std(values, 100, 3).split(" ± "))
    assert mean == pytest.approx(100 * statistics.mean(values), abs=6e-4)
    assert std == pytest.approx(100 * statistics.stdev(values), abs=6e-4)


def test_one_value_has_no_deviation() -> None:
    assert (mean_std([0.912], 100), mean_std([1.25, 1.75], digits=2)) == ("91.2", "1.50 ± 0.35")


def test_curve_is_one_line() -> None:
    assert sparkline([0.0, 0.124, 0.125, 0.5, 0.99, 1.0, -1.0, 2.0]) == "▁▁▂▅██▁█"


def test_columns_are_aligned_and_cells_kept_whole() -> None:
    assert markdown_table(["a", "b"], [["x", "1"], ["x|y", "2\n3"]]) == (
        "| a    |   b |\n| ---- | --: |\n| x    |   1 |\n| x\\|y | 2 3 |"
    )
    assert markdown_table(["a", "b"], [], left=2) == "| a   | b   |\n| --- | --- |"
    with pytest.raises(ValueError, match=r"rows\[1\] must have 2 cells, one per name in header, got 3"):
        markdown_table(["a", "b"], [["x", "1"], ["y", "2", "3"]])


def test_units_follow_from_the_columns_name() -> None:
    assert unit_of("accuracy_clients.worst10", [0.1]) == Unit("%", 100.0, 1)
    assert unit_of("bytes_up", [1.0]) == unit_of("up.bytes", []) == Unit("MB", 1e-6, 2)
    assert unit_of("client_seconds", [1.0]) == Unit("s", 1.0, 1)
    assert [unit_of("x", v).digits for v in ([], [3, 3.0], [3, 4], [0.25], [250.5])] == [0, 0, 1, 3, 1]


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
    with pytest.raises(ValueError, match="names must be columns of the table, task, method, last %; got 'x'"):
        table.without("x")
