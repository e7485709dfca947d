"""How sure an attack may be: rates with intervals, ROC curves by steps, and what a hit is worth when members are rare.

Every membership attack ends in a score per record, higher for "this one was trained on". The functions here turn
scores into what may be claimed. They never interpolate, never round a rate in the attack's favour, and say how few
errors a number rests on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from attacks._binomial import lower, upper
from distillkit._utils import check

__all__ = [
    "FEW", "Estimate", "OperatingPoint", "Rate", "Roc", "at_threshold", "bonferroni", "clopper_pearson", "ppv",
    "ppv_interval", "roc",
]  # fmt: skip

FEW = 10
"""A false-positive rate that rests on fewer false positives is flagged: another sample may halve or double it."""


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval for a probability, after `hits` of `trials` independent tries.

    For every counted rate in a report: 3 hits of 10 are no 30 %, they are 7 to 65 %. Whatever the true probability is,
    the interval contains it with at least `confidence`. The tries must have been decided on beforehand: for a threshold
    that was picked on the very scores it is reported on see `Roc.at`.

    Paper: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial"
    (Biometrika 1934), as quantiles of the beta distribution.

    Args:
        hits: how many tries succeeded, 0 to `trials`.
        trials: how many there were, at least 1.
        confidence: in (0, 1), of the interval.

    Returns:
        The interval's ends (low, high), shares in [0, 1].

    Raises:
        TypeError, ValueError: numbers out of range.
    """
    trials = check.positive_int(trials, "trials")
    hits = check.positive_int(hits, "hits", least=0, most=trials)
    tail = (1 - check.real_number(confidence, "confidence", above=0.0, below=1.0)) / 2
    return float(lower(hits, trials, tail)), float(upper(hits, trials, tail))


def bonferroni(confidence: float, tried: int) -> float:
    """The confidence that each of `tried` intervals needs, so that all of them hold together with `confidence`.

    Use it when the best of several attacks is quoted: the best of many has luck on its side. It is
    1 - (1 - confidence) / tried (Bonferroni's inequality), whatever the attacks have in common.

    Args:
        confidence: wanted for all together, in (0, 1).
        tried: how many attacks were tried, at least 1, the ones not shown included.

    Raises:
        TypeError, ValueError: numbers out of range.
    """
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    return 1 - (1 - confidence) / check.positive_int(tried, "tried")


@dataclass(frozen=True)
class Rate:
    """A share that was counted, `hits` of `trials`, and the interval that its true value lies in.

    Attributes:
        hits, trials: how many were counted, and of how many.
        low, high: the interval's ends, shares in [0, 1].
        confidence: with which the interval holds the true share.
    """

    hits: int
    trials: int
    low: float
    high: float
    confidence: float

    @property
    def value(self) -> float:
        """The share that was counted, hits / trials, without its interval."""
        return self.hits / self.trials

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True)
class Estimate:
    """A number that was measured, and the interval that its true value lies in.

    Attributes:
        value: what was measured.
        low, high: the interval's ends.
        confidence: with which the interval holds the true value.
    """

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def _rate(hits: int, trials: int, confidence: float) -> Rate:
    return Rate(hits, trials, *clopper_pearson(hits, trials, confidence), confidence)


@dataclass(frozen=True)
class OperatingPoint:
    """What an attack achieves at one threshold: a row of a report's table. Made by `Roc.at` and `at_threshold`.

    Attributes:
        threshold: records with a score of at least this are called members.
        tpr, fpr: the shares of members and of non-members that are called members, with intervals.
        few: whether the false-positive rate rests on fewer than `FEW` false positives.
    """

    threshold: float
    tpr: Rate
    fpr: Rate
    few: bool

    def ppv(self, prior: float) -> Estimate:
        """What a hit at this threshold is worth where a share `prior` of the candidates are members; see `ppv`.

        The interval is wide where the false positives are few, which is where attacks shine.

        Args:
            prior: the share of the candidates that are members, in (0, 1).

        Raises:
            TypeError, ValueError: a prior out of range, or a threshold at which nobody is called a member.
        """
        return ppv_interval(self.tpr, self.fpr, prior)

    def __str__(self) -> str:
        few = f" (only {self.fpr.hits} false positives)" if self.few else ""
        return f"TPR {self.tpr} at FPR {100 * self.fpr.value:.2g} %{few}"


