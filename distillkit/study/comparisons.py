"""Comparisons of candidates by paired differences, and of two executions of a study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from distillkit._utils import check
from distillkit._utils.tables import NONE, Table
from distillkit.study._formatting import mean_std, unit_of
from distillkit.study._records import RecordsLike, differences, group_records, require_columns

__all__ = ["compare_studies", "interval", "paired_differences"]

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
    printed, rows, few = [], [], []
    for g in (g for g in found if g.method != base):
        values = [*differences(g, bases[g.task], column).values()]
        low, high = interval(values, confidence)
        mean = statistics.mean(values) if values else None
        pairs, expected = len(values), len(g.expected_seeds)
        span, caution = NONE, "one seed: no interval" if values else "no seed of both"
        if low is not None and high is not None:
            span = f"[{unit.signed(low)}, {unit.signed(high)}]"
            caution = "the interval contains 0" if low <= 0 <= high else ""
            few += [f"{g.method} on {g.task} has {pairs}"] * (pairs < MIN_SEEDS)
        numbers = {"task": g.task, "method": g.method, "base": base, "seeds": pairs}
        rows.append({**numbers, "difference": mean, "low": low, "high": high, "caution": caution})
        of = f"{pairs}" if pairs == expected else f"{pairs} of {expected}"
        printed.append((g.task, g.method, of, unit.signed(mean), span, caution))
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
    sides = [{(g.task, g.method): g for g in group_records(*one)} for one in ((before, "before"), (after, "after"))]
    require_columns([r for side in sides for g in side.values() for r in g.records], (column,))
    unit = unit_of(column, [v for side in sides for g in side.values() for v in g.by_seed(column).values()])
    printed, rows = [], []
    for task, method in dict.fromkeys((*sides[1], *sides[0])):
        old, new = (side[task, method].by_seed(column) if (task, method) in side else {} for side in sides)
        values = [[*old.values()], [*new.values()]]
        means = [statistics.mean(v) if v else None for v in values]
        spread = max((statistics.stdev(v) for v in values if len(v) > 1), default=0.0)
        difference = None if means[0] is None or means[1] is None else means[1] - means[0]
        if difference is None:
            verdict = "only after" if new else "only before" if old else "nothing to compare"
        else:
            verdict = "the same" if old == new else "changed" if abs(difference) > spread else ""
        numbers = {"task": task, "method": method, "before": means[0], "after": means[1], "difference": difference}
        rows.append({**numbers, "seeds_before": len(old), "seeds_after": len(new), "verdict": verdict})
        cells = [f"{mean_std(v, unit.scale, unit.digits)} ({len(v)})" if v else NONE for v in values]
        printed.append((task, method, *cells, unit.signed(difference), verdict))
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
