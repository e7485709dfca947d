"""A study's folder and records with invented numbers, for tests of reading them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit.study import Record, read_choice
from distillkit.study._records import write_json


def row(number: int, accuracy: float | None, up: int = 1_000_000, seconds: float = 2.0) -> dict[str, Any]:
    clients = None if accuracy is None else {"mean": accuracy, "std": 0.1, "worst10": accuracy / 2, "clients": 10}
    return {
        "round": number, "accuracy": accuracy, "loss": 1.0, "bytes_up": up, "bytes_down": 2 * up,
        "client_seconds": seconds, "seconds": 3.0, "failed": {}, "accuracy_clients": clients, "accuracy_by": {"a": 0.1},
        "accuracy_locals": 0.2, "accuracy_personal": 0.3, "client_drift": 0.4, "set_quality": 0.5, "epsilon": None,
    }  # fmt: skip


def record(
    accuracies: Sequence[float | None] | float | None,
    method: str = "FedAvg",
    seed: int = 0,
    *,
    task: str = "digits",
    up: int = 1_000_000,
    seconds: float = 2.0,
    **facts: Any,
) -> Record:
    """Return a federated run with these accuracies by round, or for one number a candidate that makes a set."""
    if accuracies is None or isinstance(accuracies, float | int):
        rows: list[dict[str, Any]] = []
        last = best = accuracies
    else:
        rows = [row(number, a, up, seconds) for number, a in enumerate(accuracies, 1)]
        last, best = accuracies[-1], max((a for a in accuracies if a is not None), default=None)
    line = {
        "run": f"{task}-{method}-{seed}", "task": task, "method": method, "seed": seed, "rounds": len(rows) or None,
        "accuracy_last": last, "accuracy_best": best, "bytes_up": len(rows) * up or None,
        "bytes_down": 2 * len(rows) * up or None, "client_seconds": len(rows) * seconds or None, "seconds": 3.0,
        "epsilon": None, "failed": 0, **facts,
    }  # fmt: skip
    return Record(line, rows)


def write(folder: Path, records: Sequence[Record], plan: Mapping[str, Any] | None = None) -> Path:
    """Write the folder of a study with these runs."""
    for r in records:
        own = folder / str(r.line["run"])
        own.mkdir(parents=True)
        write_json(own / "summary.json", dict(r.line))
        if r.rows:
            lines = "".join(f"{json.dumps(dict(line))}\n" for line in r.rows)
            (own / "history.jsonl").write_text(lines, encoding="utf-8")
    if plan is not None:
        write_json(folder / "study.json", plan)
    return folder


def search_sizes(folder: Path) -> dict[str, int]:
    """Return the number of configurations by task, which all candidates with a search of their own must share."""
    counts: dict[str, set[int]] = {}
    for one in read_choice(folder)[0]:
        if one.like is None:
            counts.setdefault(one.task, set()).add(max(1, len(one.configurations)))
    assert all(len(sizes) == 1 for sizes in counts.values()), counts
    return {task: sizes.pop() for task, sizes in counts.items()}
