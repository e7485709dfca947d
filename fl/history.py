"""One line a round, and what is read off the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.task import Task

__all__ = ["accuracy_best", "accuracy_last", "clients_accuracy", "global_metrics", "masked", "summary"]

Row = Mapping[str, Any]


def global_metrics(sums: Mapping[str, Tensor], task: Task) -> dict[str, Any]:
    """Metrics on the global test set: one model's own, or the mean over several, and each one's accuracy by name."""
    by_name = {name: task.metrics(s) for name, s in sums.items()}
    if not by_name:
        return {}
    first = next(iter(by_name.values()))
    found: dict[str, Any] = {k: sum(m[k] for m in by_name.values()) / len(by_name) for k in first}
    if len(by_name) > 1:
        found["accuracy_by"] = {name: m["accuracy"] for name, m in by_name.items()}
    return found


def clients_accuracy(accuracies: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, and the mean of the worst tenth (at least one) of per-client test accuracies."""
    values = torch.tensor(sorted(accuracies), dtype=torch.float64)
    worst = max(1, len(values) // 10)
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst10": float(values[:worst].mean()),
        "clients": len(values),
    }


def accuracy_last(rows: Sequence[Row]) -> float | None:
    """The accuracy after the last round, a fraction."""
    return rows[-1]["accuracy"] if rows else None


def accuracy_best(rows: Sequence[Row]) -> float | None:
    """The best accuracy after any round, a fraction. It was chosen on the test set: quote it as such."""
    known = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return max(known, default=None)


def masked(row: Row) -> dict[str, Any]:
    """The row of a round whose clients were drawn in secret: nobody is named, and how many failed and why stays."""
    hidden = {**row, "drawn": None, "bytes_by_client": None, "empty": [None] * len(row["empty"])}
    for key in ("failed", "failed_evaluation"):
        if key in row:
            hidden[key] = {f"#{i + 1}": why for i, why in enumerate(sorted(row[key].values()))}
    return hidden | ({"noted": None} if "noted" in row else {})


def summary(rows: Sequence[Row], **names: Any) -> dict[str, Any]:
    """The object that `summary.json` holds for one finished run; `names` are run, method, task, split, seed."""
    last = rows[-1] if rows else {}
    return {
        **names,
        "rounds": len(rows),
        "accuracy_last": accuracy_last(rows),
        "accuracy_best": accuracy_best(rows),
        **{k: sum(row[k] for row in rows) for k in ("bytes_up", "bytes_down", "client_seconds", "seconds")},
        "epsilon": last.get("epsilon"),
        "failed": sum(len(row["failed"]) for row in rows),
    }
