"""What federated runs of a study cost: until an accuracy is reached, and what each way reached at equal cost."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from distillkit._utils import check
from distillkit.study._formatting import NONE, Table
from distillkit.study._groups import Group, RecordsLike, group_records
from distillkit.study._tables import numbers_of
from distillkit.study.history import rounds_to
from distillkit.study.records import Record, Row

__all__ = ["BY", "at_equal", "spent", "to_target", "worst_clients"]

BY = {
    "rounds": (),
    "bytes": ("bytes_up", "bytes_down"),
    "bytes_up": ("bytes_up",),
    "bytes_down": ("bytes_down",),
    "client_seconds": ("client_seconds",),
}
"""What a cost is, and the columns of a round that add up to it."""

_SHOWN = ("rounds", "bytes", "client_seconds")


def spent(rows: Sequence[Row], by: str) -> list[float]:
    """What a run has cost after each of its rounds.

    Args:
        rows: of its history.
        by: "rounds"; "bytes" of all messages up and down, "bytes_up", "bytes_down"; "client_seconds", the CPU seconds
            of all clients.

    Raises:
        ValueError: another word, or rounds that do not say it.
    """
    columns = BY[check.one_of(by, "by", BY)]
    lacking = [name for name in columns if any(row.get(name) is None for row in rows)]
    if lacking:
        raise ValueError(f"by must name what the rounds hold, got {by!r}, and they have no {', '.join(lacking)}")
    each = [float(sum(row[name] for name in columns)) if columns else 1.0 for row in rows]
    return list(itertools.accumulate(each))


def to_target(records: RecordsLike, *, accuracy: float) -> Table:
    """What each way costs until it reaches a target accuracy on the test set: VHL's "ROUND", and bytes and seconds.

    Two readings stand beside each other. A seed's: the first round after which this run has the target; mean and
    standard deviation over seeds are given only where all runs reached it, since those that never do are the slow ones.
    And the mean curve's: the first round, among those that all seeds tested, after which the mean over seeds has it.

    Args:
        records: of a study, or its folder.
        accuracy: the target, a fraction in [0, 1]; papers take the best of FedAvg.

    Returns:
        A row a task and way: how many of its runs reached the target, and rounds, bytes (up and down, all clients) and
        client-seconds by both readings; "–" where it never did.

    Raises:
        ValueError: an accuracy outside [0, 1], or no records.
    """
    target = check.real_number(accuracy, "accuracy", least=0.0, most=1.0)
    printed, rows = [], []
    for g in group_records(records):
        places = [_first(r.rows, target) for r in g.records]
        reached = sum(place is not None for place in places)
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records), "reached": reached}
        cells = [g.task, g.method, g.seeds, f"{reached} of {len(places)}" if _has_rounds(g) else "no rounds"]
        whole = reached == len(places) > 0
        for by in _SHOWN:
            costs = [spent(r.rows, by)[p] for r, p in zip(g.records, places) if p is not None]
            part, cell = numbers_of(by, costs if whole else [])
            numbers |= part
            cells.append(cell)
        at = _mean_first(g, target)
        for by in _SHOWN:
            mean = None if at is None else statistics.fmean(_until(r.rows, by, at) for r in g.records)
            part, cell = numbers_of(by, [mean])
            numbers[f"mean_{by}"] = part[by]
            cells.append(cell)
        printed.append(tuple(cells))
        rows.append(numbers)
    header = ("task", "method", "seeds", f"reached {100 * target:g} %", "rounds", "MB", "client s")
    notes = (
        "Rounds, MB up and down of all clients, and CPU seconds of all clients until the target: mean ± standard "
        f"deviation over seeds, {NONE} unless every run reached it; then the same for the mean curve over seeds.",
        "The target is met on the test set: a measure of speed, not of accuracy.",
    )
    return Table((*header, "mean: rounds", "mean: MB", "mean: client s"), tuple(printed), rows, notes)


def at_equal(records: RecordsLike, *, by: str = "rounds", budget: float | None = None) -> Table:
    """The accuracy of each way when all have spent the same: equal rounds are rarely equal bytes or equal work.

    Args:
        records: of a study, or its folder.
        by: what is equal, see `spent`.
        budget: how much, in rounds, bytes or seconds; default for each task the largest that every run of every way
            on it has spent. A round counts if it ends within the budget; a run that failed has none.

    Returns:
        A row a task and way: the accuracy after the last tested round within the budget, mean ± standard deviation over
        seeds, that round, and what was spent by then. A run without such a round has no accuracy, and that is said.

    Raises:
        ValueError: no records, no run with rounds, another `by`, or a budget that is not positive.
    """
    check.one_of(by, "by", BY)
    if budget is not None:
        check.real_number(budget, "budget", above=0.0)
    found = group_records(records)
    runs = [r for r in _all(found) if r.rows and not r.failed]
    if not runs:
        raise ValueError("records must hold runs with rounds; these have none")
    least: dict[str, float] = {}
    for r in runs:
        least[r.task] = min(least.get(r.task, float("inf")), spent(r.rows, by)[-1])
    columns = ("accuracy", "round") if by == "rounds" else ("accuracy", "round", by)
    printed, rows = [], []
    for g in found:
        own = least.get(g.task, 0.0) if budget is None else float(budget)
        ends = [_within(r, by, own) for r in g.records]
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records), "budget": own}
        cells = [g.task, g.method, g.seeds]
        for name in columns:
            part, cell = numbers_of(name, [end[name] for end in ends])
            numbers |= part
            cells.append(cell)
        printed.append(tuple(cells))
        rows.append(numbers)
    said = (f"{_budget(value, by)} on {task}" for task, value in least.items())
    within = _budget(budget, by) if budget is not None else ", ".join(said)
    notes = (f"Each way's last tested round within {within}.",)
    names = ("accuracy %", "after round", "MB spent" if by.startswith("bytes") else "client s spent")
    return Table(("task", "method", "seeds", *names[: len(columns)]), tuple(printed), rows, notes)


def worst_clients(records: RecordsLike) -> Table:
    """How a way serves the clients that it serves worst, by their own tests after the last round.

    Args:
        records: of a study, or its folder.

    Returns:
        A row a task and way: over the clients that were tested after the last round (all of them, or those drawn: as
        the run was told) the mean accuracy on their own test images, its standard deviation over clients and the mean
        of the worst tenth (of at least one client), of the global model and of personal ones where there are; each as
        mean ± standard deviation over seeds.

    Raises:
        ValueError: no records, or no run whose clients were tested.
    """
    found = group_records(records)
    models = [m for m in ("clients", "personal") if any(r.last(f"accuracy_{m}.mean") is not None for r in _all(found))]
    if not models:
        raise ValueError("records must hold runs whose clients have tests of their own (accuracy_clients); none has")
    columns = [f"accuracy_{model}.{what}" for model in models for what in ("mean", "std", "worst10")]
    printed, rows = [], []
    for g in found:
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records)}
        tested = {n for m in models for n in g.values(f"accuracy_{m}.clients") if n is not None}
        ends = sorted({min(tested), max(tested)}) if tested else []
        cells = [g.task, g.method, g.seeds, " to ".join(map(str, ends)) or NONE]
        for column in columns:
            part, cell = numbers_of(column, g.values(column))
            numbers |= part
            cells.append(cell)
        printed.append(tuple(cells))
        rows.append({**numbers, "clients": max(tested, default=None)})
    names = {"mean": "mean %", "std": "std over clients %", "worst10": "worst tenth %"}
    which = {"clients": "", "personal": "personal: "}
    header = [which[model] + name for model in models for name in names.values()]
    notes = ("Clients' own tests after the last round; ± is over seeds.",)
    return Table(("task", "method", "seeds", "clients tested", *header), tuple(printed), rows, notes)


def _all(found: Sequence[Group]) -> list[Record]:
    return [r for g in found for r in g.records]


def _has_rounds(group: Group) -> bool:
    return any(r.rows for r in group.records) or not group.records


def _first(rows: Sequence[Row], target: float) -> int | None:
    """The index of the first row that has the target."""
    first = rounds_to(rows, target)
    return None if first is None else [row["round"] for row in rows].index(first)


def _mean_first(group: Group, target: float) -> int | None:
    """The first round, tested under all seeds, after which their mean has the target."""
    tested = [[row for row in r.rows if row["accuracy"] is not None] for r in group.records]
    curves = [{row["round"]: row["accuracy"] for row in rows} for rows in tested]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return next((t for t in common if statistics.fmean(curve[t] for curve in curves) >= target), None)


def _until(rows: Sequence[Row], by: str, number: int) -> float:
    """What was spent until the end of a round."""
    return next(cost for row, cost in zip(rows, spent(rows, by)) if row["round"] == number)


def _within(record: Record, by: str, budget: float) -> dict[str, Any]:
    """The last tested round that ended within the budget: its accuracy, its number, what was spent."""
    last: dict[str, Any] = {"accuracy": None, "round": None, by: None}
    for row, cost in zip(record.rows, () if record.failed else spent(record.rows, by)):
        if cost <= budget and row.get("accuracy") is not None:
            last = {"accuracy": row["accuracy"], "round": row["round"], by: cost}
    return last


def _budget(value: float, by: str) -> str:
    if by.startswith("bytes"):
        return f"{value / 1e6:.2f} MB"
    return f"{value:g} rounds" if by == "rounds" else f"{value:.1f} client s"
