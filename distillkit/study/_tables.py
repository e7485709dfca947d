"""Tables of a study: accuracies and paired differences; and text for numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillkit._utils import check
from distillkit._utils.tables import NONE, Table
from distillkit.study._records import Group, RecordsLike, differences, group_records
from distillkit.study.history import best_seed_mean

Part = tuple[dict[str, Any], str | None]
"""Values by name, and the text of the cell that shows them; None if no cell does."""

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
    notes: list[str] = []

    def cells(g: Group) -> Iterator[Part]:
        epsilons = g.values("epsilon")
        epsilon = max(epsilons) if epsilons and None not in epsilons else None
        notes.extend(_cautions(g, epsilons))
        yield {"seeds_wanted": len(g.expected_seeds), "epsilon": epsilon}, None
        yield from (numbers_of(column, g.values(column)) for column in ("accuracy_last", "accuracy_best"))
        yield _best_mean(g)
        if private:
            yield {}, NONE if epsilon is None else _rounded_up(epsilon)
        yield from (numbers_of(column, g.values(column)) for column in columns)

    header = ["last %", *BEST, *(["ε"] if private else []), *(_header(column, found) for column in columns)]
    made = group_table(found, header, cells)
    empty = [name for i, name in enumerate(made.header) if name in BEST and all(line[i] == NONE for line in made.cells)]
    sizes = {len(g.records) for g in found}
    spread = ["± gives the sample standard deviation over seeds (n - 1)"]
    spread += ["a single seed has none"] * (1 in sizes) + ["that of two seeds is very uncertain"] * (2 in sizes)
    shared = [f"{'; '.join(spread)}.", *([CHOSEN_ON_TEST] if len(empty) < len(BEST) else [])]
    if private:
        kinds = sorted({(r.last("delta"), r.last("relation")) for r in private}, key=str)
        facts = [", ".join([*([] if d is None else [f"delta {d:g}"]), *([k] if k else [])]) for d, k in kinds]
        named = f" ({'; '.join(facts)})" if any(facts) else ""
        shared.append(f"ε{named} of one run. Every further run on the same records adds to it.")
    return replace(made, notes=(*shared, *notes)).without(*empty)


def group_table(
    found: Sequence[Group], header: Sequence[str], cells: Callable[[Group], Iterable[Part]], notes: Sequence[str] = ()
) -> Table:
    """Return a table with a row for each group, of its names, its seeds, and the values and texts of its cells."""
    printed, rows = [], []
    for g in found:
        parts = [*cells(g)]
        numbers: dict[str, Any] = {"task": g.task, "method": g.method, "seeds": len(g.records)}
        rows.append(numbers | {name: value for part, _ in parts for name, value in part.items()})
        printed.append((g.task, g.method, g.seeds, *(text for _, text in parts if text is not None)))
    return Table(("task", "method", "seeds", *header), tuple(printed), rows, tuple(notes))


def numbers_of(column: str, values: Sequence[Any]) -> Part:
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


def _best_mean(group: Group) -> Part:
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


MIN_SEEDS = 3
"""Smallest number of seeds whose confidence interval is shown without a caution."""


def paired_differences(
    records: RecordsLike, base: str = "FedAvg", *, confidence: float = 0.95, column: str = "accuracy_last"
) -> Table:
    """Return a table of the mean difference between each candidate and a baseline, with confidence intervals.

    Two candidates with the same seed share the data split and the initial weights, so their difference varies less than
    either accuracy. For n differences d, one per seed, the interval is Student's: mean(d) ± t std(d) / sqrt(n), with
    the quantile t of the t distribution with n - 1 degrees of freedom. The interval assumes normally distributed
    differences. It covers the variation between seeds, but not between test sets. Intervals are not corrected for
    multiple comparisons.

    Args:
        records: records of a study's finished runs, or the study's folder.
        base: name of the baseline.
        confidence: confidence level of each interval.
        column: name of the column to compare, see `Record.last`.

    Returns:
        A table with one row per task and candidate. Its columns are the number of seeds that candidate and baseline
        share, the mean difference (candidate - base; accuracies in percentage points), and the confidence interval. The
        last column is a caution if the interval contains 0 or is undefined (fewer than 2 seeds). A note below the table
        lists the intervals that are computed from fewer than 3 seeds.

    Raises:
        ValueError: there are no records, a task lacks the baseline, no run has the column, or `confidence` is outside
            (0, 1).
    """
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    found = group_records(records, columns=(column,))
    bases = {g.task: g for g in found if g.method == base}
    if lacking := [g.task for g in found if g.task not in bases]:
        names = ", ".join(dict.fromkeys(repr(g.method) for g in found if g.task == lacking[0]))
        raise ValueError(f"base must be on every task; {lacking[0]!r} has no {base!r}, but {names}")
    unit = unit_of(column, [v for g in found for v in g.by_seed(column).values()])
    few: list[str] = []

    def cells(g: Group) -> Iterator[Part]:
        values = [*differences(g, bases[g.task], column).values()]
        low, high = interval(values, confidence)
        mean = statistics.mean(values) if values else None
        span, caution = NONE, "one seed: no interval" if values else "no seed of both"
        if low is not None and high is not None:
            span = f"[{unit.signed(low)}, {unit.signed(high)}]"
            caution = "the interval contains 0" if low <= 0 <= high else ""
            few.extend([f"{g.method} on {g.task} has {len(values)}"] * (len(values) < MIN_SEEDS))
        yield {"base": base, "difference": mean}, unit.signed(mean)
        yield {"low": low, "high": high}, span
        yield {"caution": caution}, caution

    pairs = [
        replace(g, records=tuple(r for r in g.records if r.seed in differences(g, bases[g.task], column)))
        for g in found
        if g.method != base
    ]
    points = "points" if unit.name == "%" else unit.name
    shown = f"{column.replace('_', ' ')} minus {base}'s" + (f" ({points})" if points else "")
    made = group_table(pairs, (shown, f"{100 * confidence:g} % interval", "caution"), cells)
    note = (
        "Differences are between runs with the same seed. The interval is Student's t interval of the mean difference, "
        "not corrected for multiple comparisons. "
        "The interval covers the variation between seeds, not between test sets."
    )
    caution = f"Caution: an interval from fewer than {MIN_SEEDS} seeds allows no conclusion: {'; '.join(few)}."
    header = ("task", "method", "seeds of both", *made.header[3:])
    return replace(made, header=header, notes=(note, caution) if few else (note,))


def interval(differences: Sequence[float], confidence: float) -> tuple[float, float] | tuple[None, None]:
    """Return the ends of Student's confidence interval of the mean difference between two candidates' results.

    The result is (None, None) for fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        return None, None
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.mean(differences)
    return mean - half, mean + half


