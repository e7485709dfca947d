"""Does a mechanism keep the (epsilon, delta) it claims? Statistical tests on its outcomes, with and without one record.

You run the mechanism many times, half of the runs with a record and half without it, let an attack give each run one
score, and hand the two rows of scores to `refutes` (is this claim false?) or `many_run` (how large is epsilon at
least?). Where a run is too dear to repeat, `one_run` takes a single run with many planted records.

An audit can refute a claim; it can never prove one. Every function says with which confidence it speaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.stats import clopper_pearson
from distillkit import check
from distillkit.rng import as_generator

__all__ = ["Verdict", "ceiling", "many_run", "one_run", "refutes"]

_MOST = 256
"""Thresholds to choose from."""

_SIDES = (("inside", "at least"), ("inside", "below"), ("outside", "at least"), ("outside", "below"))


@dataclass(frozen=True)
class Verdict:
    """What `refutes` found: whether the claim fell, and the one event and the two bounds that decided it.

    Printed, it is a sentence for a report.

    Attributes:
        refuted: whether the claim is refuted, wrongly so with probability at most 1 - `confidence`.
        epsilon, delta: the point of the claimed profile that was put to the test.
        event: the event in words, as `"inside scores at least 1.3"`: of the runs inside, those that score so.
        likely, unlikely: lower bound of the event's probability in the world that makes it likelier, upper bound in the
            other. The claim says likely <= e^epsilon * unlikely + delta.
        confidence: with which both bounds hold together.
    """

    refuted: bool
    epsilon: float
    delta: float
    event: str
    likely: float
    unlikely: float
    confidence: float

    def __str__(self) -> str:
        verdict = "refuted" if self.refuted else "not refuted"
        allowed = min(1.0, math.exp(min(self.epsilon, 700.0)) * self.unlikely + self.delta)
        return (
            f"{verdict} at {100 * self.confidence:g} %: {self.event} in at least {100 * self.likely:.3g} % of runs, "
            f"where ({self.epsilon:.3g}, {self.delta:.2g}) allows {100 * allowed:.3g} %"
        )


def refutes(
    inside: Tensor,
    outside: Tensor,
    claim: Sequence[tuple[float, float]],
    *,
    confidence: float = 0.99,
    generator: int | torch.Generator = 0,
) -> Verdict:
    """Test whether a mechanism is as private as it claims, on fresh runs with a record (`inside`) and without it.

    This is the test to run on an implementation of differential privacy: it finds bugs (noise too small, a clip that
    does not clip) that reading the code may miss.

    Under (epsilon, delta) every event S has P(S | one world) <= e^epsilon P(S | other world) + delta. One half of the
    runs chooses the event (scores on one side of a threshold), the direction and the point of the profile that look
    worst; the other half tests that single inequality with exact bounds. Choosing and testing on the same runs would
    refute true claims.

    Give the whole profile, many (epsilon, delta) pairs of the same mechanism, such as delta(epsilon) of a Gaussian: a
    bug is often visible at small epsilon and large delta only, and a lower bound on epsilon at delta 1e-5 (`many_run`)
    misses it.

    Args:
        inside, outside: one score a run, [n] and [m], at least two each, higher where the record seems present. Each
            run draws everything afresh: resampling one pool of runs makes any claim look false.
        claim: pairs of epsilon >= 0 and delta in [0, 1), all of which the mechanism claims to satisfy.
        confidence: in (0, 1); a true claim is refuted with probability at most 1 - confidence.
        generator: a seed or a generator, which draws the runs that choose and those that test.

    Returns:
        The verdict, with the event and the bounds it rests on.

    Raises:
        TypeError, ValueError: scores that are NaN or too few, an empty claim, numbers out of range.
    """
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    if not isinstance(claim, Sequence) or any(not isinstance(p, Sequence) or len(p) != 2 for p in claim):
        raise TypeError(f"claim must be a list of pairs (epsilon, delta), got {claim!r:.60}")
    if not claim:
        raise ValueError("claim must hold at least one (epsilon, delta), as [(1.0, 1e-5)], got an empty one")
    for epsilon, delta in claim:
        check.real_number(epsilon, "epsilon of the claim", least=0.0)
        check.real_number(delta, "delta of the claim", least=0.0, below=1.0)
    chosen, counted = _halved(inside, outside, generator)
    event, (epsilon, delta) = _worst(chosen, claim)
    likely, unlikely = _bounds(counted, event, confidence)
    refuted = likely > delta and math.log((likely - delta) / unlikely) > epsilon
    world, side, threshold = event
    return Verdict(refuted, epsilon, delta, f"{world} scores {side} {threshold:.4g}", likely, unlikely, confidence)


def _worst(
    halves: dict[str, Tensor], claim: Sequence[tuple[float, float]]
) -> tuple[tuple[str, str, float], tuple[float, float]]:
    """The event and the point of the profile whose excess is largest, in standard errors."""
    thresholds, points = _thresholds(halves), torch.tensor([tuple(point) for point in claim], dtype=torch.float64)
    factor, delta = points[:, :1].clamp(max=300).exp(), points[:, 1:]
    places = torch.tensor(thresholds, dtype=torch.float64)

    def shares(name: str, side: str) -> tuple[Tensor, int]:
        # One imagined hit and one miss more: a share of 0 or 1 is not known without error.
        below, count = torch.searchsorted(halves[name].sort().values, places), len(halves[name])
        return ((below if side == "below" else count - below) + 1) / (count + 2), count

    best: tuple[float, tuple[str, str, float], int] = (-math.inf, ("inside", "at least", thresholds[0]), 0)
    for world, side in _SIDES:
        (p, n), (q, m) = shares(world, side), shares("outside" if world == "inside" else "inside", side)
        error = (p * (1 - p) / n + factor.square() * q * (1 - q) / m).sqrt()
        excess = (p - factor * q - delta) / error
        point, place = divmod(int(excess.argmax()), len(thresholds))
        if float(excess[point, place]) > best[0]:
            best = float(excess[point, place]), (world, side, thresholds[place]), point
    return best[1], (float(points[best[2], 0]), float(points[best[2], 1]))


def many_run(
    inside: Tensor, outside: Tensor, delta: float, *, confidence: float = 0.95, generator: int | torch.Generator = 0
) -> float:
    """How large epsilon is at least, at `delta`, from fresh runs with a record (`inside`) and without it (`outside`).

    The number to print beside a claimed epsilon, which is a bound from above: the truth lies between them. One half of
    the runs chooses the event that gives the largest bound, the other half computes it, so the bound is above the truth
    with probability at most 1 - confidence. Print `ceiling` beside it: with so many runs nothing larger can be found,
    whatever the mechanism does. To test a claim use `refutes`, which sees far more.

    Args:
        inside, outside: as for `refutes`: one score a run, [n] and [m], at least two each.
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
    chosen, counted = _halved(inside, outside, generator)

    def bound(halves: dict[str, Tensor], event: tuple[str, str, float]) -> float:
        likely, unlikely = _bounds(halves, event, confidence)
        return math.log((likely - delta) / unlikely) if likely > delta else 0.0

    events = [(world, side, t) for t in _thresholds(chosen) for world, side in _SIDES]
    return max(0.0, bound(counted, max(events, key=lambda event: bound(chosen, event))))


