"""Exact check of a mechanism's noise: a count of the noise values that were drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distillkit._utils import check

_RELATIVE_TOLERANCE = 1e-9
"""Relative difference below which two standard deviations count as equal."""


@dataclass(frozen=True)
class NoiseAudit:
    """Result of `audit_noise`. Prints as a sentence for a report.

    The audit compares the noise values that a run drew with those that its privacy ledger was charged for.

    Attributes:
        lacking: noise values that were charged to the ledger but not drawn: a mapping, standard deviation of the noise
            -> number of values.
        uncharged: noise values that were drawn but not charged to the ledger: a mapping, standard deviation of the
            noise -> number of values. Releases with this noise are missing from the ledger.
    """

    lacking: dict[float, int]
    uncharged: dict[float, int]

    @property
    def holds(self) -> bool:
        """True if the run drew exactly the noise values that its privacy ledger was charged for."""
        return not self.lacking and not self.uncharged

    def __str__(self) -> str:
        if self.holds:
            return "as much noise was drawn as was charged"
        parts = [
            f"{count} noise values of standard deviation {std:.4g} were {what}"
            for what, found in (("charged but not drawn", self.lacking), ("drawn but not charged", self.uncharged))
            for std, count in found.items()
        ]
        return "refuted: " + "; ".join(parts)


def audit_noise(drawn: Mapping[float, int], charged: Sequence[tuple[float, int]]) -> NoiseAudit:
    """Compare the number of noise values that a run drew with the number that its ledger was charged for.

    Use this function to find accounting errors that are too small for statistical audits, such as one extra step among
    a hundred. Counting detects such errors in one run. Examples are a cached value that gets new noise at every read, a
    step that was not charged, a class without noise, or a standard deviation other than the accounted one.

    The function counts noise that was *drawn*. It shows neither whether the noise was added to the values nor whether
    the sensitivity is right; use `audit_claim` for that.

    Args:
        drawn: number of Gaussian values that the run drew, by standard deviation: `Secret.drawn` of
            `distillkit.privacy`, or the count of your own noise source.
        charged: a pair for each kind of release: the standard deviation of its noise (sigma times the sensitivity) and
            the number of noise values that should be drawn for it (releases times values per release). Leave out
            releases without noise.

    Returns:
        The numbers of noise values that were charged but not drawn, or drawn but not charged. Standard deviations that
        differ only by rounding count as equal.

    Raises:
        TypeError, ValueError: a standard deviation is not positive, or a count is not a whole number.
    """
    if not isinstance(drawn, Mapping):
        raise TypeError(f"drawn must map standard deviations to counts, got {type(drawn).__name__}")
    pairs = list(check.sequence(charged, "charged", "pairs (standard deviation, numbers)"))
    if any(not isinstance(p, Sequence) or len(p) != 2 for p in pairs):
        raise TypeError(f"charged must be a list of pairs (standard deviation, numbers), got {charged!r:.60}")
    entries = [(std, count, 1, "drawn") for std, count in drawn.items()]
    entries += [(std, count, -1, "charged") for std, count in pairs]
    excess: dict[float, int] = {}
    for std, count, sign, name in entries:
        std = check.real_number(std, f"standard deviation of {name}", above=0.0)
        own = next((s for s in excess if math.isclose(s, std, rel_tol=_RELATIVE_TOLERANCE)), std)
        excess[own] = excess.get(own, 0) + sign * check.positive_int(count, f"numbers of {name}", least=0)
    return NoiseAudit(
        {std: -count for std, count in sorted(excess.items()) if count < 0},
        {std: count for std, count in sorted(excess.items()) if count > 0},
    )
