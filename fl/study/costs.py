"""Tables of federated runs: cost to reach a target accuracy, accuracy at equal cost, and accuracy of worst clients."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from distillkit._utils import check
from distillkit._utils.tables import NONE, Table
from distillkit.study._records import Group, Record, RecordsLike, group_records
from distillkit.study._tables import Part, group_table, numbers_of
from distillkit.study.history import Row, rounds_to

BY = {
    "rounds": (),
    "bytes": ("bytes_up", "bytes_down"),
    "bytes_up": ("bytes_up",),
    "bytes_down": ("bytes_down",),
    "client_seconds": ("client_seconds",),
}
"""Kinds of cost, with the columns of a round that add up to them."""

_SHOWN = ("rounds", "bytes", "client_seconds")


def spent(rows: Sequence[Row], by: str) -> list[float]:
    """Return the cumulative cost of a run after each round.

    Args:
        rows: rows of the run's history.
        by: kind of cost: "rounds", "bytes" (of all messages in both directions), "bytes_up", "bytes_down", or
            "client_seconds" (CPU seconds of all clients).

    Raises:
        ValueError: `by` is unknown, or the rows lack the columns from which this cost is computed.
    """
    columns = BY[check.one_of(by, "by", BY)]
    lacking = [name for name in columns if any(row.get(name) is None for row in rows)]
    if lacking:
        raise ValueError(f"by={by!r} needs columns that the rounds lack: {', '.join(lacking)}")
    each = [float(sum(row[name] for name in columns)) if columns else 1.0 for row in rows]
    return list(itertools.accumulate(each))


def to_target(records: RecordsLike, *, accuracy: float) -> Table:
    """Return the cost of each candidate until it reaches a target test accuracy: rounds, bytes and seconds.

    The table gives two measures of the number of rounds. The first measure is the round in which a run first reaches
    the target, as mean and standard deviation over seeds. It is given only if all runs reached the target, because a
    mean without the slow runs would be too low. The second measure is the first round in which the mean accuracy over
    seeds reaches the target, among the rounds that were evaluated in the runs of all seeds.

    Args:
        records: records of the study's runs, or the study's folder.
        accuracy: the target, a fraction in [0, 1]; papers use the best accuracy of FedAvg.

    Returns:
        A table with one row per task and candidate. Its columns are the number of runs that reached the target and, for
        each measure, the costs until then: the rounds, the bytes that all clients sent and received, and the clients'
        CPU seconds. "–" means that the target was not reached.

    Raises:
        ValueError: `accuracy` is outside [0, 1], or there are no records.
    """
    target = check.real_number(accuracy, "accuracy", least=0.0, most=1.0)

    def cells(g: Group) -> Iterator[Part]:
        ends = [rounds_to(r.rows, target) for r in g.records]
        reached = sum(end is not None for end in ends)
        has_rounds = any(r.rows for r in g.records) or not g.records
        yield {"reached": reached}, f"{reached} of {len(ends)}" if has_rounds else "no rounds"
        pairs = [(r.rows, end) for r, end in zip(g.records, ends) if end is not None and reached == len(ends)]
        yield from (numbers_of(by, [_until(rows, by, end) for rows, end in pairs]) for by in _SHOWN)
        at = _mean_first(g, target)
        for by in _SHOWN:
            costs = [_until(r.rows, by, at) for r in g.records] if at is not None else []
            numbers, text = numbers_of(by, [statistics.fmean(costs)] if costs else [None])
            yield {f"mean_{by}": numbers[by]}, text

    header = (f"reached {100 * target:g} %", "rounds", "MB", "client s", "mean: rounds", "mean: MB", "mean: client s")
    notes = (
        "The table shows the rounds, the MB up and down of all clients, and the CPU seconds of all clients until the "
        f"target is reached: mean ± standard deviation over seeds, or {NONE} unless every run reached the target. The "
        "last three columns show the same for the mean curve over seeds.",
        "The target is met on the test set, so the table measures speed, not accuracy.",
    )
    return group_table(group_records(records), header, cells, notes)


def at_equal(records: RecordsLike, *, by: str = "rounds", budget: float | None = None) -> Table:
    """Return the accuracy of each candidate at equal cost. Equal numbers of rounds rarely cost equal numbers of bytes.

    Args:
        records: records of the study's runs, or the study's folder.
        by: kind of cost: "rounds", "bytes", "bytes_up", "bytes_down" or "client_seconds"; see `spent`.
        budget: maximum cost, in rounds, bytes or seconds. Default: for each task, the largest cost that all runs have
            reached. Rounds after the budget is spent are not used. Failed runs are left out.

    Returns:
        A table with one row per task and candidate. Its columns are the accuracy after the last evaluated round within
        the budget (mean ± standard deviation over seeds), the index of this round, and the cost up to and including
        this round. The accuracy's cell also gives the number of runs without such a round, if there are any.

    Raises:
        ValueError: there are no records or rounds, `by` is unknown, or `budget` is not positive.
    """
    check.one_of(by, "by", BY)
    if budget is not None:
        check.real_number(budget, "budget", above=0.0)
    found = group_records(records)
    runs = [r for g in found for r in g.records if r.rows and not r.failed]
    if not runs:
        raise ValueError("records must hold runs with rounds; these have none")
    smallest: dict[str, float] = {}
    for r in runs:
        smallest[r.task] = min(smallest.get(r.task, float("inf")), spent(r.rows, by)[-1])
    columns = ("accuracy", "round") if by == "rounds" else ("accuracy", "round", by)

    def cells(g: Group) -> Iterator[Part]:
        own = smallest.get(g.task, 0.0) if budget is None else float(budget)
        ends = [_last_within_budget(r, by, own) for r in g.records]
        yield {"budget": own}, None
        yield from (numbers_of(name, [end[name] for end in ends]) for name in columns)

    shared = (f"{_budget(value, by)} on {task}" for task, value in smallest.items())
    within = _budget(budget, by) if budget is not None else ", ".join(shared)
    notes = (f"The table shows the last tested round of each candidate within {within}.",)
    names = ("accuracy %", "after round", "MB spent" if by.startswith("bytes") else "client s spent")
    return group_table(found, names[: len(columns)], cells, notes)


def worst_clients(records: RecordsLike) -> Table:
    """Return the accuracy of the worst clients on their own test images after the last round.

    Args:
        records: records of the study's runs, or the study's folder.

    Returns:
        A table with one row per task and candidate. It covers the clients that were evaluated after the last round (all
        clients or the drawn ones, see `evaluate` of `simulate`). Its columns are the mean accuracy on the clients' own
        test images, the standard deviation over clients, and the mean of the worst tenth (at least one client). If
        there are personal models, they have additional columns. All values are mean ± standard deviation over seeds.

    Raises:
        ValueError: there are no records, or no run tested its clients.
    """
    found = group_records(records)
    models = [
        m for m in ("clients", "personal") if any(v is not None for g in found for v in g.values(f"accuracy_{m}.mean"))
    ]
    if not models:
        raise ValueError("records must hold runs whose clients have tests of their own (accuracy_clients); none has")
    columns = [f"accuracy_{model}.{what}" for model in models for what in ("mean", "std", "worst10")]

    def cells(g: Group) -> Iterator[Part]:
        tested = {n for m in models for n in g.values(f"accuracy_{m}.clients") if n is not None}
        ends = sorted({min(tested), max(tested)}) if tested else []
        yield {"clients": max(tested, default=None)}, " to ".join(map(str, ends)) or NONE
        yield from (numbers_of(column, g.values(column)) for column in columns)

    names = {"mean": "mean %", "std": "std over clients %", "worst10": "worst tenth %"}
    which = {"clients": "", "personal": "personal: "}
    header = [which[model] + name for model in models for name in names.values()]
    notes = ("Clients' own tests after the last round; ± is over seeds.",)
    return group_table(found, ("clients tested", *header), cells, notes)


def _mean_first(group: Group, target: float) -> int | None:
    """Return the first round in which the mean accuracy is at least `target`, of those that all runs evaluated."""
    curves = [{row["round"]: row["accuracy"] for row in r.rows if row["accuracy"] is not None} for r in group.records]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return next((t for t in common if statistics.fmean(curve[t] for curve in curves) >= target), None)


def _until(rows: Sequence[Row], by: str, number: int) -> float:
    """Return the total cost of a run up to and including the round `number`."""
    return next(cost for row, cost in zip(rows, spent(rows, by)) if row["round"] == number)


def _last_within_budget(record: Record, by: str, budget: float) -> dict[str, Any]:
    """Return the accuracy, index and cumulative cost of the last evaluated round that a budget allows."""
    last: dict[str, Any] = {"accuracy": None, "round": None, by: None}
    for row, cost in zip(record.rows, () if record.failed else spent(record.rows, by)):
        if cost <= budget and row.get("accuracy") is not None:
            last = {"accuracy": row["accuracy"], "round": row["round"], by: cost}
    return last


def _budget(value: float, by: str) -> str:
    if by.startswith("bytes"):
        return f"{value / 1e6:.2f} MB"
    return f"{value:g} rounds" if by == "rounds" else f"{value:.1f} client s"
