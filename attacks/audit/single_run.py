"""Lower bound on epsilon from a single run with many canaries, which are records made for the audit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.audit._outcomes import check_scores
from distillkit._utils import check

__all__ = ["one_run_lower_bound"]


def one_run_lower_bound(
    scores: Tensor, included: Tensor, guesses: int, delta: float, *, confidence: float = 0.95
) -> float:
    """Return a lower bound on epsilon from a *single* run with many canaries, each included by its own coin flip.

    Use it for mechanisms that are too expensive to run many times. A canary is a record made for the audit. Before the
    run, a fair coin flip decides for each canary whether it is among the training records. The attacker guesses
    "included" for the canaries with the highest scores and "left out" for those with the lowest scores, `guesses`
    guesses in all. It makes no guess for the remaining canaries. The larger the number of correct guesses, the larger
    is the lower bound.

    This bound is far weaker than a bound from many runs.

    Args:
        scores: one score per canary, floats [m], higher if the canary seems included.
        included: whether each canary was included, bool [m]: the coin flips.
        guesses: number of guesses, 1 to m; half of them (rounded up) are "included". Fix this number before looking at
            the scores.
        delta: delta at which epsilon is bounded, in [0, 1).
        confidence: confidence of the bound, in (0, 1).

    Returns:
        Lower bound on epsilon, at least 0; 0 if chance explains the number of correct guesses.

    Raises:
        TypeError, ValueError: scores are NaN, `included` is not bool, or a value is out of range.

    Paper: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (NeurIPS 2023), theorem 5.2 with
    the delta term as in their appendix D.
    """
    scores = check_scores(scores, "scores", least=1)
    if check.bool_tensor(included, "included", "[m]").shape != scores.shape:
        raise ValueError(f"included must have the scores' shape {list(scores.shape)}, got {list(included.shape)}")
    guesses = check.positive_int(guesses, "guesses", most=len(scores))
    delta = check.real_number(delta, "delta", least=0.0, below=1.0)
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    order, coins = scores.argsort(descending=True, stable=True), included.to(scores.device)
    high, low = order[: (guesses + 1) // 2], order[len(order) - guesses // 2 :]
    right = int(coins[high].sum() + (~coins[low]).sum())
    if _chance(len(scores), guesses, right, 0.0, delta) > 1 - confidence:
        return 0.0
    below, above = 0.0, 1.0
    while _chance(len(scores), guesses, right, above, delta) <= 1 - confidence and above < 64:
        below, above = above, 2 * above
    for _ in range(60):
        middle = (below + above) / 2
        refuted = _chance(len(scores), guesses, right, middle, delta) <= 1 - confidence
        below, above = (middle, above) if refuted else (below, middle)
    return below


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of many correct guesses, if the audited run is (epsilon, delta)-private.

    A guess states whether a canary was included in the training data.

    Args:
        canaries: number of canaries.
        guesses: number of guesses.
        right: number of correct guesses; the bound is for this number or more.
        epsilon, delta: privacy of the run.
    """
    from scipy.stats import binom

    each = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, each))
    steps = torch.arange(1, right + 1).numpy()
    below = binom.cdf(right - 1, guesses, each) - binom.cdf(right - 1 - steps, guesses, each)
    worst = float((below / steps).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * worst)
