"""Number of seeds that a paired comparison needs, computed from pilot runs."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from distillkit._utils import check
from distillkit.study._records import RecordsLike, differences, group_records
from distillkit.study._tables import unit_of

PILOT_PAIRS = 5
"""Smallest number of pilot pairs. With fewer, the upper limit of the standard deviation is of no use."""
STD_CONFIDENCE = 0.8
"""Confidence level of the upper limit of the pilot's standard deviation."""
_MOST_SEEDS = 10**6


@dataclass(frozen=True)
class PowerAnalysis:
    """Number of seeds that a paired t-test needs to find an effect of a given size, computed from pilot runs.

    Pilot runs are earlier runs of both candidates; two runs with the same seed are a pilot pair. The standard deviation
    of the differences within a few pilot pairs is uncertain. The number of seeds is therefore computed from the upper
    80 % confidence limit of the standard deviation (Browne, Statistics in Medicine 1995). For n pilot pairs, the limit
    is std * sqrt((n - 1) / q), where q is the 20 % quantile of the chi-square distribution with n - 1 degrees of
    freedom. Differences are assumed to be normally distributed.

    Args:
        differences: difference of each pilot pair (candidate - baseline), by seed; at least five.
        effect: mean difference that the comparison should find, positive, in the unit of the differences: 0.05 for
            five percentage points of accuracy.
        power: minimum probability with which the test finds the effect.
        level: significance level of the two-sided test.
        column: name of the compared quantity in the records of the runs, such as "accuracy_last"; used to print units.

    Raises:
        ValueError, TypeError: there are fewer than five pilot pairs, all differences are equal, accuracies are given in
            per cent, or another argument has the wrong type or is out of range.
    """

    differences: Mapping[int, float]
    effect: float
    power: float = 0.8
    level: float = 0.05
    column: str = "accuracy_last"

    def __post_init__(self) -> None:
        pilot = check.instance(self.differences, Mapping, "differences", "a mapping from seeds to differences")
        for seed, value in pilot.items():
            check.positive_int(seed, "a seed in differences", least=0)
            check.real_number(value, f"differences[{seed}]")
        if len(pilot) < PILOT_PAIRS:
            few = f"at least {PILOT_PAIRS} pilot pairs, to estimate their spread; got {len(pilot)}"
            raise ValueError(f"differences must hold {few}. Run both candidates with more seeds")
        if len(found := set(pilot.values())) == 1:
            raise ValueError(f"differences must differ between seeds, but all {len(pilot)} are {found.pop()}")
        most = max(map(abs, (check.real_number(self.effect, "effect", above=0.0), *pilot.values())))
        if unit_of(self.column, []).name == "%" and most > 1:
            name = "effect" if most == self.effect else "differences"
            raise ValueError(
                f"{name} must be in the unit of {self.column}, a fraction of at most 1, got {most:g}; for three "
                "percentage points pass 0.03"
            )
        seeds_needed(self.effect, self.std_upper, power=self.power, level=self.level)

    @property
    def std(self) -> float:
        """Standard deviation of the differences (candidate - baseline) of n pilot pairs, with divisor n - 1."""
        return statistics.stdev(self.differences.values())

    @property
    def std_upper(self) -> float:
        """Upper 80 % confidence limit of the standard deviation that `std` estimates."""
        from scipy.stats import chi2

        freedom = len(self.differences) - 1
        return self.std * math.sqrt(freedom / float(chi2.ppf(1 - STD_CONFIDENCE, freedom)))

    @property
    def seeds(self) -> int:
        """Smallest number of seeds with the requested power, if the standard deviation is `std_upper`."""
        return seeds_needed(self.effect, self.std_upper, power=self.power, level=self.level)

    def __str__(self) -> str:
        unit = unit_of(self.column, [*self.differences.values()])
        name = {"%": " points", "": ""}.get(unit.name, f" {unit.name}")
        effect, std, upper = (f"{unit.scale * v:.{unit.digits}f}" for v in (self.effect, self.std, self.std_upper))
        reached = power_of(self.seeds, self.effect, self.std_upper, level=self.level)
        return (
            f"{self.seeds} seeds give a power of {100 * reached:.1f} % for a difference of {effect}{name} in "
            f"{self.column.replace('_', ' ')}, in a two-sided paired t-test at {100 * self.level:g} %. The standard "
            f"deviation of the {len(self.differences)} pilot differences is {std}, and its upper 80 % limit {upper}."
        )


