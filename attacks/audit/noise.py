"""Noise without statistics: was as much drawn as was charged, and can a release be had again?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distillkit._utils import check

__all__ = ["NoiseAudit", "ReplayTest", "audit_noise", "replay_release"]

_ALIKE = 1e-9
"""Two standard deviations are one if they differ by less, relatively."""


@dataclass(frozen=True)
class NoiseAudit:
    """What `audit_noise` found. Printed, it is a sentence for a report.

    Attributes:
        lacking: by standard deviation, how many numbers of noise were charged and not drawn: noise left out.
        uncharged: by standard deviation, how many were drawn and not charged: releases that nobody paid for.
    """

    lacking: dict[float, int]
    uncharged: dict[float, int]

    @property
    def holds(self) -> bool:
        """Whether just what was charged was drawn."""
        return not self.lacking and not self.uncharged

    def __str__(self) -> str:
        if self.holds:
            return "as much noise was drawn as was charged"
        parts = [
            f"{count} numbers of noise of standard deviation {std:.4g} were {what}"
            for what, found in (("charged and not drawn", self.lacking), ("drawn and not charged", self.uncharged))
            for std, count in found.items()
        ]
        return "refuted: " + "; ".join(parts)


def audit_noise(drawn: Mapping[float, int], charged: Sequence[tuple[float, int]]) -> NoiseAudit:
    """Hold the noise that a run drew against the noise that its ledger was charged for, number for number.

    Audits of outcomes are blind to small mistakes of bookkeeping: one step too many of a hundred shows in no
    affordable number of runs. Counting sees it in one run: a cache that is noised again at every read, a step that
    nobody charged, a class without noise, a standard deviation other than the one that was accounted.

    It sees what was *drawn*, not whether it was added, nor whether the sensitivity is right: for that there is
    `audit_claim`.

    Args:
        drawn: by standard deviation, how many Gaussian numbers a run drew: `Secret.drawn` of `distillkit.privacy`, or
            what your own source of noise counted.
        charged: for each kind of release its noise's standard deviation (sigma times the sensitivity) and how many
            numbers it should have drawn (releases times numbers in one). Events without noise are left out.

    Returns:
        What is lacking and what was not charged. Standard deviations that differ by rounding alone are one.

    Raises:
        TypeError, ValueError: standard deviations that are not positive, counts that are no whole numbers.
    """
    if not isinstance(drawn, Mapping):
        raise TypeError(f"drawn must map standard deviations to counts, got {type(drawn).__name__}")
    pairs = list(check.sequence(charged, "charged", "pairs (standard deviation, numbers)"))
    if any(not isinstance(p, Sequence) or len(p) != 2 for p in pairs):
        raise TypeError(f"charged must be a list of pairs (standard deviation, numbers), got {charged!r:.60}")
    entries = [(std, count, 1, "drawn") for std, count in drawn.items()]
    entries += [(std, count, -1, "charged") for std, count in pairs]
    checked = [
        (
            check.real_number(std, f"standard deviation of {name}", above=0.0),
            sign * check.positive_int(count, f"numbers of {name}", least=0),
        )
        for std, count, sign, name in entries
    ]
    excess: dict[float, int] = {}
    for std, count in checked:
        own = next((s for s in excess if math.isclose(s, std, rel_tol=_ALIKE)), std)
        excess[own] = excess.get(own, 0) + count
    return NoiseAudit(
        {std: -count for std, count in sorted(excess.items()) if count < 0},
        {std: count for std, count in sorted(excess.items()) if count > 0},
    )


@dataclass(frozen=True)
class ReplayTest:
    """What `replay_release` found. Printed, it is a sentence for a report.

    Attributes:
        distances: by world, how far its outcome lies from the release: the largest difference of two numbers, relative
            to the largest number of the release.
        matches: the worlds whose outcome is the release, up to `tolerance`.
        tolerance: as given.
    """

    distances: dict[str, float]
    matches: tuple[str, ...]
    tolerance: float

    @property
    def decided(self) -> bool:
        """Whether the release tells the worlds apart with certainty: one made it, and the others did not."""
        return len(self.matches) == 1 < len(self.distances)

    def __str__(self) -> str:
        if self.decided:
            rest = ", ".join(f"{d:.2g} away from {n!r}" for n, d in self.distances.items() if n not in self.matches)
            return (
                f"the release is that of {self.matches[0]!r} ({rest}): its noise is known, so it hides nothing and "
                "no epsilon holds"
            )
        if self.matches:
            names = " and ".join(map(repr, self.matches))
            return f"the release was had again, by {names}: its noise is known, so no epsilon holds"
        nearest = min(self.distances.values())
        return f"the release was not had again ({nearest:.2g} away at least): its noise is not among what was replayed"


def replay_release(
    released: Tensor, worlds: Mapping[str, Callable[[], Tensor]], *, tolerance: float = 1e-5
) -> ReplayTest:
    """Run the mechanism again in each of several worlds, and see which of them made the release.

    Two checks in one. *The noise's seed is known* (it stands in a run's config): replay with that seed, once with the
    record and once without it. The adversary of differential privacy, who knows all other records, does just that, and
    is certain: no test with an error is needed, and no noise is large enough. *The noise is said to be secret*: replay
    the run as it was run. If the release comes again, the noise is fixed somewhere (a constant seed, one seed for all
    clients), and no epsilon holds however large sigma is.

    Args:
        released: what was published, floats of any shape.
        worlds: by name, what makes the release again: `{"with": lambda: run(records, seed), "without": lambda:
            run(others, seed)}`. Each is called once.
        tolerance: relative to the largest number of the release, > 0: what another machine's rounding may change. Well
            below the noise, or nothing is told.

    Raises:
        TypeError, ValueError: no world, a release or outcome that is no finite floating tensor, or of another shape.
    """
    tolerance = check.real_number(tolerance, "tolerance", above=0.0)
    wanted = _outcome(released, "released")
    check.mapping(worlds, "worlds")
    if not worlds:
        raise ValueError('worlds must hold at least one, as {"with": lambda: run(records, seed)}, got none')
    for name, run in worlds.items():
        check.callable_with(run, f"worlds[{name!r}]", (), "lambda: run(records, seed)")
    scale, distances = float(wanted.abs().max().clamp_min(1e-300)), {}
    for name, run in worlds.items():
        made = _outcome(run(), f"the outcome of worlds[{name!r}]")
        if made.shape != wanted.shape:
            raise ValueError(
                f"worlds[{name!r}] must give what was released, {list(wanted.shape)}, got {list(made.shape)}"
            )
        distances[name] = float((made - wanted).abs().max()) / scale
    return ReplayTest(distances, tuple(name for name, d in distances.items() if d <= tolerance), tolerance)


def _outcome(values: Tensor, name: str) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        got = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a floating-point tensor with at least one number, got {got}")
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite, but {int((~values.isfinite()).sum())} of {values.numel()} are not")
    return values.detach().double().cpu()
