"""LiRA, membership inference by a likelihood ratio between models trained with and without a record."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from attacks.membership._inputs import checked_scores
from distillkit._utils import check

Variance = Literal["pooled", "fixed", "example"]
VARIANCES = get_args(Variance)
"""Estimators of the variance of a record's scores over shadow models; see `lira`."""


def lira(
    target: Tensor, inside: Tensor, shadows: Tensor, *, online: bool = False, variance: Variance = "pooled"
) -> Tensor:
    """Return likelihood-ratio scores (Carlini et al., "Membership inference attacks from first principles", S&P 2022).

    For every record, the attack tests whether the target's score looks like the scores of models trained with the
    record, or like those of models trained without it. Shadow models are trained like the target, each on a random half
    of the candidate records. There are two versions:

    * Offline: for every record, a distribution is fitted to the scores of the shadow models trained without it. The
      result is log(p / (1 - p)), where p is the probability that a model without the record has a score below the
      target's. Members have higher scores, so only a high score of the target indicates membership.
    * Online (Algorithm 1): a second distribution is fitted to the scores of the shadow models trained with the record.
      The result is the log density of the target's score with the record, minus the log density without it.

    Against models that hide their members well, the online attack performs worse than the offline attack: the means of
    its two distributions are almost equal, so the sign of their difference is random. Run both versions, and correct
    for having tried two attacks (`attacks.bonferroni`).

    Args:
        target: scores of the target model [n], preferably `stable_logit`s, which are nearly Gaussian.
        inside: whether shadow model s was trained on record i, bool [S, n]. Every record must be in the training
            records of a random half of the models.
        shadows: scores of the shadow models, [S, n].
        online: False for the offline attack above, True for the online one.
        variance: estimator of the variance of a record's scores around their mean. `"pooled"` uses one variance for all
            records, that of the scores around each record's own mean. `"fixed"` uses the variance of all scores around
            their overall mean, as the authors' code does if there are few shadow models; the paper recommends one
            variance for fewer than 64. Offline, `"pooled"` and `"fixed"` order the records equally. `"example"` uses
            one variance per record.

    Returns:
        Scores, float64 [n], higher for members. Scores of different records can be compared with each other.

    Raises:
        TypeError, ValueError: the tensors' shapes do not match, a score is not finite, or too few shadow models were
            trained without a record or, for the online attack, with a record. A mean needs one model, and a variance
            per record needs two.
    """
    check.one_of(variance, "variance", VARIANCES)
    check.boolean(online, "online")
    target, inside, shadows = checked_scores(target, inside, shadows)
    mean, scale = _fit(~inside, shadows, variance, "without")
    if not online:
        z = (target - mean) / scale
        return torch.special.log_ndtr(z) - torch.special.log_ndtr(-z)
    return _log_density(target, *_fit(inside, shadows, variance, "with")) - _log_density(target, mean, scale)


def _log_density(target: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return -0.5 * ((target - mean) / scale).square() - 0.5 * math.log(2 * math.pi) - scale.log()


def _fit(chosen: Tensor, shadows: Tensor, variance: Variance, preposition: str) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each record's scores by some of the shadow models."""
    count = chosen.sum(0).double()
    least = 2 if variance == "example" else 1
    few = int((count < least).sum())
    if few or not bool((count > 1).any()):
        raise ValueError(
            f"shadows must have at least {least} trained {preposition} every record (and 2 for some), but {few} "
            "records have fewer; train more shadows, or use variance='pooled', which needs the fewest"
        )
    mean = (shadows * chosen).sum(0) / count
    squares = ((shadows - mean).square() * chosen).sum(0)
    if variance == "example":
        own = squares / (count - 1)
    elif variance == "pooled":
        own = (squares.sum() / (count - 1).sum()).expand_as(mean)
    else:
        own = shadows[chosen].var(correction=0).expand_as(mean)
    if not bool((own > 0).all()):
        raise ValueError(
            f"shadows trained {preposition} a record must not all give the same score, as they do for "
            f"{int((own <= 0).sum())} records; use scores that do not saturate, or variance='pooled'"
        )
    return mean, own.sqrt()
