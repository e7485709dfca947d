"""Statistics of membership attacks: rates with confidence intervals, ROC curves, and positive predictive values.

Every membership attack returns one score per record, higher for training members. The functions in this module turn
scores into results that you can report. ROC curves are not interpolated, and rates that are based on few false
positives are marked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from attacks._binomial import lower, upper
from distillkit._utils import check
from distillkit._utils.display import two_digits

__all__ = [
    "FEW", "Estimate", "OperatingPoint", "Rate", "Roc", "at_threshold", "bonferroni", "clopper_pearson", "ppv",
    "ppv_interval", "roc",
]  # fmt: skip

FEW = 10
"""Number of false positives below which a rate is flagged, because it then varies much between samples."""


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided confidence interval for a probability, after `hits` of `trials` independent trials.

    Use it for every counted rate in a report. For example, 3 hits in 10 trials are compatible with 7 to 65 %. The
    interval contains the true probability with at least the probability `confidence`. The number of trials must be
    fixed beforehand. Use `Roc.at` instead for rates at a threshold that was chosen on the same scores.

    Paper: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial"
    (Biometrika 1934), as quantiles of the beta distribution.

    Args:
        hits: number of successful trials, 0 to `trials`.
        trials: number of trials, at least 1.
        confidence: confidence of the interval, in (0, 1).

    Returns:
        The ends of the interval (low, high), shares in [0, 1].

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    trials = check.positive_int(trials, "trials")
    hits = check.positive_int(hits, "hits", least=0, most=trials)
    tail = (1 - check.real_number(confidence, "confidence", above=0.0, below=1.0)) / 2
    return float(lower(hits, trials, tail)), float(upper(hits, trials, tail))


def bonferroni(confidence: float, tried: int) -> float:
    """Return the confidence level for one interval if `tried` intervals must all hold with probability `confidence`.

    Use it when you report the best of several attacks, which may be the best by chance. The result is
    1 - (1 - confidence) / tried. By Bonferroni's inequality, this is enough even if the attacks depend on each other.

    Args:
        confidence: smallest probability that all intervals hold, in (0, 1).
        tried: number of attacks that were tried, at least 1, including unreported ones.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    return 1 - (1 - confidence) / check.positive_int(tried, "tried")


@dataclass(frozen=True)
class Rate:
    """Rate that was counted as a number of hits in a number of trials, with a confidence interval.

    Attributes:
        hits: number of hits.
        trials: number of trials.
        low, high: ends of the interval, shares in [0, 1].
        confidence: confidence of the interval.
    """

    hits: int
    trials: int
    low: float
    high: float
    confidence: float

    @staticmethod
    def of(hits: int, trials: int, confidence: float = 0.95) -> Rate:
        """Return the rate with its `clopper_pearson` interval.

        Args:
            hits, trials, confidence: arguments of `clopper_pearson`.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range.
        """
        return Rate(hits, trials, *clopper_pearson(hits, trials, confidence), confidence)

    @property
    def value(self) -> float:
        """The counted rate, hits / trials."""
        return self.hits / self.trials

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True)
class Estimate:
    """Measured value with a confidence interval.

    Attributes:
        value: measured value.
        low, high: ends of the interval.
        confidence: confidence of the interval.
    """

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class OperatingPoint:
    """Rates of an attack at one threshold, as `Roc.at` and `at_threshold` return them.

    Attributes:
        threshold: lowest score at which a record is called a member.
        tpr: true-positive rate: the share of members that are called members, with a confidence interval.
        fpr: false-positive rate: the share of non-members that are called members, with a confidence interval.
        few: whether the false-positive rate is based on fewer than ten false positives (the constant `FEW`).
    """

    threshold: float
    tpr: Rate
    fpr: Rate
    few: bool

    def ppv(self, prior: float) -> Estimate:
        """Return the positive predictive value, that is, the share of members among the records called members.

        The value depends on `prior`, the share of members among all records that an attacker examines; see
        `attacks.ppv`. The interval of the result is wide if there are few false positives.

        Args:
            prior: share of these records that are members, in (0, 1).

        Raises:
            TypeError, ValueError: the prior is out of range, or no record is called a member at this threshold.
        """
        return ppv_interval(self.tpr, self.fpr, prior)

    def __str__(self) -> str:
        few = f" (only {self.fpr.hits} false positives)" if self.few else ""
        return f"TPR {self.tpr} at FPR {two_digits(self.fpr.value)} %{few}"


