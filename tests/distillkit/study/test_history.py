"""Values from histories: rounds to a target, and the best round of the mean over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.study.history import best_seed_mean, rounds_to
from tests.refused import refused


def rows(accuracies: list[float | None]) -> list[dict[str, Any]]:
    return [{"round": number, "accuracy": a} for number, a in enumerate(accuracies, start=1)]


def test_rounds_to_a_target_accuracy() -> None:
    history = rows([0.1, None, 0.5, 0.4, 0.7, 0.5])
    assert [rounds_to(history, t) for t in (0.0, 0.1, 0.3, 0.5, 0.51, 0.7)] == [1, 1, 3, 3, 5, 5]
    assert rounds_to(history, 0.71) is None
    assert rounds_to([], 0.1) is None
    assert rounds_to(history[3:], 0.5) == 5
    for target in (-0.1, 79.0):
        with pytest.raises(ValueError, match="target"):
            rounds_to(history, target)


def released(curves: list[list[float]]) -> tuple[float, float]:
    """Return lines 114-131 of the single image's plotting_scripts/multiseed_helper.py, for one method."""
    best_avg = np.max(np.mean(curves, axis=0))
    bests = [np.max(line) for line in curves]
    low, high = np.min(bests), np.max(bests)
    return best_avg, (best_avg - low) if (best_avg - low) > (high - best_avg) else (high - best_avg)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=1)))
def test_best_mean_over_seeds_equals_the_release(curves: list[list[float]]) -> None:
    found = best_seed_mean([rows([*curve]) for curve in curves])
    accuracy, deviation = released(curves)
    assert (found.accuracy, found.deviation) == pytest.approx((accuracy, deviation), rel=1e-12, abs=1e-12)
    assert np.mean(curves, axis=0)[found.round - 1] == pytest.approx(accuracy)


def test_mismatched_histories_are_refused() -> None:
    for runs, got in (([], "none"), ([[]], "1 histories, the first of them empty")):
        refused(
            lambda runs=runs: best_seed_mean(runs),
            ValueError,
            f"at least one history of at least one round, got {got}$",
        )
    for row, error, said in (
        ({"round": 1, "accuracy": True}, TypeError, r"runs\[1\]\[0\]\['accuracy'\] must be a number or None, got True"),
        ({}, ValueError, r"runs\[1\]\[0\] must be a row of a history, but has no 'round'$"),
    ):
        refused(lambda row=row: best_seed_mean([rows([0.1]), [row]]), error, said)
    refused(lambda: best_seed_mean([rows([0.1, 0.2]), rows([0.1])]), ValueError, r"runs\[1\] has 1, runs\[0\] 2")
    refused(lambda: best_seed_mean([rows([0.1, 0.2]), rows([0.1, 0.2, 0.3])[1:]]), ValueError, r"runs\[1\] has 2")
    with pytest.raises(ValueError, match=r"runs\[1\] has no accuracy in round 2"):
        best_seed_mean([rows([0.1, 0.2]), rows([0.1, None])])
    with pytest.raises(ValueError, match=r"runs\[1\] has no accuracy in round 2; pass"):
        best_seed_mean([rows([0.1, 0.2, 0.3]), rows([0.1, None, None])])
