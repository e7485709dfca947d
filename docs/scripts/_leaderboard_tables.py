"""Tables of the leaderboard: accuracies under three kinds of labels, scores, and leaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillkit.scores import label_robust_score
from distillkit.study import Record, Records, Table, mean_std

__all__ = ["leaderboard", "leak_table", "score_table"]

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
        labels = " / ".join(_cell(own[:1], f"bytes.{kind}", 1e-3) for kind in ("hard", "row", "view"))
        with_labels = "–" if epsilon is None else "none"  # the teacher is trained without privacy
        cells.append((str(ipc), method, str(len(own)), *shown, cost, kilobytes, labels, guarantee, with_labels))
        rows.append({"ipc": ipc, "method": method, "seeds": len(own), "epsilon": epsilon})
    head = (
        "ipc", "method", "seeds", *_ACCURACIES, "condense CPU s", "images kB", "labels kB: hard / row / view",
        "ε of images", "ε with a teacher's labels",
    )  # fmt: skip
    return Table(head, tuple(cells), rows, ("± gives the sample standard deviation over seeds (n - 1).",), left=2)


def score_table(records: Records, options: dict[str, Any]) -> Table:
    """Return the components of the scores of DD-Ranking, and the label-robust score of the sets with hard labels.

    Accuracies are means over seeds. The accuracy of all real images is that of the teacher. Random images are those of
    `random`, or of `random-tiles` for sets of tiles.
    """
    found, cells = _by_method(records), []

    def mean(own: Records, name: str) -> float:
        return sum(_value(record, name) or 0.0 for record in own) / len(own)

    for (ipc, method), own in found.items():
        random = found[ipc, "random-tiles" if method == "dm-tiles" else "random"]
        real, hard = mean(own, "labels.teacher"), mean(own, "accuracy_last")
        gains = [mean(own, name) - mean(random, name) for name in list(_ACCURACIES.values())[:3]]
        score = label_robust_score(
            real_hard=real, data_hard=hard, data_own=hard, random_own=mean(random, "accuracy_last")
        )
        cells.append(
            (str(ipc), method, f"{100 * (real - hard):.1f}", *(f"{100 * g:+.1f}" for g in gains), f"{score:.3f}")
        )
    head = ("ipc", "method", "HLR, points", "IOR hard, points", "IOR one row", "IOR per view", "LRS, hard")
    return Table(head, tuple(cells), [{"cells": c} for c in cells], (), left=2)


def leak_table(records: Records, options: dict[str, Any]) -> Table:
    """Return the shares of published images that copy a training record or are close to one."""
    cells = [
        (str(ipc), method, *(_cell(own, name) for name in _LEAKS.values()))
        for (ipc, method), own in _by_method(records).items()
    ]
    return Table(("ipc", "method", *_LEAKS), tuple(cells), [{"cells": c} for c in cells], (), left=2)
