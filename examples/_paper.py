"""Shared parts of the papers' scripts: the papers' numbers, chosen settings, and pictures of sent images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distillkit import LabeledImages, plot
from distillkit.plot.figure import subplots
from distillkit.study import Candidate, Record, Records, Table, curves
from fl import Entry
from fl.engine.store import Store

__all__ = ["ablation_curves", "beside", "chosen", "sets_sent"]


def beside(table: Table, paper: Mapping[str, Mapping[str, str]], source: str) -> Table:
    """A table with the paper's numbers in a column on the right, if it has a number for one of its rows.

    Args:
        table: with a row a task and way.
        paper: the paper's accuracies in per cent by task and way, as it prints them.
        source: which table of which paper, and what there differs from ours: printed below.
    """
    if not any(row["method"] in paper.get(row["task"], {}) for row in table.rows):
        return table
    wide = table.with_column("paper %", lambda row: paper.get(row["task"], {}).get(row["method"], ""))
    return replace(wide, notes=(*wide.notes, f"paper %: {source}"))


def chosen(records: Records, ways: Mapping[str, Candidate], method: str, task: str) -> dict[str, Any]:
    """The settings with which a way of a study ran on a task; before it has run, those of its first try.

    Args:
        records: of the study.
        ways: of the study, by name.
        method, task: the names of both.
    """
    found = next((r for r in records if (r.method, r.task) == (method, task)), None)
    return {**ways[method].settings, **ways[method].search[0]} if found is None else dict(found.last("settings") or {})


def ablation_curves(records: Sequence[Record], main: Sequence[str], names: Sequence[str], path: Path) -> None:
    """Draw the curves of some ablations with those of the main candidates, for the first seed and their tasks."""
    tasks = {record.task for record in records if record.method in names}
    own = [r for r in records if r.task in tasks and r.seed == records[0].seed and r.method in (*main, *names)]
    if own:
        curves(own).savefig(path, dpi=150)


def sets_sent(records: Sequence[Any], entry: Entry[LabeledImages], path: Path, *, per_class: int = 3) -> None:
    """Draw the images that the server has after the last round, a panel a way: of its first finished run.

    Args:
        records: of a study.
        entry: under which a method keeps them, as `FedDM.images`; ways that have none are passed over.
        path: of the picture; none is written where no way has any.
        per_class: the most images of each class, of the first ten classes.
    """
    found: dict[str, LabeledImages] = {}
    for record in records:
        name = f"{record.task}: {record.method}"
        if name in found or record.failed or not record.rows:
            continue
        state = Store(Path(str(record.folder))).state()
        if entry in state:
            held = state[entry]
            found[name] = held[(held.labels < 10).nonzero().flatten()].replace(num_classes=min(10, held.num_classes))
    if not found:
        return
    figure, axes = subplots(None, len(found), 0.5 * per_class + 1.6, 5.6)
    for ax, (name, one) in zip(axes, found.items()):
        plot.grid(one, per_class=per_class, ax=ax)
        ax.set_title(name, fontsize=8)
    figure.savefig(path, dpi=150)
