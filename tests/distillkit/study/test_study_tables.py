"""Tables of a real study show what its folder contains, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillkit.study import (
    Study,
    compare_studies,
    equal_search_sizes,
    paired_differences,
    read_records,
    summary_table,
    tuning_table,
    write_records,
)
from tests.distillkit.study.test_study import Known, known, task


@pytest.fixture(autouse=True)
def fresh() -> None:
    Known.executed.clear()
    Known.stop_at = ""


def study(folder: Path) -> Study:
    candidates = {
        "Low": known(search=[{"value": 10.0}, {"value": 30.0}, {"value": -1.0}]),
        "High": known(search=[{"value": 70.0}, {"value": 90.0}, {"value": 80.0}]),
        "As low": known(like="Low"),
    }
    return Study(folder, [task("a"), task("b")], candidates, seeds=(1, 0), tune_seeds=(100,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Study:
    found = study(tmp_path_factory.mktemp("whole"))
    found.run(trial=False, progress=False)
    return found


def test_interrupted_study_shows_missing_runs_and_resumes_to_equal_tables(whole: Study, tmp_path: Path) -> None:
    half = study(tmp_path / "half")
    Known.stop_at = "b-high-0"
    with pytest.raises(KeyboardInterrupt):
        half.run(trial=False, progress=False)
    found = read_records(half.out)
    assert found.missing == (("b", "High", 0), ("b", "As low", 0))
    assert [line[:3] for line in summary_table(half.out).cells] == [
        ("a", "Low", "2"), ("a", "High", "2"), ("a", "As low", "2"),
        ("b", "Low", "2"), ("b", "High", "1 of 2"), ("b", "As low", "1 of 2"),
    ]  # fmt: skip
    Known.stop_at = ""
    half.run(trial=False, progress=False)
    assert str(summary_table(half.out)) == str(summary_table(whole.out))
    assert {row["verdict"] for row in compare_studies(whole.out, half.out).rows} == {"the same"}


def test_configurations_and_differences_are_read_from_folder_and_file(whole: Study, tmp_path: Path) -> None:
    assert equal_search_sizes(whole.out) == {"a": 3, "b": 3}
    assert [line[1:4] for line in tuning_table(whole.out, task="a").cells] == [
        ("Low", "value=30.0", "3 (1 failed)"), ("High", "value=90.0", "3"), ("As low", "as Low", "–"),
    ]  # fmt: skip
    rows = paired_differences(whole.records(), "Low").rows
    assert [row["difference"] for row in rows] == pytest.approx([0.6, 0.0] * 2)
    assert [row["seeds"] for row in rows] == [2] * 4
    kept = write_records(whole.out, tmp_path / "records.jsonl")
    assert str(tuning_table(kept)) == str(tuning_table(whole.out))
    assert str(summary_table(kept, columns=["settings.value"])) == str(whole.table(columns=["settings.value"]))
