"""LiRA, membership inference by a likelihood ratio between models trained with and without a record."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from attacks.membership._inputs import checked_scores
from distillkit._utils import check

Variance = Literal["pooled", "fixed", "example", "conjugate"]
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
            one variance per record. `"conjugate"` shrinks each record's variance towards a common value, more strongly
            if the records' variances agree. For this, an inverse-gamma prior is fitted by moments (Smyth, "Linear
            models and empirical Bayes methods", 2004), and the Gaussian is replaced by a Student t distribution.

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
    without = _Fit(~inside, shadows, variance, "without")
    if not online:
        return without.log_odds(target)
    return _Fit(inside, shadows, variance, "with").log_density(target) - without.log_density(target)


class _Fit:
    """Distribution of each record's score, fitted to the scores of some of the shadow models.

    This is a Gaussian, or a Student t distribution if it has degrees of freedom.

    Args:
        chosen: whether the score of shadow model s is used for record i, bool [S, n].
        shadows: scores of the shadow models, [S, n].
        variance: estimator of the variance; see `lira`.
        preposition: word for error messages: "with" if the chosen models were trained on the record, otherwise
            "without".

    Attributes:
        mean, scale: location and scale of each record's distribution, [n].
        freedom: its degrees of freedom, [n]; None for a Gaussian.
    """

    def __init__(self, chosen: Tensor, shadows: Tensor, variance: Variance, preposition: str) -> None:
        count = chosen.sum(0).double()
        least = 1 if variance in ("pooled", "fixed") else 2
        few = int((count < least).sum())
        if few or not bool((count > 1).any()):
            raise ValueError(
                f"shadows must have at least {least} trained {preposition} every record (and 2 for some), but {few} "
                "records have fewer; train more shadows, or use variance='pooled', which needs the fewest"
            )
        self.mean = (shadows * chosen).sum(0) / count
        squares = ((shadows - self.mean).square() * chosen).sum(0)
        pooled = squares.sum() / (count - 1).clamp_min(0).sum()
        self.freedom: Tensor | None = None
        own = squares / (count - 1).clamp_min(1)
        if variance in ("pooled", "fixed"):
            own = (pooled if variance == "pooled" else shadows[chosen].var(correction=0)).expand_as(own)
        elif variance == "conjugate":
            prior, at = _prior(own, count - 1, pooled)
            if math.isinf(prior):
                own = at.expand_as(own)
            else:
                self.freedom = prior + count - 1
                own = (prior * at + squares) / self.freedom
            own = own * (1 + 1 / count)
        if not bool((own > 0).all()):
            raise ValueError(
                f"shadows trained {preposition} a record must not all give the same score, as they do for "
                f"{int((own <= 0).sum())} records; use scores that do not saturate, or variance='pooled'"
            )
        self.scale = own.sqrt()

    def log_density(self, target: Tensor) -> Tensor:
        z = (target - self.mean) / self.scale
        if self.freedom is None:
            return -0.5 * z.square() - 0.5 * math.log(2 * math.pi) - self.scale.log()
        return self._student("logpdf", z) - self.scale.log()

    def log_odds(self, target: Tensor) -> Tensor:
        """Return the log odds log(p / (1 - p)) of each record.

        Here, p is the CDF of the record's score distribution at the record's score under the target model. The result
        is accurate even if p is very close to 0 or 1.
        """
        z = (target - self.mean) / self.scale
        if self.freedom is None:
            return torch.special.log_ndtr(z) - torch.special.log_ndtr(-z)
        return self._student("logcdf", z) - self._student("logsf", z)

    def _student(self, name: str, z: Tensor) -> Tensor:
        from scipy.stats import t

        assert self.freedom is not None
        return torch.from_numpy(getattr(t, name)(z.cpu().numpy(), self.freedom.cpu().numpy())).to(z)


def _prior(own: Tensor, freedom: Tensor, pooled: Tensor) -> tuple[float, Tensor]:
    """Fit an inverse-gamma prior to the score variances of all records (Smyth 2004).

    The prior is fitted by the method of moments, applied to the logarithms of the variances.

    If the variances differ no more than expected by chance, all records get the pooled variance.
    """
    half = freedom / 2
    usable = own > 0
    logs = own[usable].log() - torch.special.digamma(half[usable]) + half[usable].log()
    excess = logs.var() - torch.special.polygamma(1, half[usable]).mean() if len(logs) > 1 else torch.zeros(())
    if not bool(excess > 0):
        return math.inf, pooled
    prior = 2 * _trigamma_inverse(float(excess))
    return prior, (logs.mean() + torch.special.digamma(logs.new_tensor(prior / 2)) - math.log(prior / 2)).exp()


def _trigamma_inverse(value: float) -> float:
    """Return the positive x with trigamma(x) = `value`."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return math.exp(brentq(lambda log: polygamma(1, math.exp(log)) - value, -30.0, 30.0))
