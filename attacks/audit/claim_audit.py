"""Statistical test of claimed (epsilon, delta) pairs, on fresh runs of a mechanism with a record and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.audit._outcomes import Event, SplitRuns, candidate_events, event_counts, split_runs
from attacks.audit._rates import p_value
from attacks.statistics import Rate
from distillkit._utils import check


@dataclass(frozen=True)
class ClaimTest:
    """Result of `audit_claim`. Prints as a sentence for a report.

    Attributes:
        refuted: whether the claim is refuted. A true claim is refuted with probability at most 1 - `confidence`.
        epsilon, delta: the claimed pair that allows the event least.
        event: description of the event that was counted, such as `"inside scores at least 1.3"`, where "inside" means
            the runs of the mechanism on data with the record. If each run has several scores, the description includes
            the score's index.
        likely: rate of the event in the group of runs (with or without the record) in which the event is more likely.
        unlikely: rate of the event in the other group of runs. The claim implies p <= e^epsilon * q + delta for the
            probabilities p and q that these rates estimate.
        p_value: probability of so large an excess, or a larger one, if the claim is true. The claim is refuted if the
            p-value is at most 1 - `confidence`.
        confidence: confidence of the test, and of the interval of each rate.
    """

    refuted: bool
    epsilon: float
    delta: float
    event: str
    likely: Rate
    unlikely: Rate
    p_value: float
    confidence: float

    def __str__(self) -> str:
        verdict = "refuted" if self.refuted else "not refuted"
        allowed = min(1.0, math.exp(min(self.epsilon, 700.0)) * self.unlikely.value + self.delta)
        return (
            f"{verdict} at {100 * self.confidence:g} %: {self.event} in {100 * self.likely.value:.3g} % of runs, where "
            f"({self.epsilon:.3g}, {self.delta:.2g}) allows {100 * allowed:.3g} % (p = {self.p_value:.2g})"
        )


def audit_claim(
    inside: Tensor,
    outside: Tensor,
    claim: Sequence[tuple[float, float]],
    *,
    confidence: float = 0.99,
    generator: int | torch.Generator = 0,
) -> ClaimTest:
    """Test a mechanism's privacy claim on fresh runs with a record (`inside`) and without it (`outside`).

    Use this test on an implementation of differential privacy. It finds bugs that code review may miss, such as too
    little noise or clipping that has no effect.

    Under (epsilon, delta)-differential privacy, every event S satisfies P(S with the record) <= e^epsilon P(S without
    it) + delta, and the same inequality with the two probabilities exchanged. On one half of the runs, the function
    chooses an event (scores on one side of a threshold) and one of the two directions, so that the claimed pairs seem
    to be violated most. On the other half, it tests this event against all pairs, by an exact test. A true claim is
    refuted with a probability close to 1 - `confidence` if it is tight, that is, if it is the mechanism's whole privacy
    profile, and with a smaller probability otherwise. Choosing and testing on the same runs would refute true claims.

    Pass several scores per run if you do not know where a bug would show. For example, compute the scalar product of
    the release and the record's gradient, once over all coordinates, and once over those of each class or layer. If
    noise is missing in a single class, the score of this class shows it, but the score over all coordinates may not.
    Because the score is also chosen on the first half of the runs, more scores cost time, but do not weaken the test.

    Pass many (epsilon, delta) pairs that the mechanism claims, for example the privacy profile delta(epsilon) of a
    Gaussian mechanism. Many bugs are visible only at small epsilon and large delta. A lower bound on epsilon at delta
    1e-5 (`epsilon_lower_bound`) misses such bugs.

    Args:
        inside, outside: scores of the runs with and without the record: one per run, [n] and [m], or d per run, [n, d]
            and [m, d]; at least two runs each. Each run must draw new randomness: resampling a pool of runs makes any
            claim look false.
        claim: pairs of epsilon >= 0 and delta in [0, 1), all of which the mechanism claims to satisfy.
        confidence: confidence of the test, in (0, 1). A true claim is refuted with probability at most 1 - confidence.
        generator: seed or generator that splits the runs.

    Returns:
        The verdict, with the event and the bounds it is based on.

    Raises:
        TypeError, ValueError: scores are NaN or too few, the claim is empty, or a value is out of range.
    """
    confidence = check.real_number(confidence, "confidence", above=0.0, below=1.0)
    if not isinstance(claim, Sequence) or any(not isinstance(p, Sequence) or len(p) != 2 for p in claim):
        raise TypeError(f"claim must be a list of pairs (epsilon, delta), got {claim!r:.60}")
    if not claim:
        raise ValueError("claim must hold at least one (epsilon, delta), as [(1.0, 1e-5)], got an empty one")
    for epsilon, delta in claim:
        check.real_number(epsilon, "epsilon of the claim", least=0.0)
        check.real_number(delta, "delta of the claim", least=0.0, below=1.0)
    chosen, counted = split_runs(inside, outside, generator)
    event = _worst(chosen, claim)
    hits, runs, others, other_runs = event_counts(counted, event)
    p = p_value(hits, runs, others, other_runs, claim, 1 - confidence)
    rate = (others + 1) / (other_runs + 2)
    epsilon, delta = min(claim, key=lambda pair: math.exp(min(pair[0], 300.0)) * rate + pair[1])
    rates = Rate.of(hits, runs, confidence), Rate.of(others, other_runs, confidence)
    return ClaimTest(p <= 1 - confidence, epsilon, delta, str(event), *rates, p, confidence)


def _worst(chosen: SplitRuns, claim: Sequence[tuple[float, float]]) -> Event:
    """Return the event with the clearest violation of the claim.

    A claimed pair implies p <= e^epsilon * q + delta, where p and q are the event's probabilities in the two groups of
    runs, with and without the record. The violation is the estimate of p - e^epsilon * q - delta, divided by its
    standard error.
    """
    points = torch.tensor([tuple(point) for point in claim], dtype=torch.float64)
    factor, delta = points[:, :1].clamp(max=300).exp(), points[:, 1:]
    most, worst = -math.inf, next(candidate_events(chosen))[0][0]
    for found, hits, n, others, m in candidate_events(chosen):
        # Add one hit and one miss (Laplace): a share of 0 or 1 is not known without error.
        p, q = (hits + 1) / (n + 2), (others + 1) / (m + 2)
        error = (p * (1 - p) / n + factor.square() * q * (1 - q) / m).sqrt()
        excess = (p - factor * q - delta) / error
        clearest = excess.amin(0)  # an event violates the claim if it violates every pair
        if float(clearest.max()) > most:
            most, worst = float(clearest.max()), found[int(clearest.argmax())]
    return worst
