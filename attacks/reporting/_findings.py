"""Findings of a report's sections, the verdict drawn from them, and the test that makes an attack a finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.statistics import OperatingPoint, at_threshold, bonferroni, roc
from distillkit.rng import derive

__all__ = ["KINDS", "MIN_NON_MEMBERS", "Findings", "evaluate_scores", "format_percent", "is_significant", "verdict"]

KINDS = ("claim", "inversion", "images", "shadows", "model", "classes")
"""Kinds of findings, the most serious first: a refuted privacy claim, records rebuilt from an update, members
recognized from images, members recognized by shadow models, members recognized by one threshold on the last model, and
disclosed classes.
"""

_NEGATIVE_ORDER = ("images", "shadows", "inversion", "model", "classes", "claim")
"""Order of negative results: the attacks most likely to find a leak come first."""

MIN_NON_MEMBERS = 20
"""Fewest non-members for a rate: half of them choose the threshold, the other half are counted."""


@dataclass
class Findings:
    """Results of a report, collected from its sections.

    Attributes:
        missing: questions that could not be answered, each with the argument that would allow an answer.
        sends_records: whether sent or published images were initialized from private records.
        recovered: phrase on the share of records that the sent images show; "" if it was not counted.
    """

    missing: list[str] = field(default_factory=list)
    sends_records: bool = False
    recovered: str = ""
    _leaks: list[tuple[str, str]] = field(default_factory=list)
    _negatives: list[tuple[str, str]] = field(default_factory=list)

    def add_leak(self, kind: str, phrase: str) -> None:
        """Add a leak.

        Args:
            kind: kind of the leak, one of `KINDS`.
            phrase: description of the leak with its size; continues "This run leaks: ".
        """
        self._leaks.append((kind, phrase))

    def add_negative(self, kind: str, phrase: str) -> None:
        """Add an attack that found nothing.

        Args:
            kind: kind of the leak that was not found, one of `KINDS`.
            phrase: description of the attack, with the smallest leak that it would have detected.
        """
        self._negatives.append((kind, phrase))

    @property
    def leaks(self) -> list[str]:
        """Leaks, the most serious first."""
        return _ordered(self._leaks, KINDS)

    @property
    def not_found(self) -> list[str]:
        """Attacks without a finding."""
        return _ordered(self._negatives, _NEGATIVE_ORDER)

    @property
    def other_leaks(self) -> list[str]:
        """Leaks that the verdict does not mention."""
        return self.leaks if self.sends_records else self.leaks[1:]


def verdict(findings: Findings) -> str:
    """Return one sentence with the worst finding. It never claims protection.

    Args:
        findings: findings of all sections.
    """
    if findings.sends_records:
        number = f", and {findings.recovered}" if findings.recovered else ""
        return f"This run sends private records: its images start from real ones{number}."
    if findings.leaks:
        return f"This run leaks: {findings.leaks[0]}."
    if findings.not_found:
        return (
            f"No leak found at this resolution: {findings.not_found[0]}; smaller leaks and other attacks remain "
            "possible."
        )
    return "No verdict yet: no attack on individual records was run (see the last section)."


def _ordered(found: list[tuple[str, str]], kinds: tuple[str, ...]) -> list[str]:
    return [phrase for _, phrase in sorted(found, key=lambda one: kinds.index(one[0]))]


def evaluate_scores(inside: Tensor, outside: Tensor, tried: int) -> tuple[float, OperatingPoint]:
    """Return the AUC of an attack, and its rates at a threshold chosen on a random half of the non-members.

    At most 1 % of that half exceed the threshold, and none if the half has fewer than 100 records. The rates are
    counted on the members and the other half. The intervals are therefore plain Clopper-Pearson intervals, corrected
    for `tried` attacks and for both rates.

    Args:
        inside, outside: scores of members [n] and of non-members [m], higher for members.
        tried: number of attacks that are reported together.

    Returns:
        The AUC and the rates.
    """
    order = torch.randperm(len(outside), generator=derive(0, "threshold"))
    choosing, counted = outside[order[: len(order) // 2]], outside[order[len(order) // 2 :]]
    edge = float(choosing.double().sort(descending=True).values[len(choosing) // 100])
    both = torch.cat([inside, counted]).double()
    point = at_threshold(
        both, torch.arange(len(both)) < len(inside), math.nextafter(edge, math.inf),
        confidence=bonferroni(0.95, 2 * tried), chosen_elsewhere=True,
    )  # fmt: skip
    whole = torch.cat([inside, outside])
    return roc(whole, torch.arange(len(whole)) < len(inside)).auc, point


def is_significant(point: OperatingPoint) -> bool:
    """Return whether an attack beats guessing: the intervals of both rates do not overlap.

    Args:
        point: rates of the attack at one threshold.
    """
    return point.tpr.low > point.fpr.high


def format_percent(share: float) -> str:
    """Return a share as text, such as "12 %".

    Args:
        share: share in [0, 1].
    """
    return f"{100 * share:.2g} %" if share < 1 else "100 %"