def mean_std(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean and sample standard deviation (n - 1) as text: "91.2 ± 0.4". For a single value, only the value is
    shown.

    Args:
        values: numbers, one per seed.
        scale: factor by which the values are multiplied, for example 100 to print fractions in per cent.
        digits: number of decimals.

    Raises:
        TypeError, ValueError: `values` is empty, or a value is not a number.
    """
    check.real_number(scale, "scale")
    check.positive_int(digits, "digits", least=0)
    known = check.sequence(values, "values", "numbers")
    scaled = [scale * check.real_number(value, f"values[{i}]") for i, value in enumerate(known)]
    if not scaled:
        raise ValueError("values must hold at least one number, got none")
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{spread}"


@dataclass(frozen=True)
class Unit:
    """Printed unit of a column.

    Attributes:
        name: name of the unit, for example "%"; empty for a plain number.
        scale: factor that converts a value from the records' unit to this unit.
        digits: number of decimals.
    """

    name: str
    scale: float
    digits: int

    def signed(self, value: float | None) -> str:
        """Format a difference with its sign; "–" for None."""
        return NONE if value is None else f"{self.scale * value:+.{self.digits}f}"


def unit_of(column: str, values: Sequence[float]) -> Unit:
    """Return the unit in which a column is printed, such as per cent for accuracies, and its number of decimals."""
    last = column.rsplit(".", 1)[-1]
    if column.startswith("accuracy"):
        return Unit("%", 100.0, 1)
    if "bytes" in column:
        return Unit("MB", 1e-6, 2)
    if "seconds" in last:
        return Unit("s", 1.0, 1)
    largest = max((abs(v) for v in values), default=0.0)
    if all(float(v).is_integer() for v in values):
        return Unit("", 1.0, 0 if len(set(values)) <= 1 else 1)
    return Unit("", 1.0, 1 if largest >= 100 else 3)
