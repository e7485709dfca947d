"""Findings of a privacy report, the sentence that sums them up, and a test of whether an attack found a leak."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.statistics import OperatingPoint, at_threshold, bonferroni, roc
from distillkit.rng import derive

__all__ = ["KINDS", "MIN_NON_MEMBERS", "Findings", "evaluate_scores", "format_percent", "is_significant", "verdict"]

KINDS = ("claim", "inversion", "images", "shadows", "model", "classes")
"""Kinds of leaks, the most serious first.

They are: a refuted privacy claim, records reconstructed from an update, members recognized from images, members
recognized by attacks with shadow models, members recognized by one threshold on the last model's scores, and disclosed
classes of clients.
"""

_NEGATIVE_ORDER = ("images", "shadows", "inversion", "model", "classes", "claim")
"""Order of attacks that found no leak: the attacks that were most likely to find one come first."""

MIN_NON_MEMBERS = 20
"""Minimum number of non-members for a false-positive rate, which is counted on half of them.

The threshold is chosen on the other half.
"""


@dataclass
class Findings:
    """Results of a privacy report: leaks, attacks that found no leak, and open questions.

    Each section of the report adds its results.

    Attributes:
        missing: questions that could not be answered, each with the argument of `report` that would allow an answer.
        sends_records: whether sent or published images were initialized from private records.
        recovered: text that states the share of private records that are recognizable in the sent images; "" if this
            share was not counted.
    """

    missing: list[str] = field(default_factory=list)
    sends_records: bool = False
    recovered: str = ""
    _leaks: list[tuple[str, str]] = field(default_factory=list)
    _negatives: list[tuple[str, str]] = field(default_factory=list)

    def add_leak(self, kind: str, phrase: str) -> None:
        """Add a leak that a section of the report has found.

        Args:
            kind: kind of the leak, one of `KINDS`.
            phrase: description of the leak with its size, as the end of a sentence that begins "This run leaks:".
        """
        self._leaks.append((kind, phrase))

    def add_negative(self, kind: str, phrase: str) -> None:
        """Add an attack that found no leak.

        Args:
            kind: kind of the leak that was not found, one of `KINDS`.
            phrase: description of the attack, with the smallest leak that it would have detected.
        """
        self._negatives.append((kind, phrase))

    @property
    def leaks(self) -> list[str]:
        """Descriptions of all leaks, the most serious first."""
        return _ordered(self._leaks, KINDS)

    @property
    def not_found(self) -> list[str]:
        """Descriptions of all attacks that found no leak, starting with those that were most likely to find one."""
        return _ordered(self._negatives, _NEGATIVE_ORDER)

    @property
    def other_leaks(self) -> list[str]:
        """Descriptions of the leaks that the sentence of `verdict` does not mention."""
        return self.leaks if self.sends_records else self.leaks[1:]


def verdict(findings: Findings) -> str:
    """Return the sentence at the head of a report, which states the worst leak or that none was found.

    It never states that the run protects its records.

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


def evaluate_scores(members: Tensor, non_members: Tensor, tried: int) -> tuple[float, OperatingPoint]:
    """Evaluate an attack's scores of members and non-members.

    The threshold is chosen on a random half of the non-members. At most 1 % of this half have a score of at least the
    threshold; if the half has fewer than 100 records, none has. The rates are counted on the members and on the other
    half of the non-members. The rates have Clopper-Pearson intervals, with a Bonferroni correction for the two rates of
    each of the `tried` attacks.

    Args:
        members: scores of members, [n], higher for members.
        non_members: scores of non-members, [m].
        tried: number of attacks that are reported together.

    Returns:
        The area under the ROC curve, and the true- and false-positive rates at the threshold.
    """
    order = torch.randperm(len(non_members), generator=derive(0, "threshold"))
    choosing, counted = non_members[order[: len(order) // 2]], non_members[order[len(order) // 2 :]]
    edge = float(choosing.double().sort(descending=True).values[len(choosing) // 100])
    both = torch.cat([members, counted]).double()
    point = at_threshold(
        both, torch.arange(len(both)) < len(members), math.nextafter(edge, math.inf),
        confidence=bonferroni(0.95, 2 * tried), chosen_elsewhere=True,
    )  # fmt: skip
    whole = torch.cat([members, non_members])
    return roc(whole, torch.arange(len(whole)) < len(members)).auc, point


def is_significant(point: OperatingPoint) -> bool:
    """Return whether an attack is better than guessing, by its rates at one threshold.

    This is the case if the confidence interval of the true-positive rate lies above that of the false-positive rate.

    Args:
        point: rates of the attack at one threshold.
    """
    return point.tpr.low > point.fpr.high


def format_percent(share: float) -> str:
    """Return a share in [0, 1] as text, such as "12 %" for 0.12."""
    return f"{100 * share:.2g} %" if share < 1 else "100 %"
