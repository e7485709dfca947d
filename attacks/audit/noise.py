"""Exact checks of a mechanism's noise: count the noise values that were drawn, and try to reproduce a release.

If the released values can be computed a second time, their noise is known, so the noise protects nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distillkit._utils import check

__all__ = ["NoiseAudit", "ReplayTest", "audit_noise", "replay_release"]

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


@dataclass(frozen=True)
class ReplayTest:
    """Result of `replay_release`. Prints as a sentence for a report.

    Attributes:
        distances: for each function in the argument `replays` of `replay_release`, by name, the distance between its
            values and the release. The distance is the largest difference, divided by the largest absolute value of the
            release.
        matches: names of the functions whose values equal the release up to `tolerance`.
        tolerance: largest relative difference that counts as equal.
    """

    distances: dict[str, float]
    matches: tuple[str, ...]
    tolerance: float

    @property
    def conclusive(self) -> bool:
        """True if several functions were passed to `replay_release` and exactly one reproduced the released values.

        The released values were then computed by that function.
        """
        return len(self.matches) == 1 < len(self.distances)

    def __str__(self) -> str:
        if self.conclusive:
            rest = ", ".join(f"distance to {n!r}: {d:.2g}" for n, d in self.distances.items() if n not in self.matches)
            return (
                f"the release is that of {self.matches[0]!r} ({rest}): its noise is known, so it hides nothing and "
                "no epsilon holds"
            )
        if self.matches:
            names = " and ".join(map(repr, self.matches))
            return f"the release was reproduced by {names}: its noise is known, so no epsilon holds"
        nearest = min(self.distances.values())
        return f"the release was not reproduced (smallest distance {nearest:.2g}): none of the replays has its noise"


def replay_release(
    released: Tensor, replays: Mapping[str, Callable[[], Tensor]], *, tolerance: float = 1e-5
) -> ReplayTest:
    """Compute a release again with one or more functions, and test which of them gives the same values.

    Use it for two checks. *If the seed of the noise is known* (from a run's config), repeat the run with that seed,
    once with a record and once without it. The adversary in differential privacy, who knows all other records, can do
    the same, and then knows whether the record was used, however large the noise is. *If the noise should be secret*,
    repeat the run with unchanged options. If this reproduces the release, the noise is not random (it comes from a
    constant seed, or one seed for all clients), and no epsilon holds, however large sigma is.

    Args:
        released: the published values, floats of any shape.
        replays: functions that compute the release again, by name: `{"with": lambda: run(records, seed), "without":
            lambda: run(others, seed)}`. Each is called once.
        tolerance: largest difference that is treated as a rounding difference between machines, relative to the largest
            absolute value of the release; > 0. It must be well below the noise.

    Raises:
        TypeError, ValueError: `replays` is empty; the release or the result of a function is not a finite
            floating-point tensor; or a result differs from the release in shape.
    """
    tolerance = check.real_number(tolerance, "tolerance", above=0.0)
    values = _outcome(released, "released")
    for name, run in check.mapping(replays, "replays").items():
        check.callable_with(run, f"replays[{name!r}]", (), "lambda: run(records, seed)")
    if not replays:
        raise ValueError('replays must hold at least one, as {"with": lambda: run(records, seed)}, got none')
    scale, distances = float(values.abs().max().clamp_min(1e-300)), {}
    for name, run in replays.items():
        made = _outcome(run(), f"the outcome of replays[{name!r}]")
        if made.shape != values.shape:
            raise ValueError(
                f"replays[{name!r}] must have the shape of released, {list(values.shape)}, got {list(made.shape)}"
            )
        distances[name] = float((made - values).abs().max()) / scale
    return ReplayTest(distances, tuple(name for name, d in distances.items() if d <= tolerance), tolerance)


def _outcome(values: Tensor, name: str) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        got = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a floating-point tensor with at least one number, got {got}")
    if not bool(check.has_values(values, name).isfinite().all()):
        raise ValueError(f"{name} must be finite, but {int((~values.isfinite()).sum())} of {values.numel()} are not")
    return values.detach().double().cpu()
