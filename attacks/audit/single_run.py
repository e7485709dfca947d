"""Lower bound on epsilon from a single run with many canaries, which are records made for the audit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attacks.audit._outcomes import check_scores
from distillkit._utils import check

TRADEOFFS = ("approximate", "gaussian")
"""Assumptions of `one_run_lower_bound` on the audited mechanism."""


def one_run_lower_bound(
    scores: Tensor,
    included: Tensor,
    guesses: int,
    delta: float,
    *,
    tradeoff: str = "approximate",
    confidence: float = 0.95,
) -> float:
    """Return a lower bound on epsilon from a *single* run with many canaries, each included by its own coin flip.

    Use it for mechanisms that are too expensive to run many times. A canary is a record made for the audit. Before the
    run, a fair coin flip decides for each canary whether it is among the training records. The attacker guesses
    "included" for the canaries with the highest scores and "left out" for those with the lowest scores, `guesses`
    guesses in all. It makes no guess for the remaining canaries. The larger the number of correct guesses, the larger
    is the lower bound.

    This bound is far weaker than a bound from many runs. It is larger, and closer to the truth, if you may assume that
    the mechanism's trade-off curve is that of one Gaussian release (`tradeoff="gaussian"`). This is so for Gaussian
    noise without sampling, and nearly so for many steps of DP-SGD. The result is then the epsilon, at `delta`, of the
    Gaussian mechanism with the most noise that the number of correct guesses does not refute.

    Args:
        scores: one score per canary, floats [m], higher if the canary seems included.
        included: whether each canary was included, bool [m]: the coin flips.
        guesses: number of guesses, 1 to m; half of them (rounded up) are "included". Fix this number before looking at
            the scores.
        delta: delta at which epsilon is bounded, in [0, 1); above 0 if `tradeoff` is "gaussian".
        tradeoff: "approximate" for any (epsilon, delta)-private mechanism; "gaussian" for a mechanism whose trade-off
            curve is Gaussian.
        confidence: confidence of the bound, in (0, 1).

    Returns:
        Lower bound on epsilon, at least 0; 0 if chance explains the number of correct guesses.

    Raises:
        TypeError, ValueError: scores are NaN, `included` is not bool, or a value is out of range.

    Papers: "approximate": Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (NeurIPS 2023),
    theorem 5.2 with the delta term as in their appendix D. "gaussian": Mahloujifar, Melis and Chaudhuri, "Auditing
    f-differential privacy in one run" (2024), with Gaussian trade-off curves.
    """
    scores = check_scores(scores, "scores", least=1)
    if check.bool_tensor(included, "included", "[m]").shape != scores.shape:
        raise ValueError(f"included must have the scores' shape {list(scores.shape)}, got {list(included.shape)}")
    guesses = check.positive_int(guesses, "guesses", most=len(scores))
    delta = check.real_number(delta, "delta", least=0.0, below=1.0)
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    check.one_of(tradeoff, "tradeoff", TRADEOFFS)
    if tradeoff == "gaussian" and not delta:
        raise ValueError("delta must be above 0 with tradeoff='gaussian', whose epsilon at delta 0 is infinite, got 0")
    order, coins = scores.argsort(descending=True, stable=True), included.to(scores.device)
    high, low = order[: (guesses + 1) // 2], order[len(order) - guesses // 2 :]
    right = int(coins[high].sum() + (~coins[low]).sum())
    level = 1 - confidence
    if tradeoff == "gaussian":
        shift = _largest_refuted(lambda mu: _gaussian_refuted(len(scores), guesses, right, mu, level))
        return _gaussian_epsilon(shift, delta) if shift else 0.0
    return _largest_refuted(lambda epsilon: _chance(len(scores), guesses, right, epsilon, delta) <= level)


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    """Return the largest value that is refuted, by bisection; 0 if 0 is not refuted."""
    if not refuted(0.0):
        return 0.0
    below, above = 0.0, 1.0
    while refuted(above) and above < 64:
        below, above = above, 2 * above
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (middle, above) if refuted(middle) else (below, middle)
    return below


def _gaussian_refuted(canaries: int, guesses: int, right: int, shift: float, level: float) -> bool:
    """Return whether `right` correct guesses, or more, have a probability below `level` for every mechanism with the
    trade-off curve of N(0, 1) and N(shift, 1).

    Let p_i be the probability of exactly i correct guesses, A_c the sum of (i / m) p_i over i >= c, and B_c the sum of
    ((r - i) / m) p_i over i >= c, for r guesses on m canaries. If one canary's coin is flipped, a correct guess on it
    becomes a wrong one, so that A_c <= Phi(Phi^-1(B_(c-1)) + shift) for every c. A tail of probability `level` needs
    the least mass elsewhere if all of it lies at `right`. The recursion adds the least mass at right - 1, right - 2 and
    so on. The tail is impossible if all masses sum to more than 1.
    """
    from scipy.special import ndtr, ndtri

    correct, wrong = level * right / canaries, level * (guesses - right) / canaries
    for count in range(right - 1, -1, -1):
        least = max(wrong, float(ndtr(ndtri(min(1.0, correct)) - shift)))
        correct += count / (guesses - count) * (least - wrong)
        wrong = least
    return correct + wrong > guesses / canaries


def _gaussian_epsilon(shift: float, delta: float) -> float:
    """Return the epsilon at `delta` of N(0, 1) against N(shift, 1), by bisection (Balle and Wang 2018, theorem 8)."""
    from scipy.special import log_ndtr

    def exceeds(epsilon: float) -> bool:
        first, second = (float(log_ndtr(-epsilon / shift + sign * shift / 2)) for sign in (1, -1))
        return math.exp(first) - math.exp(epsilon + second) > delta

    return _largest_refuted(exceeds)


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of many correct guesses, if the audited run is (epsilon, delta)-private.

    A guess states whether a canary was included in the training data.
    """
    from scipy.stats import binom

    each = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, each))
    steps = torch.arange(1, right + 1).numpy()
    below = binom.cdf(right - 1, guesses, each) - binom.cdf(right - 1 - steps, guesses, each)
    worst = float((below / steps).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * worst)