def power_analysis(
    records: RecordsLike, method: str, base: str = "FedAvg", *, effect: float, column: str = "accuracy_last",
    task: str | None = None, power: float = 0.8, level: float = 0.05,
) -> PowerAnalysis:  # fmt: skip
    """Return the number of seeds that a comparison of two candidates needs, computed from pilot runs of both.

    Call this function before the comparison, and use new seeds for the comparison itself.

        power_analysis("runs/pilot", "VHL", "FedAvg", effect=0.05).seeds

    Args:
        records: records of the pilot runs, or their study's folder.
        method, base: names of the candidate and of the baseline, with at least five seeds in common.
        effect: mean difference that the comparison should find, in the unit of the records: 0.05 for five percentage
            points of accuracy.
        column: name of the column to compare, see `Record.last`.
        task: name of the task; may be omitted if there is only one.
        power: minimum probability with which the test finds the effect.
        level: significance level of the two-sided paired t-test.

    Raises:
        ValueError: there is no such task or candidate, no run has the column, or `PowerAnalysis` refuses the arguments.
    """
    found = group_records(records, columns=(column,))
    tasks = tuple(dict.fromkeys(g.task for g in found))
    if task is None and len(tasks) > 1:
        raise ValueError(f"task must be one of {', '.join(map(repr, tasks))}, because there are several; got None")
    name = tasks[0] if task is None else check.one_of(task, "task", tasks)
    groups = {g.method: g for g in found if g.task == name}
    check.one_of(method, "method", tuple(groups))
    check.one_of(base, "base", tuple(groups))
    if method == base:
        raise ValueError(f"method and base must differ, got {method!r} twice")
    return PowerAnalysis(differences(groups[method], groups[base], column), effect, power, level, column)


def seeds_needed(effect: float, std: float, *, power: float = 0.8, level: float = 0.05) -> int:
    """Return the smallest number of seeds with which a two-sided paired t-test finds an effect.

    Args:
        effect: true mean difference, positive.
        std: standard deviation over seeds of the difference (candidate - baseline), in the same unit as `effect`.
        power: minimum probability with which the test finds the effect; greater than `level` and less than 1.
        level: significance level of the test, in (0, 1).

    Raises:
        ValueError: an argument is out of range, or more than a million seeds are needed.
    """
    check.real_number(effect, "effect", above=0.0)
    check.real_number(std, "std", above=0.0)
    check.real_number(level, "level", above=0.0, below=1.0)
    check.real_number(power, "power", above=level, below=1.0)
    possible = range(2, _MOST_SEEDS + 1)
    index = bisect.bisect_left(possible, power, key=lambda seeds: power_of(seeds, effect, std, level=level))
    if index == len(possible):
        raise ValueError(f"effect must be found with at most {_MOST_SEEDS:,} seeds; got {effect} for std={std}")
    return possible[index]


def power_of(seeds: int, effect: float, std: float, *, level: float = 0.05) -> float:
    """Return the power of a two-sided paired t-test.

    The square of the test statistic has a noncentral F distribution with 1 and n - 1 degrees of freedom and
    noncentrality n (effect / std)^2.
    """
    from scipy.stats import ncf, t

    critical = float(t.ppf(1 - level / 2, seeds - 1))
    return float(ncf.sf(critical**2, 1, seeds - 1, seeds * (effect / std) ** 2))
