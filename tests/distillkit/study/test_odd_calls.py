"""Unusual calls of functions that read and show records: refused by name, or accepted for a reason given here."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from distillkit.study import (
    Record,
    curves,
    markdown_table,
    mean_std,
    paired_differences,
    pictures,
    power_analysis,
    read_choice,
    read_records,
    seeds_needed,
    summary_table,
    tuning_table,
)
from fl.study import at_equal, to_target, worst_clients
from tests.distillkit.study.sample_records import record
from tests.distillkit.study.test_tuning import AVG, write
from tests.odd_calls import Call, Listed, table_tests


def runs() -> list[Record]:
    return [record([0.1, 0.5], candidate, seed) for candidate in ("FedAvg", "FedProx") for seed in (0, 1)]


def pilot() -> list[Record]:
    accuracies = {"FedAvg": (0.5, 0.5, 0.5, 0.5, 0.5), "FedProx": (0.51, 0.53, 0.52, 0.56, 0.55)}
    return [record([a], candidate, seed) for candidate, given in accuracies.items() for seed, a in enumerate(given)]


@cache
def folder() -> str:
    return str(write(Path(tempfile.mkdtemp()), {"FedAvg": AVG}))


def C(function: Any, **arguments: Any) -> Call:
    return Call(function, lambda: {k: v() if v in (runs, pilot, folder) else v for k, v in arguments.items()})


CALLS = {
    "Record": C(Record, line=dict(record(0.5).line)),
    "mean_std": C(mean_std, values=[0.1, 0.2]),
    "markdown_table": C(markdown_table, header=["a"], rows=[["1"]]),
    "read_records": C(read_records, folder="nowhere"),
    "pictures": C(pictures, records=runs, task="digits"),
    "summary_table": C(summary_table, records=runs, columns=["bytes_up"]),
    "paired_differences": C(paired_differences, records=runs),
    "power_analysis": C(power_analysis, records=pilot, method="FedProx", effect=0.05),
    "seeds_needed": C(seeds_needed, effect=0.05, std=0.1),
    "curves": C(curves, records=runs, task="digits"),
    "to_target": C(to_target, records=runs, accuracy=0.3),
    "at_equal": C(at_equal, records=runs, budget=1.5),
    "worst_clients": C(worst_clients, records=runs),
    "tuning_table": C(tuning_table, folder=folder, task="digits"),
    "read_choice": C(read_choice, folder=folder),
}
ACCEPTED: Listed = {
    ("summary_table", "columns", "empty"): "no further columns",
    ("Record", "rows", "empty"): "a candidate without rounds has none",
    ("markdown_table", "rows", "empty"): "a table without rows",
    ("markdown_table", "left", "zero"): "all columns stand right",
    ("mean_std", "digits", "zero"): "whole numbers",
    ("mean_std", "scale", "negative"): "losses become gains",
}
OTHERWISE: Listed = {("*", "records", "string"): "the path, which leads nowhere"}


test_odd_calls_are_refused_or_accepted = table_tests(
    CALLS, ACCEPTED, OTHERWISE, lambda name: ("refused" if name in ("read_records", "pictures") else "accepted",)
)
