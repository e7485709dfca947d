"""Lower bound on epsilon from many fresh runs of a mechanism.

The module also computes the largest bound that a given number of runs can show.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attacks._binomial import lower, upper
from attacks.audit._outcomes import Event, SplitRuns, candidate_events, event_counts, split_runs
from attacks.audit._rates import p_value
from distillkit._utils import check


def epsilon_lower_bound(
    inside: Tensor, outside: Tensor, delta: float, *, confidence: float = 0.95, generator: int | torch.Generator = 0
) -> float:
    """Return a lower bound on epsilon at `delta`, from fresh runs with a record (`inside`) and without it (`outside`).

    Report the lower bound next to a claimed epsilon, which is an upper bound: the true value lies between them. The
    bound follows from how often an event (a score on one side of a threshold) occurs with and without the record. The
    event is chosen on one half of the runs. The bound is the largest epsilon that an exact test on the other half
    refutes, so it exceeds the true value with probability at most 1 - confidence. Report `max_lower_bound`, too: it is
    the largest result that this number of runs allows for any mechanism. To test a claim, use `audit_claim`, which is
    far more sensitive.

    Args:
        inside: scores of the n runs with the record: one score for each run, [n], or d different scores, such as one
            for each layer, [n, d]. An event concerns a single one of the d scores. At least two runs.
        outside: the same scores of the m runs without the record, [m] or [m, d]. At least two runs.
        delta: delta at which epsilon is bounded, in [0, 1).
        confidence: confidence of the bound, in (0, 1).
        generator: seed or generator that splits the runs.

    Returns:
        Lower bound on epsilon, at least 0; 0 if no difference was found.

    Raises:
        TypeError, ValueError: scores are NaN or too few, or a value is out of range.
    """
    delta = check.real_number(delta, "delta", least=0.0, below=1.0)
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    chosen, counted = split_runs(inside, outside, generator)
    counts = event_counts(counted, _largest(chosen, delta, confidence))
    return _largest_refuted(counts, delta, 1 - confidence)


def _largest_refuted(counts: tuple[int, int, int, int], delta: float, level: float) -> float:
    """Return the largest epsilon that the counts refute at a level, by bisection, or 0 if they refute none."""

    def refuted(epsilon: float) -> bool:
        return p_value(*counts, [(epsilon, delta)], level) <= level

    low, high = 0.0, math.log(counts[3]) + 10.0
    for _ in range(28):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _largest(chosen: SplitRuns, delta: float, confidence: float) -> Event:
    """Return the event (a score on one side of a threshold) that gives the largest lower bound on epsilon."""
    most, best, error = -math.inf, next(candidate_events(chosen))[0][0], (1 - confidence) / 2
    for found, hits, n, others, m in candidate_events(chosen):
        likely, unlikely = lower(hits.numpy(), n, error), upper(others.numpy(), m, error)
        epsilons = np.log(np.maximum((likely - delta) / unlikely, 1.0))
        if epsilons.max() > most:
            most, best = float(epsilons.max()), found[int(epsilons.argmax())]
    return best


def max_lower_bound(runs: int, *, confidence: float = 0.95) -> float:
    """Return the largest bound that `epsilon_lower_bound` can give for a number of runs with and without a record.

    This maximum is reached if the scores of runs with the record and the scores of runs without it never overlap. If a
    lower bound is close to this maximum, it was limited by the number of runs, so use more runs.

    Args:
        runs: number of runs with the record, which is also the number of runs without it; at least 2. Half of all runs
            are used to choose an event (a score beyond a threshold), and the other runs to count how often it occurs.
        confidence: confidence of the bound, as in `epsilon_lower_bound`, in (0, 1).

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    half = check.positive_int(runs, "runs", least=2) // 2
    return _largest_refuted((half, half, 0, half), 0.0, 1 - confidence)
