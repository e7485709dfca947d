"""Shared parts of the scripts for papers: a column of the paper's numbers, tables, selected settings and pictures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distillkit import LabeledImages, plot
from distillkit.plot.figure import subplots
from distillkit.study import Candidate, Records, Table, paired_differences, summary_table
from fl import Entry
from fl.engine.store import Store

Paper = Mapping[str, Mapping[str, str]]
"""The paper's accuracies in per cent, as printed, by task and candidate."""


def with_paper(table: Table, paper: Paper, source: str) -> Table:
    """Return a table with a column of the paper's numbers, if the paper has one for any of its rows.

    Args:
        table: one row per task and candidate.
        paper: the paper's numbers.
        source: name of the paper's table, and its differences from this study; printed below the table.
    """
    if not any(row["method"] in paper.get(row["task"], {}) for row in table.rows):
        return table
    wide = table.with_column("paper %", lambda row: paper.get(row["task"], {}).get(row["method"], ""))
    return replace(wide, notes=(*wide.notes, f"paper %: {source}"))


def settings_of(records: Records, candidates: Mapping[str, Candidate], method: str, task: str) -> dict[str, Any]:
    """Return the selected settings of a candidate on a task. Without a run, return those of its first configuration.

    Args:
        records: records of the study.
        candidates: candidates of the study, by name.
        method: name of the candidate.
        task: name of the task.
    """
    found = next((r.last("settings") for r in records if (r.method, r.task) == (method, task)), None)
    return dict(found or {**candidates[method].settings, **candidates[method].search[0]})


def late_tables(
    records: Records,
    main: Collection[str],
    base: str,
    compared: Sequence[str],
    columns: Sequence[str],
    paper: Paper,
    source: str,
) -> list[Table]:
    """Return a table of the main candidates, their paired differences from one of them, and a table of one seed.

    Args:
        records: records with the column `accuracy_late`.
        main: names of the main candidates. The last table shows all candidates on the tasks of the others.
        base: name of the main candidate with which the others are compared.
        compared: columns of the differences, one table each.
        columns: columns of the tables.
        paper, source: as for `with_paper`.
    """
    own = [record for record in records if record.method in main]
    tried = {record.task for record in records if record.method not in main}
    rest = [record for record in records if record.seed == records[0].seed and record.task in tried]
    shown = [with_paper(summary_table(some, columns=columns), paper, source) for some in (own, rest) if some]
    return [shown[0], *(paired_differences(own, base, column=column) for column in compared), *shown[1:]]


def sets_sent(records: Sequence[Any], entry: Entry[LabeledImages], path: Path, *, per_class: int = 3) -> None:
    """Draw the images that the server has after the last round of each candidate's first finished run.

    Args:
        records: records of a study.
        entry: entry of the server's state that holds the images, such as `FedDM.images`. Candidates without this entry
            are skipped.
        path: path of the picture; nothing is written if no candidate has images.
        per_class: maximum number of images of each of the first ten classes.
    """
    found: dict[str, LabeledImages] = {}
    for record in records:
        name = f"{record.task}: {record.method}"
        if name in found or record.failed or not record.rows:
            continue
        state = Store(Path(str(record.folder))).state()
        if entry in state:
            kept = state[entry]
            found[name] = kept[(kept.labels < 10).nonzero().flatten()].replace(num_classes=min(10, kept.num_classes))
    if not found:
        return
    figure, axes = subplots(None, len(found), 0.5 * per_class + 1.6, 5.6)
    for ax, (name, one) in zip(axes, found.items()):
        plot.grid(one, per_class=per_class, ax=ax)
        ax.set_title(name, fontsize=8)
    figure.savefig(path, dpi=150)
