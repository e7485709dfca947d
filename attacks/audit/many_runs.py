"""A lower bound on epsilon from many fresh runs, and the most that so many runs can state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks._binomial import lower, upper
from attacks.audit._outcomes import Event, SplitRuns, candidate_events, event_bounds, split_runs
from distillkit._utils import check

__all__ = ["epsilon_lower_bound", "max_lower_bound"]


def epsilon_lower_bound(
    inside: Tensor, outside: Tensor, delta: float, *, confidence: float = 0.95, generator: int | torch.Generator = 0
) -> float:
    """How large epsilon is at least, at `delta`, from fresh runs with a record (`inside`) and without it (`outside`).

    The number to print beside a claimed epsilon, which is a bound from above: the truth lies between them. One half of
    the runs chooses the event that gives the largest bound, the other half computes it, so the bound is above the truth
    with probability at most 1 - confidence. Print `max_lower_bound` beside it: with so many runs nothing larger can be found,
    whatever the mechanism does. To test a claim use `audit_claim`, which sees far more.

    Args:
        inside, outside: as for `audit_claim`: one score a run or several, at least two runs each.
        delta: at which epsilon is bounded, in [0, 1).
        confidence: in (0, 1), with which the bound holds.
        generator: a seed or a generator, which draws the runs that choose and those that are counted.

    Returns:
        Epsilon, at least 0; 0 where nothing was found.

    Raises:
        TypeError, ValueError: scores that are NaN or too few, numbers out of range.
    """
    delta = check.real_number(delta, "delta", least=0.0, below=1.0)
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    chosen, counted = split_runs(inside, outside, generator)
    return max(0.0, float(_epsilon(*event_bounds(counted, _largest(chosen, delta, confidence), confidence), delta)))


def _largest(chosen: SplitRuns, delta: float, confidence: float) -> Event:
    """The event that gives the largest bound."""
    most, best, error = -math.inf, next(candidate_events(chosen))[0][0], (1 - confidence) / 2
    for found, hits, n, others, m in candidate_events(chosen):
        epsilons = _epsilon(lower(hits.numpy(), n, error), upper(others.numpy(), m, error), delta)
        if epsilons.max() > most:
            most, best = float(epsilons.max()), found[int(epsilons.argmax())]
    return best


def _epsilon(likely: Any, unlikely: Any, delta: float) -> Any:
    """What two event_bounds on an event's probabilities say of epsilon, at least 0."""
    return np.log(np.maximum((np.asarray(likely) - delta) / unlikely, 1.0))


def max_lower_bound(runs: int, *, confidence: float = 0.95) -> float:
    """The largest epsilon that `epsilon_lower_bound` can state with `runs` runs in each world, if the worlds never overlap.

    Print it beside what `epsilon_lower_bound` states: 2 below a max_lower_bound of 2.1 says that the runs were too few, 2 below a max_lower_bound
    of 6 says something about the mechanism.

    Args:
        runs: in each of the two worlds, at least 2; half of them are counted.
        confidence: in (0, 1), that of `epsilon_lower_bound`.

    Raises:
        TypeError, ValueError: numbers out of range.
    """
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    half = check.positive_int(runs, "runs", least=2) // 2
    error = (1 - confidence) / 2
    return math.log(float(lower(half, half, error)) / float(upper(0, half, error)))