def at_threshold(
    scores: Tensor, member: Tensor, threshold: float, *, confidence: float = 0.95, chosen_elsewhere: bool = False
) -> OperatingPoint:
    """Return the rates of an attack at a threshold that was fixed without looking at these scores.

    The threshold must come from other data, such as other shadow models (see `attacks.membership.leave_one_out`), or
    from theory. Only then are the confidence intervals of the rates exact. A threshold that equals one of the scores
    was most likely chosen on these scores, and is refused. In this case, use `roc(...).at(...)`, whose intervals
    account for the choice.

    Args:
        scores: scores of the records, floats [n], higher for members; infinities are allowed, NaN is not.
        member: whether each record is a member, bool [n]; at least one member and one non-member.
        threshold: lowest score at which a record is called a member.
        confidence: confidence of each of the two intervals, in (0, 1).
        chosen_elsewhere: whether to accept a threshold that equals a score. Set it only if the threshold was chosen on
            other data and is equal by coincidence. This may happen if scores have only few different values, such as
            those of `rmia`.

    Raises:
        TypeError, ValueError: `scores` or `member` is invalid, or the threshold is NaN or among the scores.
    """
    inside, outside = _split_by_membership(scores, member)
    check.boolean(chosen_elsewhere, "chosen_elsewhere")
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold must be a number, got {type(threshold).__name__}")
    if not isinstance(threshold, float) or math.isfinite(threshold):
        check.real_number(threshold, "threshold")
    if math.isnan(threshold):
        raise ValueError("threshold must be a number, got nan, which cannot be compared")
    if not chosen_elsewhere and math.isfinite(threshold) and bool((torch.cat([inside, outside]) == threshold).any()):
        raise ValueError(
            f"threshold must not be chosen on the scores it is reported on, but {threshold:g} is one of them: its "
            "interval would be too narrow. Use roc(scores, member).at(fpr), which corrects for that, or set "
            "chosen_elsewhere=True if it comes from other scores"
        )
    hits, false = (int((side >= threshold).sum()) for side in (inside, outside))
    return OperatingPoint(
        float(threshold), Rate.of(hits, len(inside), confidence), Rate.of(false, len(outside), confidence), false < FEW
    )


