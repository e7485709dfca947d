"""Table of the accuracies of a study."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from distillkit._utils.tables import NONE, Table
from distillkit.study._formatting import mean_std, unit_of
from distillkit.study._records import Group, RecordsLike, group_records
from distillkit.study.history import best_seed_mean

__all__ = ["numbers_of", "summary_table"]

BEST = ("best % *", "best of the seeds' mean % *")
CHOSEN_ON_TEST = "*: the best round was chosen on the test set; compare methods by their last round."


def summary_table(records: RecordsLike, *, columns: Sequence[str] = ()) -> Table:
    """Return a table of accuracies by task and candidate (compared method).

    Args:
        records: records of a study's finished runs, or the study's folder.
        columns: names of additional columns. Each is a value in the summaries of the runs ("bytes_up",
            "client_seconds"), or in the rows of their last rounds ("accuracy_clients.worst10"). Numbers are shown as
            mean ± standard deviation over seeds.

    Returns:
        A table with one row per task and candidate. The first columns are the number of seeds ("2 of 3" if one is not
        finished), the accuracy after the last round, and the best accuracy of each run. Both accuracies are mean ±
        standard deviation (n - 1) over seeds; "–" means that there is no test accuracy. The next column is the
        maximum over rounds of the mean accuracy over seeds. The best accuracies and this maximum are left out if
        no candidate has rounds. If any candidate has an epsilon, a column shows the largest epsilon over seeds.

    Raises:
        ValueError: there are no records, or one of the `columns` occurs in no run.
        TypeError: `records` are neither records nor a path, or `columns` are not names.
    """
    found = group_records(records, columns=columns)
    private = [r for g in found for r in g.records if r.last("epsilon") is not None]
    printed, rows, notes = [], [], []
    for g in found:
        epsilons = g.values("epsilon")
        epsilon = max(epsilons) if epsilons and None not in epsilons else None
        parts = [
            *(numbers_of(column, g.values(column)) for column in ("accuracy_last", "accuracy_best")),
            _best_mean(g),
            *([({}, NONE if epsilon is None else _rounded_up(epsilon))] if private else []),
            *(numbers_of(column, g.values(column)) for column in columns),
        ]
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records)}
        numbers |= {"seeds_wanted": len(g.expected_seeds), "epsilon": epsilon}
        rows.append(numbers | {name: value for part, _ in parts for name, value in part.items()})
        printed.append((g.task, g.method, g.seeds, *(cell for _, cell in parts)))
        notes += _cautions(g, epsilons)
    header = ["task", "method", "seeds", "last %", *BEST, *(["ε"] if private else [])]
    header += [_header(column, found) for column in columns]
    empty = [name for i, name in enumerate(header) if name in BEST and all(line[i] == NONE for line in printed)]
    sizes = {len(g.records) for g in found}
    spread = ["± gives the sample standard deviation over seeds (n - 1)"]
    spread += ["a single seed has none"] * (1 in sizes) + ["that of two seeds is very uncertain"] * (2 in sizes)
    shared = [f"{'; '.join(spread)}.", *([CHOSEN_ON_TEST] if len(empty) < len(BEST) else [])]
    if private:
        kinds = sorted({(r.last("delta"), r.last("relation")) for r in private}, key=str)
        facts = [", ".join([*([] if d is None else [f"delta {d:g}"]), *([k] if k else [])]) for d, k in kinds]
        named = f" ({'; '.join(facts)})" if any(facts) else ""
        shared.append(f"ε{named} of one run. Every further run on the same records adds to it.")
    return Table(tuple(header), tuple(printed), rows, (*shared, *notes)).without(*empty)


def numbers_of(column: str, values: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """Return mean and standard deviation of a column over seeds by name, and as the text of a table cell.

    Args:
        column: name of the column in the records.
        values: values of the column, one per run; None if missing.
    """
    known = [v for v in values if v is not None]
    if not known:
        return {column: None, f"{column}_std": None}, NONE
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    if not numbers or column.startswith("settings."):  # settings are chosen, not measured
        words = ", ".join(dict.fromkeys(v if isinstance(v, str) else json.dumps(v, default=str) for v in known))
        return {column: words, f"{column}_std": None}, words
    unit = unit_of(column, known)
    std = statistics.stdev(known) if len(known) > 1 else None
    constant = not unit.name and len(set(known)) == 1  # an equal count needs no deviation
    fewer = f" ({len(known)} of {len(values)} runs)" if len(known) < len(values) else ""
    cell = mean_std(known[:1] if constant else known, unit.scale, unit.digits)
    return {column: statistics.mean(known), f"{column}_std": std}, cell + fewer


def _best_mean(group: Group) -> tuple[dict[str, Any], str]:
    """Return the highest mean accuracy over seeds and its round, by name and as the text of a table cell."""
    tested = [[row for row in r.rows if row.get("accuracy") is not None] for r in group.records if not r.failed]
    numbers: dict[str, Any] = {"accuracy_best_mean": None, "accuracy_best_mean_round": None}
    if not tested or not all(tested):
        return numbers, NONE
    if len({tuple(row["round"] for row in rows) for rows in tested}) > 1:
        return numbers, f"{NONE} (other rounds)"
    best = best_seed_mean(tested)
    numbers = {"accuracy_best_mean": best.accuracy, "accuracy_best_mean_round": best.round}
    return numbers, f"{100 * best.accuracy:.1f} (round {best.round})"


def _header(column: str, found: Sequence[Group]) -> str:
    """Return the printed name of a column, with the unit of its values."""
    values = [v for g in found for v in g.values(column) if isinstance(v, int | float)]
    unit = unit_of(column, values).name
    return f"{column.replace('_', ' ')}{f' ({unit})' if unit and values else ''}"


def _cautions(group: Group, epsilons: Sequence[Any]) -> list[str]:
    """Return notes on failures and on limits of a guarantee, which a mean over seeds would hide."""
    notes, name = [], f"{group.method} on {group.task}"
    if errors := [e for e in group.values("error") if e is not None]:
        notes.append(f"{name}: {len(errors)} of {len(group.records)} runs failed ({errors[0]}).")
    if failed := sum(v for v in group.values("failed") if v):
        notes.append(f"{name}: {failed} client replies failed and were left out.")
    for column in ("epsilon_reason", "epsilon_remarks"):
        words = [w for value in group.values(column) if value for w in ([value] if isinstance(value, str) else value)]
        notes += [f"{name}: {word.rstrip('.')}." for word in dict.fromkeys(words)]
    known = [e for e in epsilons if e is not None]
    if known and len(known) < len(epsilons):
        lacking = f"{len(epsilons) - len(known)} of {len(epsilons)} runs have no epsilon"
        notes.append(f"{name}: {lacking}, so the method has none.")
    elif len({round(e, 2) for e in known}) > 1:
        notes.append(f"{name}: ε is the largest of {_rounded_up(min(known))} to {_rounded_up(max(known))}.")
    return notes


def _rounded_up(epsilon: float) -> str:
    """Format epsilon with two decimals, rounded up."""
    return f"{math.ceil(100 * epsilon - 1e-6) / 100:.2f}"