def at_threshold(
    scores: Tensor, member: Tensor, threshold: float, *, confidence: float = 0.95, chosen_elsewhere: bool = False
) -> OperatingPoint:
    """What an attack finds at a threshold that was fixed without looking at these scores.

    Take the threshold from other shadow models (`attacks.membership.leave_one_out` does), or from theory. The intervals
    are exact only then. A threshold that is itself one of the scores was most likely chosen on them, and is refused:
    use `roc(...).at(...)`, whose intervals know of the choice.

    Args:
        scores: one a record, floats [n], higher for members; infinities are allowed, NaN is not.
        member: bool [n], the truth; at least one of each.
        threshold: records that score at least this are called members.
        confidence: of both intervals, each by itself, in (0, 1).
        chosen_elsewhere: say True where the threshold did come from elsewhere and is one of the scores by chance, as
            with scores of few values (`rmia`'s are shares of a population).

    Raises:
        TypeError, ValueError: bad scores or truth, a threshold that is NaN, or one that is among the scores.
    """
    inside, outside = _halves(scores, member)
    check.boolean(chosen_elsewhere, "chosen_elsewhere")
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold must be a number, got {type(threshold).__name__}")
    if math.isnan(threshold):
        raise ValueError("threshold must be a number, got nan, to which no score compares")
    if not chosen_elsewhere and math.isfinite(threshold) and bool((torch.cat([inside, outside]) == threshold).any()):
        raise ValueError(
            f"threshold must not be chosen on the scores it is reported on, and {threshold:g} is one of them: its "
            "interval would be too narrow. Take roc(scores, member).at(fpr), which corrects for that, or give "
            "chosen_elsewhere=True if it did come from other scores"
        )
    hits, false = (int((side >= threshold).sum()) for side in (inside, outside))
    return OperatingPoint(
        float(threshold), _rate(hits, len(inside), confidence), _rate(false, len(outside), confidence), false < FEW
    )


@dataclass(frozen=True)
class Roc:
    """The ROC curve of an attack as counts: every threshold that makes a difference, from the strictest on.

    Made by `roc`. Read it by `at` (one row of a table), `auc` (one number), or `fpr` and `tpr` (a plot).

    Attributes:
        thresholds: float64 [t], falling; the first is infinite and calls nobody a member.
        hits, false: int64 [t], members and non-members with at least that score. Equal scores come together.
        members, others: how many there are.
    """

    thresholds: Tensor
    hits: Tensor
    false: Tensor
    members: int
    others: int

    @property
    def tpr(self) -> Tensor:
        """At each threshold the share of members that are called members, float64 [t]: the plot's height."""
        return self.hits.double() / self.members

    @property
    def fpr(self) -> Tensor:
        """At each threshold the share of non-members that are called members, float64 [t]: the plot's abscissa."""
        return self.false.double() / self.others

    @property
    def auc(self) -> float:
        """The area under the curve: the chance that a random member scores above a random non-member, ties half.

        0.5 is guessing. An attack that is sure of a few records only hardly moves it: quote `at` a small false-positive
        rate beside it.
        """
        return float(torch.trapezoid(self.tpr, self.fpr))

    def __repr__(self) -> str:
        return f"Roc({self.members} members, {self.others} others; AUC {self.auc:.3f})"

    def at(self, fpr: float, *, confidence: float = 0.95) -> OperatingPoint:
        """The best threshold whose false-positive rate is at most `fpr` on these scores, and what it finds.

        The threshold is chosen on the very non-members that `fpr` counts, so the plain interval of the true-positive
        rate would be too narrow. This one is for the true-positive rate at a *true* false-positive rate of `fpr`. Two
        errors meet in it, that of the count of members and that of where the threshold lies: what the rate is at a
        threshold that is surely strict enough, and at one that is surely loose enough. They are independent, so at
        either end they are added as squares.

        Source: Zou and Donner, "Construction of confidence limits about effect measures: a general approach"
            (Statistics in Medicine 2008), for the sum of squares.

        Args:
            fpr: the largest share of non-members that may be called members, in (0, 1].
            confidence: of the interval of `tpr`, and of that of `fpr` by itself, in (0, 1).

        Raises:
            TypeError, ValueError: numbers out of range, or `fpr` below 1 / the number of non-members, where nothing can
                be measured.
        """
        check.real_number(fpr, "fpr", above=0.0, most=1.0)
        if fpr * self.others < 1:
            raise ValueError(
                f"fpr must be at least 1/{self.others}, one false positive among the non-members, got {fpr:g}; take "
                "more non-members, or a larger rate"
            )
        place = self._within(math.floor(fpr * self.others + 1e-9))
        tail = (1 - check.real_number(confidence, "confidence", above=0.0, below=1.0)) / 2
        surely_below, surely_above = _sure_counts(fpr, self.others, tail)
        strict = 0 if surely_below is None else self._within(surely_below)
        loose = -1 if surely_above is None else int(torch.searchsorted(self.false, surely_above))
        found = _rate(int(self.hits[place]), self.members, confidence)
        lowest, highest = (float(self.hits[at]) / self.members for at in (strict, loose))
        low = found.value - math.hypot(found.value - found.low, found.value - lowest)
        high = found.value + math.hypot(found.high - found.value, max(0.0, highest - found.value))
        tpr = replace(found, low=max(0.0, low), high=min(1.0, high))
        counted = int(self.false[place])
        return OperatingPoint(
            float(self.thresholds[place]), tpr, _rate(counted, self.others, confidence), counted < FEW
        )

    def _within(self, false: int) -> int:
        """The loosest threshold with at most so many false positives."""
        return int(torch.searchsorted(self.false, false, right=True)) - 1


