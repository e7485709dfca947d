"""How far ways, or versions of one study, are apart, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distillkit._utils import check
from distillkit.study._groups import Given, Group, groups
from distillkit.study.formatting import NONE, Table, Unit, mean_std, unit_of
from distillkit.study.tables import require_columns

__all__ = ["compare_studies", "interval", "paired_differences"]


def paired_differences(
    records: Given, base: str = "FedAvg", *, confidence: float = 0.95, column: str = "accuracy_last"
) -> Table:
    """How far each way is from a base way, seed by seed, with the interval that the mean difference lies in.

    Two ways under one seed share the split of the data and the first weights, so their difference varies less than
    either does. The interval is Student's, of the mean of the n differences d: mean(d) ± t(n - 1) std(d) / sqrt(n). It
    takes the differences for normal, and speaks of new seeds, not of a new test set. Each interval holds with its
    confidence by itself: among twenty, one may well miss.

    Args:
        records: of a study, or its folder.
        base: the way that the others are held against.
        confidence: of each interval.
        column: what is compared, see `Record.last`.

    Returns:
        A row a task and way: over how many seeds that both have, the mean difference (way - base; of accuracies in
        points of per cent), its interval, and a caution where that contains 0 or cannot be had (fewer than 2 seeds).

    Raises:
        ValueError: no records, a task without the base, a column that no run has, or a confidence outside (0, 1).
    """
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    found = groups(records)
    require_columns(found, (column,))
    tasks = {g.task: None for g in found}
    bases = {g.task: g for g in found if g.method == base}
    lacking = [task for task in tasks if task not in bases]
    if lacking:
        ways = ", ".join(dict.fromkeys(repr(g.method) for g in found if g.task == lacking[0]))
        raise ValueError(f"base must be a way of every task; {lacking[0]!r} has no {base!r}, but {ways}")
    values = [v for g in found for v in g.values(column) if v is not None]
    unit = unit_of(column, [_number(v, column) for v in values])
    printed, rows = [], []
    for g in (g for g in found if g.method != base):
        differences = _differences(g, bases[g.task], column)
        low, high = interval(differences, confidence)
        mean = statistics.mean(differences) if differences else None
        said = _caution(differences, low, high)
        of = f"{len(differences)}" if len(differences) == len(g.wanted) else f"{len(differences)} of {len(g.wanted)}"
        numbers = {"task": g.task, "method": g.method, "base": base, "seeds": len(differences)}
        numbers |= {"difference": mean, "low": low, "high": high, "caution": said}
        spans = NONE if low is None or high is None else f"[{_signed(low, unit)}, {_signed(high, unit)}]"
        printed.append((g.task, g.method, of, NONE if mean is None else _signed(mean, unit), spans, said))
        rows.append(numbers)
    points = "points" if unit.name == "%" else unit.name
    shown = f"{column.replace('_', ' ')} minus {base}'s" + (f" ({points})" if points else "")
    header = ("task", "method", "seeds of both", shown, f"{100 * confidence:g} % interval", "caution")
    note = (
        "Differences under the same seed; Student's interval of their mean, each interval by itself. "
        "It speaks of other seeds, not of another test set."
    )
    return Table(header, tuple(printed), rows, (note,))


def compare_studies(before: Given, after: Given, *, column: str = "accuracy_last") -> Table:
    """What a rerun changed: the same study from two versions of the code, or on two machines, beside each other.

    Args:
        before, after: records of a study, or its folder.
        column: what is compared, see `Record.last`.

    Returns:
        A row a task and way that either has: mean ± standard deviation over seeds before and after, and the difference
        of the means. It says "the same" where both have the same seeds and each gives the same number to the last bit,
        "moved" where the means are further apart than the larger of the two standard deviations (or differ at all
        where there is one seed a side), and which side lacks the way.

    Raises:
        ValueError: no records, or a column that no run has.
    """
    old, new = groups(before, "before"), groups(after, "after")
    require_columns([*old, *new], (column,))
    keys = dict.fromkeys((g.task, g.method) for g in (*new, *old))
    sides = [{(g.task, g.method): g for g in found} for found in (old, new)]
    unit = unit_of(column, [_number(v, column) for g in (*old, *new) for v in g.values(column) if v is not None])
    printed, rows = [], []
    for task, method in keys:
        by_seed = [_by_seed(side.get((task, method)), column) for side in sides]
        values = [list(found.values()) for found in by_seed]
        means = [statistics.mean(v) if v else None for v in values]
        spread = max((statistics.stdev(v) for v in values if len(v) > 1), default=0.0)
        difference = None if means[0] is None or means[1] is None else means[1] - means[0]
        said = _verdict(by_seed, difference, spread)
        numbers = {"task": task, "method": method, "before": means[0], "after": means[1], "difference": difference}
        rows.append({**numbers, "seeds_before": len(values[0]), "seeds_after": len(values[1]), "said": said})
        cells = [f"{mean_std(v, unit.scale, unit.digits)} ({len(v)})" if v else NONE for v in values]
        printed.append((task, method, *cells, NONE if difference is None else _signed(difference, unit), said))
    named = f" {unit.name}" if unit.name else ""
    header = ("task", "method", f"before{named} (seeds)", f"after{named} (seeds)", "after - before", "")
    note = f"{column.replace('_', ' ')}; moved: by more than the larger standard deviation over seeds."
    return Table(header, tuple(printed), rows, (note,))


def interval(differences: Sequence[float], confidence: float) -> tuple[float, float] | tuple[None, None]:
    """Student's interval of the mean of some differences; (None, None) for fewer than two.

    Args:
        differences: one a seed.
        confidence: with which it holds the mean, if the differences are normal.
    """
    n = len(differences)
    if n < 2:
        return None, None
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.mean(differences)
    return mean - half, mean + half


def _differences(group: Group, base: Group, column: str) -> list[float]:
    """Candidate minus base under every seed where both have a number."""
    other = {r.seed: r.last(column) for r in base.records}
    pairs = [(r.last(column), other.get(r.seed)) for r in group.records]
    return [_number(a, column) - _number(b, column) for a, b in pairs if a is not None and b is not None]


def _number(value: Any, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"column must name numbers, {column!r} holds {value!r}")
    return float(value)


def _caution(differences: Sequence[float], low: float | None, high: float | None) -> str:
    if not differences:
        return "no seed of both"
    if low is None or high is None:
        return "one seed: no interval"
    return "the interval contains 0" if low <= 0 <= high else ""


def _signed(value: float, unit: Unit) -> str:
    return f"{unit.scale * value:+.{unit.digits}f}"


def _by_seed(group: Group | None, column: str) -> dict[int, float]:
    records = group.records if group is not None else ()
    return {r.seed: _number(r.last(column), column) for r in records if r.last(column) is not None}


def _verdict(by_seed: Sequence[Mapping[int, float]], difference: float | None, spread: float) -> str:
    before, after = by_seed
    if difference is None:
        return "only after" if after else "only before" if before else "nothing to compare"
    if dict(before) == dict(after):
        return "the same"
    return "moved" if abs(difference) > spread else ""
