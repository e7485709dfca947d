"""One line a round, and what is read off the lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distillkit import check
from fl.task import LabelTask

__all__ = [
    "SeedMean",
    "accuracy_best",
    "accuracy_last",
    "best_seed_mean",
    "global_metrics",
    "masked",
    "rounds_to",
    "summary",
    "table",
]

Row = Mapping[str, Any]


def global_metrics(sums: Mapping[str, Tensor], task: LabelTask) -> dict[str, Any]:
    """Metrics on the global test set: one model's own, or the mean over several, and each one's accuracy by name.

    Args:
        sums: of each model over all test images, see `LabelTask.sums`.
        task: what the labels mean.
    """
    by_name = {name: task.metrics(s) for name, s in sums.items()}
    if not by_name:
        return {}
    first = next(iter(by_name.values()))
    found: dict[str, Any] = {k: sum(m[k] for m in by_name.values()) / len(by_name) for k in first}
    if len(by_name) > 1:
        found["accuracy_by"] = {name: m["accuracy"] for name, m in by_name.items()}
    return found


def accuracy_last(rows: Sequence[Row]) -> float | None:
    """The accuracy after the last round of a history's `rows`, a fraction; None without one."""
    return rows[-1]["accuracy"] if rows else None


def accuracy_best(rows: Sequence[Row]) -> float | None:
    """The best accuracy after any round of a history's `rows`, a fraction; None without one.

    It was chosen on the test set: quote it as such.
    """
    known = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return max(known, default=None)


def rounds_to(rows: Sequence[Row], target: float) -> int | None:
    """How many rounds a run needed to a target accuracy: the first whose accuracy is at least that; None if none is.

    The measure of convergence of VHL's Tables 1, 2, 4 and 5 (Tang et al., ICML 2022), "ROUND", where the target is
    the best accuracy of FedAvg, and "Nan" stands for never. Its speedup is FedAvg's rounds over a method's.

    Args:
        rows: of one history; a round without an accuracy reaches nothing.
        target: a fraction in [0, 1].

    Raises:
        ValueError: a target outside [0, 1].
    """
    check.real_number(target, "target", least=0.0, most=1.0)
    reached = (row["round"] for row in rows if row["accuracy"] is not None and row["accuracy"] >= target)
    return next(reached, None)


@dataclass(frozen=True)
class SeedMean:
    """The best round of the mean curve over seeds.

    Attributes:
        accuracy: of the mean curve in its best round, a fraction. Chosen on the test set: quote it as such.
        round: the first such round.
        deviation: the largest distance from `accuracy` to a seed's own best accuracy: no standard deviation.
    """

    accuracy: float
    round: int
    deviation: float


def best_seed_mean(runs: Sequence[Sequence[Row]]) -> SeedMean:
    """The maximum over rounds of the mean over seeds, which the single image's tables give as their accuracy.

    The +- of those tables (Soni, Saeed and Asano, 2024) is `deviation`: max(mean - worst seed's best, best seed's best
    - mean), lines 114-131 of the release's plotting_scripts/multiseed_helper.py.

    Args:
        runs: the histories of one method under several seeds, of the same rounds.

    Raises:
        ValueError: no run, no round, histories of other rounds, or a round without an accuracy.
    """
    if not runs or not runs[0]:
        got = f"{len(runs)} histories, the first of them empty" if runs else "none"
        raise ValueError(f"runs must hold at least one history of at least one round, got {got}")
    numbers = [row["round"] for row in runs[0]]
    for index, rows in enumerate(runs):
        if [row["round"] for row in rows] != numbers:
            raise ValueError(f"runs must have the same rounds: runs[{index}] has {len(rows)}, runs[0] {len(numbers)}")
        missing = [row["round"] for row in rows if row["accuracy"] is None]
        if missing:
            raise ValueError(f"runs[{index}] has no accuracy in round {missing[0]}: give simulate a test set")
    curves = torch.tensor([[row["accuracy"] for row in rows] for rows in runs], dtype=torch.float64)
    mean = curves.mean(0)
    best = int(mean.argmax())
    apart = (curves.amax(1) - mean[best]).abs().max()
    return SeedMean(float(mean[best]), numbers[best], float(apart))


_BY_CLIENT = ("bytes_by_client", "failed", "failed_evaluation")


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The `rows` of a history with one value a column, for `pandas.DataFrame(table(rows))` or `csv.DictWriter`.

    A mapping becomes columns of its own ("accuracy_clients.mean", "up.FedAvg.update"); of lists of clients, and of
    what is kept by client (who failed and why), the number of clients stays. Every row has all columns; what a round
    lacks is None.
    """
    flat = [dict(_flat(row)) for row in rows]
    columns = dict.fromkeys(name for row in flat for name in row)
    return [{name: row.get(name) for name in columns} for row in flat]


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, list | tuple) or (name in _BY_CLIENT and isinstance(value, Mapping)):
            yield prefix + name, len(value)
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def masked(row: Row) -> dict[str, Any]:
    """The `row` of a round whose clients were drawn in secret: nobody is named, how many failed and why stays."""
    hidden = {**row, "drawn": None, "bytes_by_client": None, "empty": [None] * len(row["empty"])}
    for key in ("failed", "failed_evaluation"):
        if key in row:
            hidden[key] = {f"#{i + 1}": why for i, why in enumerate(sorted(row[key].values()))}
    return hidden | ({"noted": None} if "noted" in row else {})


def summary(rows: Sequence[Row], **names: Any) -> dict[str, Any]:
    """The object that `summary.json` holds for one finished run.

    Args:
        rows: of its history.
        names: what tells it from others: run, method, task, split, seed.
    """
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
