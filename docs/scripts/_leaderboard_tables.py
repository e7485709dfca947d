"""Tables of the leaderboard: accuracies under three kinds of labels, and leaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillkit.study import Record, Records, Table, mean_std

__all__ = ["leaderboard", "leak_table"]

_ACCURACIES = {
    "hard %": "accuracy_last", "one row %": "labels.row", "per view %": "labels.view", "ResNet-8 %": "transfer.resnet8",
    "ViT %": "transfer.vit",
}  # fmt: skip
_LEAKS = {
    "copies %": "leaks.copies", "within 25 dB %": "leaks.within_25_db",
    "within 25 dB of held-out %": "leaks.within_25_db_of_held_out",
    "`nearest` names: used records %": "leaks.nearest.tpr", "held-out records %": "leaks.nearest.fpr",
}  # fmt: skip


def _value(record: Record, name: str) -> float | None:
    """Return a value of a record's summary; parts of the name are keys of nested mappings. Counts become a rate."""
    found: Any = record.line
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found["hits"] / found["trials"] if isinstance(found, Mapping) else found


def _cell(own: Records, name: str, scale: float = 100.0) -> str:
    values = [_value(record, name) for record in own]
    known = [value for value in values if value is not None]
    return mean_std(known, scale) if known else "–"


def _by_method(records: Records) -> dict[tuple[int, str], Records]:
    """Return the records of each number of images per class and method. Names are such as "dm-10"."""
    found = dict[tuple[int, str], Records]()
    for record in records:
        method, _, ipc = record.method.rpartition("-")
        found.setdefault((int(ipc), method), Records([])).append(record)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))  # methods keep their order


def leaderboard(records: Records, options: dict[str, Any]) -> Table:
    """Return the accuracies of a task's methods under each kind of labels, with cost, size and epsilon."""
    cells, rows = [], []
    for (ipc, method), own in _by_method(records).items():
        epsilon = _value(own[0], "epsilon")
        guarantee = "–" if epsilon is None else f"{epsilon:g}"
        shown = [_cell(own, name) for name in _ACCURACIES.values()]
        cost, kilobytes = _cell(own, "cpu_seconds_condense", 1.0), _cell(own[:1], "bytes.images", 1e-3)
        cells.append((str(ipc), method, str(len(own)), *shown, cost, kilobytes, guarantee))
        rows.append({"ipc": ipc, "method": method, "seeds": len(own), "epsilon": epsilon})
    head = ("ipc", "method", "seeds", *_ACCURACIES, "condense CPU s", "images kB", "ε of images")
    return Table(head, tuple(cells), rows, ("± gives the sample standard deviation over seeds (n - 1).",), left=2)


def leak_table(records: Records, options: dict[str, Any]) -> Table:
    """Return the shares of published images that copy a training record or are close to one."""
    cells = [
        (str(ipc), method, *(_cell(own, name) for name in _LEAKS.values()))
        for (ipc, method), own in _by_method(records).items()
    ]
    return Table(("ipc", "method", *_LEAKS), tuple(cells), [{"cells": c} for c in cells], (), left=2)
