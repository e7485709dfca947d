"""Table of the accuracies of a study."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from distillkit._utils import check
from distillkit._utils.tables import NONE, Table
from distillkit.study._formatting import mean_std, unit_of
from distillkit.study._groups import Group, RecordsLike, group_records
from distillkit.study.history import best_seed_mean

__all__ = ["header_of", "numbers_of", "require_columns", "summary_table"]

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
    found = group_records(records)
    require_columns(found, columns)
    private = any(e is not None for g in found for e in g.values("epsilon"))
    printed, rows, notes = [], [], []
    for g in found:
        epsilons = g.values("epsilon")
        guaranteed = bool(epsilons) and None not in epsilons
        parts = [
            *(numbers_of(column, g.values(column)) for column in ("accuracy_last", "accuracy_best")),
            _best_mean(g),
            *([({}, _rounded_up(max(epsilons)) if guaranteed else NONE)] if private else []),
            *(numbers_of(column, g.values(column)) for column in columns),
        ]
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records)}
        numbers |= {"seeds_wanted": len(g.expected_seeds), "epsilon": max(epsilons) if guaranteed else None}
        rows.append(numbers | {name: value for part, _ in parts for name, value in part.items()})
        printed.append((g.task, g.method, g.seeds, *(cell for _, cell in parts)))
        notes += _cautions(g, epsilons)
    header = ["task", "method", "seeds", "last %", *BEST, *(["ε"] if private else [])]
    header += [header_of(column, found) for column in columns]
    empty = [name for i, name in enumerate(header) if name in BEST and all(line[i] == NONE for line in printed)]
    notes = [
        _spread_note(found),
        *([CHOSEN_ON_TEST] if len(empty) < len(BEST) else []),
        *(_privacy_notes(found) if private else []),
        *notes,
    ]
    return Table(tuple(header), tuple(printed), rows, tuple(notes)).without(*empty)


def numbers_of(column: str, values: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """Return mean and standard deviation of a column over seeds as a dictionary, and as the text of a table cell.

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
    """Find the round in which the mean accuracy over seeds is highest.

    Returns:
        A dictionary that contains this accuracy and the round; and the text with which a table prints them.
    """
    tested = [[row for row in r.rows if row.get("accuracy") is not None] for r in group.records if not r.failed]
    nothing = {"accuracy_best_mean": None, "accuracy_best_mean_round": None}
    if not tested or not all(tested):
        return nothing, NONE
    if len({tuple(row["round"] for row in rows) for rows in tested}) > 1:
        return nothing, f"{NONE} (other rounds)"
    best = best_seed_mean(tested)
    return (
        {"accuracy_best_mean": best.accuracy, "accuracy_best_mean_round": best.round},
        f"{100 * best.accuracy:.1f} (round {best.round})",
    )


def require_columns(found: Sequence[Group], columns: Sequence[str]) -> None:
    """Check that each column occurs in at least one run.

    Args:
        found: the runs, grouped by task and candidate.
        columns: names of the columns, see `Record.last`.

    Raises:
        TypeError: `columns` is not a list of names.
        ValueError: one of the columns occurs in no run; the message lists the existing columns.
    """
    for column in check.sequence(columns, "columns", "names in the summaries or last rounds"):
        if not isinstance(column, str):
            raise TypeError(f"columns must be names, got {type(column).__name__}")
        runs = [r for g in found for r in g.records]
        if not any(column in r.line or r.last(column) is not None for r in runs):
            have = sorted({name for r in runs for name in (*r.line, *(r.rows[-1] if r.rows else ()))})
            raise ValueError(f"columns must be among those of the runs ({', '.join(have)}), got {column!r}")


def header_of(column: str, found: Sequence[Group]) -> str:
    """Return the printed name of a column, with its unit.

    Args:
        column: name of the column in the records.
        found: groups of runs, one per task and candidate, whose values in the column determine the unit.
    """
    values = [v for g in found for v in g.values(column) if isinstance(v, int | float)]
    unit = unit_of(column, values).name
    return f"{column.replace('_', ' ')}{f' ({unit})' if unit and values else ''}"


def _cautions(group: Group, epsilons: Sequence[Any]) -> list[str]:
    """Return notes on facts about a candidate that a mean over seeds would hide.

    The facts are failed runs, failed replies of clients, the reasons why a run has no privacy guarantee, remarks on a
    guarantee, and missing or differing epsilons.
    """
    notes, name = [], f"{group.method} on {group.task}"
    errors = [e for e in group.values("error") if e is not None]
    if errors:
        notes.append(f"{name}: {len(errors)} of {len(group.records)} runs failed ({errors[0]}).")
    failed = sum(v for v in group.values("failed") if v)
    if failed:
        notes.append(f"{name}: {failed} client replies failed and were left out.")
    for column in ("epsilon_reason", "epsilon_remarks"):
        words = [w for value in group.values(column) if value for w in ([value] if isinstance(value, str) else value)]
        notes += [f"{name}: {word.rstrip('.')}." for word in dict.fromkeys(words)]
    if None in epsilons and any(e is not None for e in epsilons):
        notes.append(f"{name}: {epsilons.count(None)} of {len(epsilons)} runs have no epsilon, so the method has none.")
    elif len({round(e, 2) for e in epsilons if e is not None}) > 1:
        notes.append(f"{name}: ε is the largest of {_rounded_up(min(epsilons))} to {_rounded_up(max(epsilons))}.")
    return notes


def _privacy_notes(found: Sequence[Group]) -> list[str]:
    """Return a note with the delta and the neighboring relation to which the table's epsilons refer."""
    runs = [r for g in found for r in g.records if r.last("epsilon") is not None]
    kinds = {(r.last("delta"), r.last("relation")) for r in runs}
    facts = [
        ", ".join([f"delta {d:g}" if d is not None else "", r or ""]).strip(", ") for d, r in sorted(kinds, key=str)
    ]
    named = f" ({'; '.join(facts)})" if any(facts) else ""
    return [f"ε{named} of one run. Every further run on the same records adds to it."]


def _rounded_up(epsilon: float) -> str:
    """Format epsilon with two decimals, rounded up."""
    return f"{math.ceil(100 * epsilon - 1e-6) / 100:.2f}"


def _spread_note(found: Sequence[Group]) -> str:
    sizes = {len(g.records) for g in found}
    notes = ["a single seed has none"] * (1 in sizes) + ["that of two seeds is very uncertain"] * (2 in sizes)
    return f"{'; '.join(['± gives the sample standard deviation over seeds (n - 1)', *notes])}."