def ceiling(runs: int, *, confidence: float = 0.95) -> float:
    """The largest epsilon that `many_run` can state with `runs` runs in each world, if the worlds never overlap.

    Print it beside what `many_run` states: 2 below a ceiling of 2.1 says that the runs were too few, 2 below a ceiling
    of 6 says something about the mechanism.

    Args:
        runs: in each of the two worlds, at least 2; half of them are counted.
        confidence: in (0, 1), that of `many_run`.

    Raises:
        TypeError, ValueError: numbers out of range.
    """
    half = check.positive_int(runs, "runs", least=2) // 2
    return math.log(clopper_pearson(half, half, confidence)[0] / clopper_pearson(0, half, confidence)[1])


def one_run(scores: Tensor, included: Tensor, guesses: int, delta: float, *, confidence: float = 0.95) -> float:
    """How large epsilon is at least, from a *single* run with many canaries, each included by a coin of its own.

    For mechanisms that are too dear to run twice. A canary is a record that is made for the audit; for each, a fair
    coin decides before the run whether it is among the training records. The attacker guesses "included" for the
    highest scores and "left out" for the lowest, `guesses` in all, and abstains on the rest. More right guesses than
    epsilon allows bound epsilon from below.

    Paper: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (NeurIPS 2023), theorem 5.2 with
        the delta term as in their appendix D.

    It is far weaker than many runs: with 1,000 ideal canaries it states about .3, 1.5 and 3 for true epsilons of 1, 4
    and 8.

    Args:
        scores: one a canary, floats [m], higher if it seems included.
        included: bool [m], the coins.
        guesses: how many to guess, 1 to m, half of them (rounded up) "included"; fixed before looking at the scores.
        delta: at which epsilon is bounded, in [0, 1).
        confidence: in (0, 1), with which the bound holds.

    Returns:
        Epsilon, at least 0; 0 where the right guesses are as luck explains.

    Raises:
        TypeError, ValueError: scores that are NaN, coins that are no bool, numbers out of range.
    """
    scores = _scores(scores, "scores", least=1)
    if not isinstance(included, Tensor) or included.dtype != torch.bool or included.shape != scores.shape:
        got = f"{included.dtype} {list(included.shape)}" if isinstance(included, Tensor) else type(included).__name__
        raise ValueError(f"included must be a bool tensor of the scores' shape {list(scores.shape)}, got {got}")
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
    """The most that the probability of so many right guesses can be under (epsilon, delta)."""
    from scipy.stats import binom

    each = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, each))
    steps = torch.arange(1, right + 1).numpy()
    below = binom.cdf(right - 1, guesses, each) - binom.cdf(right - 1 - steps, guesses, each)
    worst = float((below / steps).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * worst)


