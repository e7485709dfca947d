"""Planning of the noise multiplier for a target epsilon, before any budget is spent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from distillkit._utils import check
from distillkit.privacy.accounting._bisection import smallest_sigma
from distillkit.privacy.accounting._ranges import check_sigma
from distillkit.privacy.accounting.composition import Bound, Spend, compose
from distillkit.privacy.errors import NotAccountable, PrivacyError


@dataclass(frozen=True)
class NoisePlan:
    """Noise for a target guarantee, as `plan_noise` computes it.

    Attributes:
        sigma: noise standard deviation / sensitivity of each release.
        epsilon, delta: privacy cost of all releases together, including the earlier releases that were passed to
            `plan_noise`. Epsilon is at most the target.
        rate, count: sample rate of each release, and number of releases.
        accountant: name of the accountant that computed epsilon; see `compose`.
    """

    sigma: float
    epsilon: float
    delta: float
    rate: float
    count: int
    accountant: str

    def noise_std(self, size: float) -> float:
        """Return the standard deviation of the noise in one coordinate of a released mean, in units of the clip.

        The clip is the largest l2 norm of one record's vector. Multiply the result by the clip to get the standard
        deviation itself.

        Args:
            size: number of records in the mean, > 0. This number is assumed to be public.

        Raises:
            TypeError, ValueError: `size` has the wrong type or is out of range.
        """
        return self.sigma / (self.rate * check.real_number(size, "size", above=0.0))

    def snr(self, size: float, dim: int, *, signal: float = 1.0) -> float:
        """Return the signal-to-noise ratio of one released mean: the norm of the mean divided by the norm of the noise.

        Args:
            size: number of records in the mean, > 0. This number is assumed to be public.
            dim: number of dimensions of a record's vector.
            signal: norm of the mean, in units of the clip (the largest l2 norm of one record's vector); at most 1.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range.
        """
        check.real_number(signal, "signal", least=0.0, most=1.0)
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
    """Compute the noise multiplier sigma for a target (epsilon, delta), before any budget is spent.

    Call this function before a run to choose the number of steps, the sample rate and sigma. Neighbors differ by one
    added or removed record.

    Args:
        epsilon: target for all `count` releases and `spent` together, > 0.
        delta: target delta, in (0, 1), well below one over the number of records.
        count: number of releases, or steps, in the whole run: steps per round times rounds.
        rate: Poisson sample rate of each release; 1 if all records take part.
        spent: earlier releases of the same records, as listed by `Ledger.spends(client)`.
        accountant: name of an accountant, as for `compose`.

    Raises:
        NotAccountable: `spent` alone already reaches epsilon.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.real_number(epsilon, "epsilon", above=0.0)
    check.positive_int(count, "count")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    before = list(check.instance(spent, Iterable, "spent", "a list of triples (sigma, rate, count)"))
    cost = compose(before, delta, accountant=accountant)
    if cost.epsilon >= epsilon:
        raise NotAccountable(
            f"epsilon={epsilon:g} is the target, but {cost.epsilon:.4g} is spent already; raise epsilon, or release "
            "nothing more"
        )

    def bound(sigma: float) -> Bound:
        return compose([*before, (sigma, rate, count)], delta, accountant=accountant)

    exact = rate == 1 and all(q == 1 for _, q, _ in before) and accountant == "auto"
    sigma = smallest_sigma(lambda s: bound(s).epsilon, epsilon, 1e-12 if exact else 1e-4)
    final = bound(sigma)
    return NoisePlan(sigma, final.epsilon, delta, rate, count, final.accountant)


def resolve_sigma(epsilon: float | None, sigma: float | None, *, delta: float, count: int, rate: float) -> float:
    """Return sigma if it is given, and otherwise compute sigma from epsilon. Exactly one of the two must be given.

    Args:
        epsilon: target for all steps together, or None.
        sigma: noise standard deviation / clip, or None.
        delta, count, rate: arguments of `plan_noise`, which computes sigma from epsilon.

    Raises:
        PrivacyError: both or neither of the two are given.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    if (epsilon is None) == (sigma is None):
        raise PrivacyError(
            "give either epsilon, from which sigma follows, or sigma; got " + ("neither" if sigma is None else "both")
        )
    if sigma is not None:
        return check_sigma(sigma)
    assert epsilon is not None
    return plan_noise(epsilon, delta, count=count, rate=rate).sigma