@dataclass(frozen=True)
class Roc:
    """ROC curve of an attack, as `roc` returns it: counts of true and false positives at all relevant thresholds.

    Use `at` for the rates at one false-positive rate, `auc` for a single value, and `fpr` and `tpr` for a plot.

    Attributes:
        thresholds: infinity, at which no record is called a member, then all different scores in decreasing order;
            float64 [t].
        hits: for each threshold, the number of members with at least this score, int64 [t].
        false: for each threshold, the number of non-members with at least this score, int64 [t].
        members: number of members.
        others: number of non-members.
    """

    thresholds: Tensor
    hits: Tensor
    false: Tensor
    members: int
    others: int

    @property
    def tpr(self) -> Tensor:
        """True-positive rate at each threshold, float64 [t]: the vertical axis of the plot."""
        return self.hits.double() / self.members

    @property
    def fpr(self) -> Tensor:
        """False-positive rate at each threshold, float64 [t]: the horizontal axis of the plot."""
        return self.false.double() / self.others

    @property
    def auc(self) -> float:
        """Area under the curve: the probability that a member has a higher score than a non-member.

        Equal scores count half. Guessing gives 0.5. If an attack is certain about only a few records, its AUC is hardly
        above 0.5, so also report the true-positive rate at a small false-positive rate
        (method `at`).
        """
        return float(torch.trapezoid(self.tpr, self.fpr))

    def __repr__(self) -> str:
        return f"Roc({self.members} members, {self.others} others; AUC {self.auc:.3f})"

    def at(self, fpr: float, *, confidence: float = 0.95) -> OperatingPoint:
        """Return the rates at the lowest threshold whose false-positive rate on these scores is at most `fpr`.

        The interval of the true-positive rate is for the threshold t* whose *true* false-positive rate is `fpr`. The
        threshold t that is used here was chosen on a sample of non-members, so it may differ from t*. A Clopper-Pearson
        interval of the true-positive rate at t ignores this difference, and would be too narrow.

        The interval is therefore widened. The true-positive rate is also computed at a strict and at a loose threshold.
        With high probability, the true false-positive rate is at most `fpr` at the strict threshold, and at least `fpr`
        at the loose threshold. Let r be the true-positive rate at t. The lower end of the interval is
        r - sqrt(a^2 + b^2). Here, a is the distance from r to the lower Clopper-Pearson bound, and b the distance from
        r to the true-positive rate at the strict threshold. The upper end is computed in the same way, from the
        upper bound and the loose threshold.

        Source: Zou and Donner, "Construction of confidence limits about effect measures: a general approach"
        (Statistics in Medicine 2008), for the sum of squares.

        Args:
            fpr: largest share of non-members that may be called members, in (0, 1].
            confidence: confidence of each of the two intervals (of `tpr` and of `fpr` in the result), in (0, 1).

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range, or `fpr` is too small to be
                measured: below 1 / the number of non-members.
        """
        check.real_number(fpr, "fpr", above=0.0, most=1.0)
        if fpr * self.others < 1:
            raise ValueError(
                f"fpr must be at least 1/{self.others}, one false positive among the non-members, got {fpr:g}; take "
                "more non-members, or a larger rate"
            )
        place = self._threshold_index(math.floor(fpr * self.others + 1e-9))
        tail = (1 - check.real_number(confidence, "confidence", above=0.0, below=1.0)) / 2
        largest_below, smallest_above = _critical_counts(fpr, self.others, tail)
        strict = 0 if largest_below is None else self._threshold_index(largest_below)
        loose = -1 if smallest_above is None else int(torch.searchsorted(self.false, smallest_above))
        found = Rate.of(int(self.hits[place]), self.members, confidence)
        lowest, highest = (float(self.hits[at]) / self.members for at in (strict, loose))
        low = found.value - math.hypot(found.value - found.low, found.value - lowest)
        high = found.value + math.hypot(found.high - found.value, max(0.0, highest - found.value))
        tpr = replace(found, low=max(0.0, low), high=min(1.0, high))
        counted = int(self.false[place])
        return OperatingPoint(
            float(self.thresholds[place]), tpr, Rate.of(counted, self.others, confidence), counted < FEW
        )

    def _threshold_index(self, false: int) -> int:
        """Return the index of the lowest threshold with at most `false` false positives."""
        return int(torch.searchsorted(self.false, false, right=True)) - 1


def _critical_counts(fpr: float, trials: int, error: float) -> tuple[int | None, int | None]:
    """Return two critical numbers of false positives, for tests whether a true rate is at most or at least `fpr`.

    The true rate is the unknown false-positive rate of a threshold. Each test is right with probability at least 1 -
    `error`. Consider a threshold with k false positives among n non-members. If the threshold is just above the
    (k + 1)-th largest score of a non-member, its true rate is stochastically at most a variable with distribution
    Beta(k + 1, n - k). If the threshold equals the k-th largest of these scores, its true rate is stochastically at
    least a variable with distribution Beta(k, n - k + 1).
    """
    from scipy.special import betainc

    counts = torch.arange(trials + 1).double().numpy()
    below = (betainc(counts[:-1] + 1, trials - counts[:-1], fpr) >= 1 - error).nonzero()[0]
    above = (betainc(counts[1:], trials - counts[1:] + 1, fpr) <= error).nonzero()[0]
    return int(below[-1]) if len(below) else None, 1 + int(above[0]) if len(above) else None


def roc(scores: Tensor, member: Tensor) -> Roc:
    """Return the empirical ROC curve of an attack's scores, without smoothing or convex hull.

    Records with equal scores cannot be distinguished, so they are counted together. Otherwise the curve would depend on
    the order of the records.

    Args:
        scores: scores of the records, floats [n], higher for members; infinities are allowed, NaN is not.
        member: whether each record is a member, bool [n]; at least one member and one non-member.

    Raises:
        TypeError, ValueError: `scores` or `member` is invalid.
    """
    inside, outside = _split_by_membership(scores, member)
    values = torch.cat([inside, outside]).unique().flip(0)
    steps = torch.cat([torch.tensor([math.inf], dtype=torch.float64), values])

    def at_least(side: Tensor) -> Tensor:
        return torch.cat(
            [torch.zeros(1, dtype=torch.int64), len(side) - torch.searchsorted(side.sort().values, values)]
        )

    return Roc(steps, at_least(inside), at_least(outside), len(inside), len(outside))