def _halved(inside: Tensor, outside: Tensor, generator: int | torch.Generator) -> list[dict[str, Tensor]]:
    """Both worlds' runs, the half that chooses and the half that is counted."""
    rng, halves = as_generator(generator), []
    for scores, name in ((inside, "inside"), (outside, "outside")):
        values = _scores(scores, name, least=2)
        halves.append((name, values[torch.randperm(len(values), generator=rng)].tensor_split(2)))
    return [{name: parts[place] for name, parts in halves} for place in (0, 1)]


def _thresholds(halves: dict[str, Tensor]) -> list[float]:
    values = torch.cat(list(halves.values())).unique()
    return values[torch.linspace(0, len(values) - 1, min(len(values), _MOST)).round().long()].tolist()


def _count(scores: Tensor, side: str, threshold: float) -> tuple[int, int]:
    hits = int((scores >= threshold).sum())
    return (hits if side == "at least" else len(scores) - hits), len(scores)


def _bounds(halves: dict[str, Tensor], event: tuple[str, str, float], confidence: float) -> tuple[float, float]:
    """Lower bound of the event's probability in its world, upper bound in the other; both hold with `confidence`."""
    world, side, threshold = event
    other = "outside" if world == "inside" else "inside"
    likely = clopper_pearson(*_count(halves[world], side, threshold), confidence)[0]
    return likely, clopper_pearson(*_count(halves[other], side, threshold), confidence)[1]


def _scores(scores: Tensor, name: str, least: int) -> Tensor:
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point tensor, got {getattr(scores, 'dtype', type(scores).__name__)}"
        )
    if scores.ndim != 1 or len(scores) < least:
        raise ValueError(f"{name} must be a row of at least {least} scores, got shape {list(scores.shape)}")
    if bool(scores.isnan().any()):
        raise ValueError(
            f"{name} must not be NaN, but {int(scores.isnan().sum())} are, of {len(scores)}: the attack failed there; "
            "leaving those runs out would bias the test"
        )
    return scores.detach().double().cpu()
