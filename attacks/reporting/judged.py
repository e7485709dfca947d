"""What an attack's scores find at a threshold that was chosen on other records."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.statistics import Point, at_threshold, bonferroni, roc
from distillkit.rng import derive

__all__ = ["LEAST", "finds", "judged", "percent"]

LEAST = 20
"""So many held-out images are needed at least: half of them choose the threshold, half are counted."""


def judged(inside: Tensor, outside: Tensor, tried: int) -> tuple[float, Point]:
    """The area under the curve, and rates at a threshold that a random half of the others chose.

    It lets at most 1 % of that half pass, none of fewer than 100. Members and the other half are counted, so the
    intervals are plain Clopper-Pearson's, widened for `tried` attacks and for both rates.

    Args:
        inside, outside: scores of members [n] and of others [m], higher for members.
        tried: how many attacks are judged side by side.

    Returns:
        The area, and the rates.
    """
    order = torch.randperm(len(outside), generator=derive(0, "threshold"))
    choosing, counted = outside[order[: len(order) // 2]], outside[order[len(order) // 2 :]]
    falling = choosing.double().sort(descending=True).values
    edge = float(falling[len(choosing) // 100])
    threshold = math.nextafter(edge, math.inf)
    both = torch.cat([inside, counted]).double()
    confidence = bonferroni(0.95, 2 * tried)
    member = torch.arange(len(both)) < len(inside)
    point = at_threshold(both, member, threshold, confidence=confidence, chosen_elsewhere=True)
    whole = torch.cat([inside, outside])
    return roc(whole, torch.arange(len(whole)) < len(inside)).auc, point


def finds(point: Point) -> bool:
    """Whether the attack is better than guessing beyond the doubt of both intervals.

    Args:
        point: its rates.
    """
    return point.tpr.low > point.fpr.high


def percent(share: float) -> str:
    """A share for a sentence, such as "12 %".

    Args:
        share: in [0, 1].
    """
    return f"{100 * share:.2g} %" if share < 1 else "100 %"
