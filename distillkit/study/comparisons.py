"""Comparisons of candidates by paired differences, and of two executions of a study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from distillkit._utils import check
from distillkit._utils.tables import NONE, Table
from distillkit.study._formatting import MIN_SEEDS, mean_std, signed, unit_of
from distillkit.study._groups import RecordsLike, differences_by_seed, group_records, number_of, values_by_seed
from distillkit.study._tables import require_columns

__all__ = ["compare_studies", "interval", "paired_differences"]


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
    found = group_records(records)
    require_columns(found, (column,))
    tasks = {g.task: None for g in found}
    bases = {g.task: g for g in found if g.method == base}
    lacking = [task for task in tasks if task not in bases]
    if lacking:
        names = ", ".join(dict.fromkeys(repr(g.method) for g in found if g.task == lacking[0]))
        raise ValueError(f"base must be on every task; {lacking[0]!r} has no {base!r}, but {names}")
    values = [v for g in found for v in g.values(column) if v is not None]
    unit = unit_of(column, [number_of(v, column) for v in values])
    printed, rows, few = [], [], []
    for g in (g for g in found if g.method != base):
        differences = list(differences_by_seed(g, bases[g.task], column).values())
        low, high = interval(differences, confidence)
        mean = statistics.mean(differences) if differences else None
        caution = _caution(differences, low, high)
        pairs, expected = len(differences), len(g.expected_seeds)
        of = f"{pairs}" if pairs == expected else f"{pairs} of {expected}"
        numbers = {"task": g.task, "method": g.method, "base": base, "seeds": len(differences)}
        numbers |= {"difference": mean, "low": low, "high": high, "caution": caution}
        spans = NONE if low is None or high is None else f"[{signed(low, unit)}, {signed(high, unit)}]"
        printed.append((g.task, g.method, of, NONE if mean is None else signed(mean, unit), spans, caution))
        rows.append(numbers)
        if low is not None and len(differences) < MIN_SEEDS:
            few.append(f"{g.method} on {g.task} has {len(differences)}")
    points = "points" if unit.name == "%" else unit.name
    shown = f"{column.replace('_', ' ')} minus {base}'s" + (f" ({points})" if points else "")
    header = ("task", "method", "seeds of both", shown, f"{100 * confidence:g} % interval", "caution")
    note = (
        "Differences are between runs with the same seed. The interval is Student's t interval of the mean difference, "
        "not corrected for multiple comparisons. "
        "The interval covers the variation between seeds, not between test sets."
    )
    caution = f"Caution: an interval from fewer than {MIN_SEEDS} seeds allows no conclusion: {'; '.join(few)}."
    notes = (note, caution) if few else (note,)
    return Table(header, tuple(printed), rows, notes)


def compare_studies(before: RecordsLike, after: RecordsLike, *, column: str = "accuracy_last") -> Table:
    """Compare the results of a study that was run twice, for example with different versions of the code.

    Args:
        before, after: records of the finished runs of each study, or the study's folder.
        column: name of the column to compare, see `Record.last`.

    Returns:
        A table with one row per task and candidate in either study. Its columns are the mean ± standard deviation over
        seeds, before and after; the difference of the means; and a verdict. The verdict is "the same" if both studies
        have the same seeds and bit-identical values. It is "changed" if the means differ by more than the larger
        standard deviation, or by any amount if each study has only one seed. It is "only before" or "only after" if one
        study lacks the row.

    Raises:
        ValueError: there are no records, or no run has the column.
    """
    old, new = group_records(before, "before"), group_records(after, "after")
    require_columns([*old, *new], (column,))
    keys = dict.fromkeys((g.task, g.method) for g in (*new, *old))
    sides = [{(g.task, g.method): g for g in found} for found in (old, new)]
    unit = unit_of(column, [number_of(v, column) for g in (*old, *new) for v in g.values(column) if v is not None])
    printed, rows = [], []
    for task, method in keys:
        by_seed = [values_by_seed(side.get((task, method)), column) for side in sides]
        values = [list(found.values()) for found in by_seed]
        means = [statistics.mean(v) if v else None for v in values]
        spread = max((statistics.stdev(v) for v in values if len(v) > 1), default=0.0)
        difference = None if means[0] is None or means[1] is None else means[1] - means[0]
        verdict = _verdict(by_seed, difference, spread)
        numbers = {"task": task, "method": method, "before": means[0], "after": means[1], "difference": difference}
        rows.append({**numbers, "seeds_before": len(values[0]), "seeds_after": len(values[1]), "verdict": verdict})
        cells = [f"{mean_std(v, unit.scale, unit.digits)} ({len(v)})" if v else NONE for v in values]
        printed.append((task, method, *cells, NONE if difference is None else signed(difference, unit), verdict))
    named = f" {unit.name}" if unit.name else ""
    header = ("task", "method", f"before{named} (seeds)", f"after{named} (seeds)", "after - before", "")
    note = f"{column.replace('_', ' ')}; changed: by more than the larger standard deviation over seeds."
    return Table(header, tuple(printed), rows, (note,))


def interval(differences: Sequence[float], confidence: float) -> tuple[float, float] | tuple[None, None]:
    """Return the ends of Student's confidence interval of the mean difference between two candidates' results.

    The result is (None, None) for fewer than two differences.

    Args:
        differences: differences between runs of the two candidates with the same seed, one per seed.
        confidence: confidence level, valid for normally distributed differences.
    """
    n = len(differences)
    if n < 2:
        return None, None
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.mean(differences)
    return mean - half, mean + half


def _caution(differences: Sequence[float], low: float | None, high: float | None) -> str:
    if not differences:
        return "no seed of both"
    if low is None or high is None:
        return "one seed: no interval"
    return "the interval contains 0" if low <= 0 <= high else ""


def _verdict(by_seed: Sequence[Mapping[int, float]], difference: float | None, spread: float) -> str:
    before, after = by_seed
    if difference is None:
        return "only after" if after else "only before" if before else "nothing to compare"
    if dict(before) == dict(after):
        return "the same"
    return "changed" if abs(difference) > spread else ""
