"""How much noise a wanted epsilon takes, and what signal is left, before any budget is spent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from distillkit._utils import check
from distillkit.privacy.accounting._bisection import bisect, smallest_sigma
from distillkit.privacy.accounting.composition import Bound, Spend, compose
from distillkit.privacy.errors import NotAccountable, PrivacyError

__all__ = ["NoisePlan", "plan_noise", "resolve_sigma"]


@dataclass(frozen=True)
class NoisePlan:
    """The noise for a wanted guarantee, and what signal is left; see `plan`.

    Attributes:
        sigma: noise standard deviation / sensitivity of each release.
        epsilon, delta: what all releases cost together (at most what was wanted).
        rate, count: sampling rate and number of releases.
        accountant: how epsilon was computed; see `compose`.
    """

    sigma: float
    epsilon: float
    delta: float
    rate: float
    count: int
    accountant: str

    def noise_std(self, size: float) -> float:
        """How large the noise is on one coordinate of a mean, as a standard deviation in units of the clip.

        Args:
            size: records that the mean is taken over, a public number, > 0.

        Raises:
            TypeError, ValueError: `size` out of range.
        """
        return self.sigma / (self.rate * check.real_number(size, "size", above=0.0))

    def snr(self, size: float, dim: int, *, signal: float = 1.0) -> float:
        """How far the signal stands out of the noise in one release of a mean: their norms' ratio.

        Args:
            size: records that the mean is taken over, a public number, > 0.
            dim: how many numbers a record's vector has.
            signal: norm of the mean, in units of the clip; 1 is the most it can be.

        Raises:
            TypeError, ValueError: numbers out of range.
        """
        return signal / (self.noise_std(size) * math.sqrt(check.positive_int(dim, "dim")))


def plan_noise(
    epsilon: float,
    delta: float,
    *,
    count: int = 1,
    rate: float = 1.0,
    spent: Iterable[Spend] = (),
    accountant: str = "auto",
) -> NoisePlan:
    """How much noise a wanted (epsilon, delta) takes, before any budget is spent, and how much signal it leaves.

    Call it before a run to choose its steps, rate and sigma. Neighbours differ by one added or removed record.

    Args:
        epsilon: > 0, the guarantee for all `count` releases and `spent` together.
        delta: in (0, 1); well below one over the number of records.
        count: releases, or steps, over the whole run: steps per round times rounds.
        rate: Poisson sampling rate of each; 1 releases a statistic of all records.
        spent: what the same records have spent before (`Ledger.spends(client)`).
        accountant: as for `compose`. `"auto"` searches with RDP and then tightens.

    Raises:
        NotAccountable: `spent` alone costs epsilon already.
        TypeError, ValueError: numbers out of range.
    """
    check.real_number(epsilon, "epsilon", above=0.0)
    check.positive_int(count, "count")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    before = list(spent)
    cost = compose(before, delta, accountant=accountant)
    if cost.epsilon >= epsilon:
        raise NotAccountable(
            f"epsilon={epsilon:g} is wanted, but {cost.epsilon:.4g} is spent already; raise epsilon, or release "
            "nothing more"
        )

    def bound(sigma: float, by: str) -> Bound:
        return compose([*before, (sigma, rate, count)], delta, accountant=by)

    exact = rate == 1 and all(q == 1 for _, q, _ in before) and accountant == "auto"
    first = accountant if exact or accountant != "auto" else "rdp"
    sigma = smallest_sigma(lambda s: bound(s, first).epsilon, epsilon, 1e-12 if exact else 1e-3)
    if not exact and accountant == "auto" and bound(sigma, "auto").accountant != "rdp":
        sigma = bisect(lambda s: bound(s, "auto").epsilon <= epsilon, 0.7 * sigma, sigma, tolerance=5e-3)
    final = bound(sigma, accountant)
    return NoisePlan(sigma, final.epsilon, delta, rate, count, final.accountant)


def resolve_sigma(epsilon: float | None, sigma: float | None, *, delta: float, count: int, rate: float) -> float:
    """Read two options of which a caller gives one: the noise, or the guarantee from which it follows.

    Args:
        epsilon: for all steps together, or None.
        sigma: noise standard deviation / clip, or None.
        delta, count, rate: as for `plan`, which turns epsilon into sigma.

    Raises:
        PrivacyError: both or neither.
        TypeError, ValueError: as `plan`.
    """
    if (epsilon is None) == (sigma is None):
        raise PrivacyError(
            "give either epsilon, from which sigma follows, or sigma; got " + ("neither" if sigma is None else "both")
        )
    if sigma is not None:
        return sigma
    assert epsilon is not None
    return plan_noise(epsilon, delta, count=count, rate=rate).sigma