def ppv(tpr: float, fpr: float, prior: float) -> float:
    """Return the positive predictive value: the probability that a record called a member is a member.

    The value is prior * tpr / (prior * tpr + (1 - prior) * fpr). Suppose that `tpr` is 0.1 and `fpr` is 0.01. If half
    of the attacked records are members, the attack is right about ten in eleven of the records that it calls members.
    If one attacked record in a hundred is a member, the attack is right about only one in eleven of these records.

    Args:
        tpr: true-positive rate of the attack, in [0, 1].
        fpr: false-positive rate of the attack, in [0, 1].
        prior: share of the attacked records that are members, in (0, 1).

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; or both rates are 0, so that no record
            is called a member.
    """
    for value, name in ((tpr, "tpr"), (fpr, "fpr")):
        check.real_number(value, name, least=0.0, most=1.0)
    check.real_number(prior, "prior", above=0.0, below=1.0)
    called = prior * tpr + (1 - prior) * fpr
    if not called:
        raise ValueError("tpr and fpr must not both be 0: no record is called a member; use a looser threshold")
    return prior * tpr / called


def ppv_interval(tpr: Rate | Estimate, fpr: Rate | Estimate, prior: float) -> Estimate:
    """Return the positive predictive value and its interval, from two rates that have confidence intervals.

    For a given `prior`, the value depends only on the ratio of the two rates. The two rates are counted on different
    records, so they are independent. The interval of the ratio is computed from the intervals of the rates by the MOVER
    method, on a logarithmic scale.

    If the interval of a rate starts at 0, this method cannot be used, because the logarithm of 0 does not exist. The
    lower end of the result is then computed from the lower end of the interval of `tpr` and the upper end of that of
    `fpr`. The upper end is computed from the other two ends. This interval is wider.

    Source: Zou and Donner, "Construction of confidence limits about effect measures: a general approach" (Statistics in
    Medicine 2008).

    Args:
        tpr: true-positive rate of the attack.
        fpr: false-positive rate of the attack, counted on other records than `tpr`.
        prior: share of the attacked records that are members, in (0, 1).

    Raises:
        TypeError, ValueError: a rate is a number without an interval, the prior is out of range, or both rates are 0.
    """
    for name, one in (("tpr", tpr), ("fpr", fpr)):
        check.instance(one, Rate | Estimate, name, "a Rate, such as Rate.of(hits, trials), or an Estimate")
    value, low, high = ppv(tpr.value, fpr.value, prior), ppv(tpr.low, fpr.high, prior), ppv(tpr.high, fpr.low, prior)
    if tpr.low > 0 and fpr.low > 0:
        down = math.hypot(math.log(tpr.value / tpr.low), math.log(fpr.high / fpr.value))
        up = math.hypot(math.log(tpr.high / tpr.value), math.log(fpr.value / fpr.low))
        odds = (1 / value - 1) * math.exp(down), (1 / value - 1) * math.exp(-up)
        low, high = (1 / (1 + against) for against in odds)
    return Estimate(value, low, high, min(tpr.confidence, fpr.confidence))


def _split_by_membership(scores: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Check scores and memberships, and return the scores of members and those of non-members, float64 on the CPU."""
    check.float_tensor(scores, "scores", "[n]")
    check.bool_tensor(member, "member", "[n]")
    if scores.ndim != 1 or member.shape != scores.shape:
        raise ValueError(
            f"scores and member must be [n] of the same length, got {list(scores.shape)} and {list(member.shape)}"
        )
    if bool(scores.isnan().any()):
        raise ValueError(f"scores must not be NaN, but {int(scores.isnan().sum())} are: the attack failed there")
    scores, member = scores.detach().double().cpu(), member.cpu()
    if not bool(member.any()) or bool(member.all()):
        raise ValueError("member must have at least one member and one non-member")
    return scores[member], scores[~member]
