"""Runs and studies as pandas data frames."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import fl
from distillkit.serialization import to_config
from distillkit.study import Record, Records
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused


def records(lr: dict[str, Any]) -> Records:
    return Records([
        Record({"task": "a", "method": "m", "seed": 0, "accuracy_last": 0.5, "settings": lr, "up": {"x": {"y": 1}}}),
        Record({"task": "a", "method": "m", "seed": 1, "accuracy_last": None, "error": "raised"}),
    ])  # fmt: skip


RECORDS = records(to_config({"lr": 0.1}))


@pytest.mark.parametrize("lr", [{"lr": 0.1}, to_config({"lr": 0.1})])
def test_frame_of_records_has_a_row_per_run(lr: dict[str, Any]) -> None:
    frame = records(lr).frame()
    assert list(frame.index) == [("a", "m", 0), ("a", "m", 1)]
    assert frame.index.names == ["task", "method", "seed"]
    assert list(frame.columns) == ["accuracy_last", "settings.lr", "up.x.y", "error"]
    assert frame.loc[("a", "m", 0), "settings.lr"] == 0.1
    assert frame.isna().to_numpy().tolist() == [[False, False, False, True], [True, True, True, False]]
    assert Records([]).frame().index.names == ["task", "method", "seed"]


def test_frame_of_a_run_has_its_rounds_and_the_columns_of_its_table() -> None:
    run = fl.simulate(fl.FedAvg(factory=Tiny), federation(), rounds=2, test=images(9, 9), progress=False)
    frame = run.frame()
    assert list(frame.index) == [1, 2]
    assert [frame.index.name, *frame.columns] == list(run.table()[0])
    assert frame["accuracy"].tolist() == [row["accuracy"] for row in run.rows]


def test_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused(lambda: RECORDS.frame(), ImportError, r"frame\(\) needs pandas: pip install 'distillkit\[pandas\]'")
