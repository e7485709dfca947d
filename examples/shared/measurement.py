"""Measurements of the finished runs of a study, stored in their folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from distillkit.study import Records, Table, mean_std
from shared.files import write_file

Found = dict[str, list[dict[str, float]]]


def measure_runs(records: Records, file: str, measure: Callable[[Path], dict[str, float]]) -> Found:
    """Return the measurements of all runs by method.

    Args:
        records: records of the study, which have folders. Failed runs are left out.
        file: name of the file in each run's folder that stores the measurement.
        measure: function of the folder.
    """
    found: Found = {}
    for record in (r for r in records if not r.failed):
        path = Path(str(record.folder)) / file
        if not path.exists():
            write_file(path, json.dumps(measure(path.parent)) + "\n")
        found.setdefault(record.method, []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def share_table(
    found: Found, columns: Mapping[str, str], note: str, known: Mapping[str, Mapping[str, str]] | None = None
) -> Table:
    """Return a table of mean shares in per cent, one row per method.

    Args:
        found: measurements by method.
        columns: heading of each measurement.
        note: sentence below the table.
        known: numbers of a paper that are shown in brackets, by method and measurement.
    """
    cells, rows = [], []
    for method, runs in found.items():
        paper = (known or {}).get(method, {})
        shown = {key: mean_std([run[key] for run in runs], 100.0) for key in columns}
        cells.append((method, *(f"{text} ({paper[key]})" if key in paper else text for key, text in shown.items())))
        rows.append({"method": method, **{key: sum(run[key] for run in runs) / len(runs) for key in columns}})
    return Table(("method", *columns.values()), tuple(cells), rows, (note,), left=1)
