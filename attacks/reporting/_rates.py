"""Evaluation of membership scores: rates at a threshold, their table, and whether they show a leak."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.reporting._page import Section
from attacks.statistics import OperatingPoint, Rate, at_threshold, bonferroni, roc
from distillkit._utils.display import two_digits
from distillkit._utils.tables import Table
from distillkit.rng import derive


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


def rate_table(
    first: str, scores: dict[str, tuple[Tensor, Tensor]], tried: int
) -> tuple[Table, dict[str, OperatingPoint]]:
    """Return a table of the area and the rates of each attack, and the rates."""
    found = {name: evaluate_scores(*both, tried) for name, both in scores.items()}
    cells = [(name, f"{area:.3f}", str(point.tpr), str(point.fpr)) for name, (area, point) in found.items()]
    table = Table((first, "AUC", "true positives", "false positives"), cells, left=1)
    return table, {name: point for name, (_, point) in found.items()}


def judge(section: Section, kind: str, points: dict[str, OperatingPoint], attack: str, end: str = "") -> None:
    """Add to a section the leak that the best of several attacks has found, or that all found none.

    Args:
        section: the section.
        kind: kind of the leak.
        points: rates of the attacks.
        attack: beginning of the sentence, such as "the sent images identify".
        end: end of the sentence.
    """
    best = max(points.values(), key=lambda point: point.tpr.low - point.fpr.high)
    if is_significant(best):
        share, errors = format_percent(best.tpr.value), f"{best.fpr.hits} false positives among {best.fpr.trials}"
        section.leak(kind, f"{attack} {share} of the records as members, with {errors}{end}")
    else:
        upper = format_percent(max(point.tpr.high for point in points.values()))
        found = f"at most {upper} of the records as members, not significantly more than of non-members"
        section.negatives.append((kind, f"{attack} {found}{end}"))


def format_percent(share: float) -> str:
    """Return a share in [0, 1] as text, such as "12 %" for 0.12."""
    return f"{two_digits(share)} %"


def share_of(hits: Tensor) -> Rate:
    """Return the share of true values in a bool tensor, with its interval."""
    return Rate.of(int(hits.sum()), len(hits))
