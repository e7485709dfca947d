"""Number of seeds of a paired comparison: published values, the distributions' definitions, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from distillkit.study import PowerAnalysis, power_analysis, seeds_needed
from distillkit.study._power import power_of
from tests.distillkit.study.sample_records import record

PILOT = {10: 0.031, 11: 0.058, 12: -0.004, 13: 0.047, 14: 0.022}


@pytest.mark.parametrize(
    ("seeds", "effect", "level", "power"),
    [
        (50, 0.421637, 0.05, 0.832114),  # Cohen (1969) p. 48, as in the manual of G*Power 3.1
        (60, 0.2, 0.10, 0.4555818),  # Cohen (1988) p. 47, as in R's pwr.t.test
        (40, 8 / (16 * math.sqrt(2 * (1 - 0.6))), 0.05, 0.931525),  # Cohen (1988) p. 50, paired, as in R's pwr.t.test
    ],
)
def test_power_has_published_values(seeds: int, effect: float, level: float, power: float) -> None:
    assert power_of(seeds, effect, 1.0, level=level) == pytest.approx(power, abs=2e-6)


@pytest.mark.parametrize(
    ("effect", "std", "seeds"),
    [
        (0.4, 1.0, 52),  # Brysbaert, "How many participants do we have to include", Journal of Cognition 2019
        (2.0, math.sqrt(10), 22),  # R's power.t.test: n = 21.62146
        (1.5, math.sqrt(20), 72),  # R's power.t.test: n = 71.71226
    ],
)
def test_numbers_of_seeds_are_published(effect: float, std: float, seeds: int) -> None:
    assert seeds_needed(effect, std) == seeds_needed(100 * effect, 100 * std) == seeds


def integrated_power(seeds: int, ratio: float, level: float) -> float:
    """Return the power by integrating over the sample standard deviation, from the definition of the t-test."""
    critical, freedom = stats.t.ppf(1 - level / 2, seeds - 1), seeds - 1
    shift, root = ratio * math.sqrt(seeds), math.sqrt(freedom)

    def density(s: float) -> float:
        rejected = stats.norm.sf(critical * s - shift) + stats.norm.cdf(-critical * s - shift)
        return float(stats.chi.pdf(s * root, freedom) * root * rejected)

    width = 8 / math.sqrt(2 * freedom)
    return float(integrate.quad(density, max(0.0, 1 - width), 1 + width, limit=500, epsabs=1e-11)[0])


@given(st.integers(2, 300), st.floats(-3, 2), st.sampled_from([0.01, 0.05, 0.2]))
def test_power_is_the_integral_over_the_sample_deviation(seeds: int, exponent: float, level: float) -> None:
    ratio = 10**exponent
    assert power_of(seeds, ratio, 1.0, level=level) == pytest.approx(integrated_power(seeds, ratio, level), abs=1e-7)


@given(st.floats(0.05, 20), st.floats(0.3, 0.99), st.sampled_from([0.01, 0.05, 0.2]))
def test_number_of_seeds_is_the_smallest_that_suffices(ratio: float, power: float, level: float) -> None:
    slow = next(n for n in range(2, 50000) if power_of(n, ratio, 1.0, level=level) >= power)
    assert seeds_needed(ratio, 1.0, power=power, level=level) == slow


@pytest.mark.slow
def test_upper_limit_holds_the_true_deviation_in_eight_of_ten_pilots() -> None:
    rng = np.random.default_rng(1)
    for pairs in (5, 9):
        pilots = [
            PowerAnalysis(dict(enumerate(row)), 1.0, column="loss")
            for row in rng.normal(0.3, 2.0, (1000, pairs)).tolist()
        ]
        share = np.mean([pilot.std_upper > 2.0 for pilot in pilots])
        assert share == pytest.approx(0.8, abs=0.04)  # three standard deviations


def test_pilot_runs_give_the_number_of_seeds() -> None:
    analysis = PowerAnalysis(PILOT, 0.05)
    spread = np.std([*PILOT.values()], ddof=1)
    assert (analysis.std, analysis.std_upper) == pytest.approx((spread, spread * math.sqrt(4 / 1.6487766180659715)))
    assert analysis.seeds == seeds_needed(0.05, analysis.std_upper) == 7
    most = PowerAnalysis(PILOT, 0.05, power=0.9, level=0.01)
    assert most.seeds == seeds_needed(0.05, most.std_upper, power=0.9, level=0.01)
    assert power_of(7, 0.05, analysis.std_upper) > 0.8 > power_of(6, 0.05, analysis.std_upper)
    assert str(analysis).startswith("7 seeds give a power of 8")
    assert "for a difference of 5.0 points in accuracy last, in a two-sided paired t-test at 5 %." in str(analysis)
    assert "5 pilot differences is 2.4, and its upper 80 % limit 3.7." in str(analysis)


def test_pilots_are_read_from_records_and_studies() -> None:
    runs = [record([0.5, 0.5 + d, 0.5 + d], "VHL", seed) for seed, d in PILOT.items()]
    runs += [record([0.4, 0.5, 0.5], seed=seed) for seed in (*PILOT, 99)] + [record([0.1], task="other")]
    analysis = power_analysis(runs, "VHL", effect=0.05, task="digits", column="accuracy_late")
    assert dict(analysis.differences) == pytest.approx(PILOT)
    assert (analysis.seeds, analysis.column) == (7, "accuracy_late")
    for wrong, message in (
        ({}, "task must be one of 'digits', 'other', because there are several"),
        ({"task": "x"}, "task must be one of"),
        ({"task": "digits", "base": "VHL"}, "method and base must differ, got 'VHL' twice"),
        ({"task": "digits", "base": "FedDM"}, "base must be one of"),
        ({"task": "other"}, "method must be one of"),
        ({"task": "digits", "column": "ε"}, "columns must be among those"),
    ):
        with pytest.raises(ValueError, match=message):
            power_analysis(runs, "VHL", **{"effect": 0.05, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"differences": dict(list(PILOT.items())[:4])}, "at least 5 pilot pairs, to estimate their spread; got 4"),
        ({"differences": dict.fromkeys(PILOT, 0.1)}, "must differ between seeds, but all 5 are 0.1"),
        ({"differences": {**PILOT, 15: math.nan}}, r"differences\[15\] must be finite"),
        ({"differences": {**PILOT, -1: 0.1}}, "a seed in differences must be at least 0"),
        ({"effect": 0.0}, "effect must be greater than 0"),
        ({"effect": 3}, "effect must be in the unit of accuracy_last, a fraction of at most 1, got 3"),
        ({"differences": {s: 100 * v for s, v in PILOT.items()}}, "differences must be in the unit of accuracy_last"),
        ({"differences": {s: -100 * v for s, v in PILOT.items()}}, "differences must be in the unit of accuracy_last"),
        ({"effect": 1e-7}, "at most 1,000,000 seeds"),
        ({"power": 0.04}, "power must be greater than 0.05"),
        ({"power": 1.0}, "power must be less than 1"),
        ({"level": 0.0}, "level must be greater than 0"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerAnalysis(**{"differences": PILOT, "effect": 0.05, **changes})  # type: ignore[arg-type]