def _sure_counts(fpr: float, trials: int, error: float) -> tuple[int | None, int | None]:
    """The most false positives that show a true rate of at most `fpr`, and the fewest that show one of at least `fpr`.

    Each with probability 1 - `error`; None where no count does. A threshold just above the (k + 1)-th largest of n
    scores has a true rate of at most Beta(k + 1, n - k), one at the k-th largest of at least Beta(k, n - k + 1).
    """
    from scipy.special import betainc

    counts = torch.arange(trials + 1).double().numpy()
    below = (betainc(counts[:-1] + 1, trials - counts[:-1], fpr) >= 1 - error).nonzero()[0]
    above = (betainc(counts[1:], trials - counts[1:] + 1, fpr) <= error).nonzero()[0]
    return int(below[-1]) if len(below) else None, 1 + int(above[0]) if len(above) else None


def roc(scores: Tensor, member: Tensor) -> Roc:
    """The curve of true against false positives over all thresholds, as the steps it is, without smoothing or hull.

    What a membership attack's scores are turned into before anything is claimed of them. Records with equal scores
    cannot be told apart, so they change sides together (a curve that splits ties depends on the order of the records).

    Args:
        scores: one a record, floats [n], higher for members; infinities are allowed, NaN is not.
        member: bool [n], the truth; at least one of each.

    Raises:
        TypeError, ValueError: bad scores or truth.
    """
    inside, outside = _halves(scores, member)
    values = torch.cat([inside, outside]).unique().flip(0)
    steps = torch.cat([torch.tensor([math.inf], dtype=torch.float64), values])

    def at_least(side: Tensor) -> Tensor:
        return torch.cat(
            [torch.zeros(1, dtype=torch.int64), len(side) - torch.searchsorted(side.sort().values, values)]
        )

    return Roc(steps, at_least(inside), at_least(outside), len(inside), len(outside))


def ppv(tpr: float, fpr: float, prior: float) -> float:
    """What a hit is worth: the chance that a record called a member is one, where few of the candidates are members.

    The positive predictive value, prior tpr / (prior tpr + (1 - prior) fpr). An attack with 10 % true at 1 % false
    positives is right ten times in eleven where half of the candidates are members, and once in eleven where one in a
    hundred is.

    Args:
        tpr, fpr: the attack's true- and false-positive rates, in [0, 1], as `OperatingPoint` has them.
        prior: the share of the candidates that are members, in (0, 1).

    Raises:
        TypeError, ValueError: numbers out of range, or both rates zero (nobody is called a member).
    """
    for value, name in ((tpr, "tpr"), (fpr, "fpr")):
        check.real_number(value, name, least=0.0, most=1.0)
    check.real_number(prior, "prior", above=0.0, below=1.0)
    called = prior * tpr + (1 - prior) * fpr
    if not called:
        raise ValueError("tpr and fpr must not both be 0: nobody is called a member; take a looser threshold")
    return prior * tpr / called


def ppv_interval(tpr: Rate | Estimate, fpr: Rate | Estimate, prior: float) -> Estimate:
    """`ppv` of two rates with intervals, with the interval that follows from theirs.

    What a hit is worth depends on the rates' ratio alone. The errors of their logarithms are independent, so at either
    end they are added as squares. Where the interval of a rate begins at 0 it has no logarithm, and the ends are those
    of both rates at their worst and at their best, which is wider.

    Source: Zou and Donner, "Construction of confidence limits about effect measures: a general approach" (Statistics in
        Medicine 2008).

    Args:
        tpr, fpr: true- and false-positive rates, of other records each.
        prior: the share of the candidates that are members, in (0, 1).

    Returns:
        Its confidence is that of the rates, the smaller if they differ.

    Raises:
        TypeError, ValueError: as `ppv`.
    """
    value, low, high = ppv(tpr.value, fpr.value, prior), ppv(tpr.low, fpr.high, prior), ppv(tpr.high, fpr.low, prior)
    if tpr.low > 0 and fpr.low > 0:
        down = math.hypot(math.log(tpr.value / tpr.low), math.log(fpr.high / fpr.value))
        up = math.hypot(math.log(tpr.high / tpr.value), math.log(fpr.value / fpr.low))
        odds = (1 / value - 1) * math.exp(down), (1 / value - 1) * math.exp(-up)
        low, high = (1 / (1 + against) for against in odds)
    return Estimate(value, low, high, min(tpr.confidence, fpr.confidence))


def _halves(scores: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of members and of the others, float64 on the CPU."""
    check.float_tensor(scores, "scores", "[n]")
    check.bool_tensor(member, "member", "[n]")
    if scores.ndim != 1 or member.shape != scores.shape:
        raise ValueError(
            f"scores and member must be two rows of one length, got {list(scores.shape)} and {list(member.shape)}"
        )
    if bool(scores.isnan().any()):
        raise ValueError(f"scores must not be NaN, but {int(scores.isnan().sum())} are: the attack failed there")
    scores, member = scores.detach().double().cpu(), member.cpu()
    if not bool(member.any()) or bool(member.all()):
        raise ValueError("member must hold at least one member and one other; a rate of nothing has no meaning")
    return scores[member], scores[~member]
