"""RMIA, a membership inference attack that compares a record with population records, on which no model was trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.membership._inputs import checked_scores, finite_scores
from distillkit._utils import check

_TIE = 1e-6
"""Weight of the ratio among records that beat the same population records, relative to one population record."""


def rmia(
    target: Tensor,
    inside: Tensor,
    shadows: Tensor,
    z_target: Tensor,
    z_shadows: Tensor,
    *,
    online: bool = False,
    a: float = 0.3,
    gamma: float = 1.0,
) -> Tensor:
    """Return membership scores that compare the target's fit to a record with its fit to unused population records.

    Use it if you have few shadow models; one is enough. `lira` needs many, because it fits a distribution to each
    record.

    Paper: Zarifzadeh, Liu and Shokri, "Low-cost high-power membership inference attacks" (ICML 2024).

    The score of a record x is the share of population records z for which

        (p(x | target) / p(x)) / (p(z | target) / p(z)) >= gamma.

    Here p(x | target) is the target's predicted probability of the true class of x, and p(x) is the mean of this
    probability over models. There are two versions of p(x). Online, it is the average of the mean over the shadow
    models trained with x and the mean over those trained without x. Offline, it is computed from the mean p_out(x)
    over the shadow models trained without x, as p(x) = ((1 + a) p_out(x) + 1 - a) / 2. This approximates the
    contribution of models trained with x. No model was trained on the population. Therefore p(z) is the mean over all
    shadow models (online), or is computed from this mean by the same formula (offline).

    Records that beat equally many population records are ordered by their own ratio p(x | target) / p(x), by a term of
    at most 1e-6 / Z for Z population records. Without it, such ties cost true positives at small false-positive rates.

    For a single target, neither the population nor gamma changes the order of the records. They make scores comparable
    between targets.

    Args:
        target: log(p / (1 - p)) for the probability p of each record's true class under the target model, floats [n],
            as `stable_logit` computes it. The probabilities are computed from these values.
        inside: whether shadow model s was trained on record i, bool [S, n].
        shadows: the same logits of the records under the shadow models, floats [S, n].
        z_target: the same logits for population records under the target, [Z]. No model was trained on these records.
        z_shadows: the same logits for these population records under the shadow models, [S, Z].
        online: whether to use the online version described above.
        a: degree, in [0, 1], to which the confidence of models trained without a record predicts the confidence of
            models trained with it. The default 0.3 is the paper's value for CIFAR-10. Fit it on shadow models, never on
            the target.
        gamma: threshold of the ratio above, > 0.

    Returns:
        Scores in [0, 1], float64 [n], higher for members.

    Raises:
        TypeError, ValueError: the shapes do not match; a score is not finite; the population is empty; every shadow
            model was trained on a record; or, in the online version, no shadow model was trained on a record.
    """
    check.boolean(online, "online")
    a = check.real_number(a, "a", least=0.0, most=1.0)
    gamma = check.real_number(gamma, "gamma", above=0.0)
    target, inside, shadows = checked_scores(target, inside, shadows)
    z_target = finite_scores(z_target, "z_target").to(target.device)
    z_shadows = finite_scores(z_shadows, "z_shadows").to(target.device)
    if z_target.ndim != 1 or not len(z_target) or z_shadows.shape != (len(shadows), len(z_target)):
        raise ValueError(
            f"z_target must be at least one score [Z] and z_shadows a row for each of {len(shadows)} shadows [S, Z], "
            f"got {list(z_target.shape)} and {list(z_shadows.shape)}"
        )
    without = _mean(shadows, ~inside, "without")
    if online:
        usual = (_mean(shadows, inside, "with") + without) / 2
        z_usual = z_shadows.sigmoid().mean(0)
    else:
        usual = ((1 + a) * without + 1 - a) / 2
        z_usual = ((1 + a) * z_shadows.sigmoid().mean(0) + 1 - a) / 2
    ratio = -F.softplus(-target) - usual.log()
    z_ratio = (-F.softplus(-z_target) - z_usual.log()).sort().values
    share = torch.searchsorted(z_ratio, ratio - math.log(gamma), right=True).double() / len(z_ratio)
    order = (1 + ratio / (1 + ratio.abs())) / 2
    return share + (order - share) * _TIE / len(z_ratio)


def _mean(shadows: Tensor, chosen: Tensor, preposition: str) -> Tensor:
    """Return the mean probability of each record's true class over some of the shadow models."""
    count = chosen.sum(0)
    if not bool((count > 0).all()):
        raise ValueError(
            f"shadows must have at least 1 trained {preposition} every record, but {int((count == 0).sum())} records "
            "have none; train more shadows on random halves"
        )
    return (shadows.sigmoid() * chosen).sum(0) / count
