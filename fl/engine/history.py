"""The history of a run, which has one row of results for each round, and values computed from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distillkit._utils.lazy_loading import lazy_submodules
from fl.task import LabelTask

if TYPE_CHECKING:
    from distillkit.study.history import Row, SeedMean, accuracy_best, accuracy_last, best_seed_mean, rounds_to

__all__ = [
    "SeedMean", "accuracy_best", "accuracy_last", "best_seed_mean", "global_metrics", "masked", "rounds_to",
    "summary", "table",
]  # fmt: skip
__getattr__, __dir__ = lazy_submodules(
    __name__,
    (),
    __all__,
    dict.fromkeys(
        ("SeedMean", "accuracy_best", "accuracy_last", "best_seed_mean", "rounds_to"), "distillkit.study.history"
    ),
)


def global_metrics(sums: Mapping[str, Tensor], task: LabelTask) -> dict[str, Any]:
    """Return the metrics of the global models on the global test set, such as `accuracy` and `loss`.

    If there are several models, each metric is their mean, and `accuracy_by` maps the models' names to their
    accuracies. If there is no model, the result is empty.

    Args:
        sums: test results of each model as returned by `LabelTask.sums`, summed over all test images, by model name.
        task: label task, which computes the metrics from the sums.
    """
    by_name = {name: task.metrics(s) for name, s in sums.items()}
    if not by_name:
        return {}
    first = next(iter(by_name.values()))
    found: dict[str, Any] = {k: sum(m[k] for m in by_name.values()) / len(by_name) for k in first}
    if len(by_name) > 1:
        found["accuracy_by"] = {name: m["accuracy"] for name, m in by_name.items()}
    return found


_REASONS = ("failed", "failed_evaluation", "dominant")
"""Columns that map client indices to texts."""


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Flatten the rows of a history, for `pandas.DataFrame(table(rows))` or `csv.DictWriter`.

    A mapping becomes several columns, such as "accuracy_clients.mean" or "up.FedAvg.update". A list, or a mapping by
    client index such as `failed`, is replaced by its length. All rows get the same columns; a missing value is None.

    Args:
        rows: rows of the history, one for each round.
    """
    from distillkit.study.history import require_rows

    flat = [dict(_flat(row)) for row in require_rows(rows)]
    columns = dict.fromkeys(name for row in flat for name in row)
    return [{name: row.get(name) for name in columns} for row in flat]


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "failed_after":
            yield from ((f"{prefix}{name}.{verb}", len(who)) for verb, who in value.items())
        elif isinstance(value, list | tuple) or (name in ("bytes_by_client", *_REASONS) and isinstance(value, Mapping)):
            yield prefix + name, len(value)
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _numbered(reasons: Mapping[str, str]) -> dict[str, str]:
    return {f"#{i + 1}": why for i, why in enumerate(sorted(reasons.values()))}


def masked(row: Row) -> dict[str, Any]:
    """Remove all client indices from the row of a round whose clients were drawn in secret.

    The reasons why clients failed are kept, with the keys "#1", "#2", ... instead of the client indices.
    """
    hidden = {**row, "drawn": None, "bytes_by_client": None, "empty": [None] * len(row["empty"])}
    for key in _REASONS:
        if key in row:
            hidden[key] = _numbered(row[key])
    if "failed_after" in row:
        hidden["failed_after"] = {verb: _numbered(who) for verb, who in row["failed_after"].items()}
    return hidden | ({"noted": None} if "noted" in row else {})


def always_failed(rows: Sequence[Row]) -> dict[str, str]:
    """Return the clients that failed in every round in which they were drawn, with the last reason, by client index.

    Of the `rows` of a history, those of rounds whose clients were drawn in secret are left out.
    """
    reasons, usable = dict[str, str](), set[str]()
    for row in rows:
        if row["drawn"] is not None:
            usable |= set(map(str, row["drawn"])) - set(row["failed"])
            reasons |= row["failed"]
    return {client: why for client, why in reasons.items() if client not in usable}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the contents of a finished run's `summary.json`: its final accuracy, costs, epsilon and failures.

    Args:
        rows: rows of the run's history.

    Raises:
        TypeError, ValueError: `rows` is not a history.
    """
    from distillkit.study.history import accuracy_best, accuracy_last, require_rows

    last = rows[-1] if require_rows(rows, "accuracy") else {}
    return {
        "rounds": len(rows),
        "accuracy_last": accuracy_last(rows),
        "accuracy_best": accuracy_best(rows),
        **{k: sum(row[k] for row in rows) for k in ("bytes_up", "bytes_down", "client_seconds", "seconds")},
        "epsilon": last.get("epsilon"),
        "failed": sum(len(row["failed"]) for row in rows),
    }
