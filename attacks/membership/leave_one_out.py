"""Evaluation of membership attacks with each shadow model in turn as the target, and means over all targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attacks.membership._inputs import finite_scores
from attacks.membership.lira import lira
from attacks.membership.rmia import rmia
from attacks.membership.shadow_scores import ShadowScores, Target
from attacks.statistics import (
    FEW,
    Estimate,
    OperatingPoint,
    Rate,
    at_threshold,
    bonferroni,
    ppv_interval,
    roc,
)
from distillkit._utils import check
from distillkit._utils.content import content
from distillkit._utils.display import two_digits
from distillkit._utils.progress import bar

Attack = Callable[[Target], Tensor]
"""Function `attack(target)` that returns a score per record, [N], higher for records that the target was trained on."""


def _rmia(target: Target, online: bool) -> Tensor:
    if target.population_scores is None or target.population_shadows is None:
        raise ValueError("RMIA needs a population in the pipeline; give one, or leave RMIA out")
    return rmia(
        target.scores, target.inside, target.shadows, target.population_scores, target.population_shadows, online=online
    )


SHADOW_ATTACKS: Mapping[str, Attack] = {
    "threshold": lambda t: t.scores,
    "LiRA offline": lambda t: lira(t.scores, t.inside, t.shadows),
    "LiRA online": lambda t: lira(t.scores, t.inside, t.shadows, online=True),
    "RMIA offline": lambda t: _rmia(t, False),
    "RMIA online": lambda t: _rmia(t, True),
}
"""Default attacks of `leave_one_out`: one threshold for all records, and LiRA and RMIA with their defaults. RMIA needs
stable logits and a population.
"""


@dataclass(frozen=True)
class AttackResult:
    """Result of one attack, averaged over all attacked models (targets). Prints as a line of a report.

    `leave_one_out` returns one such result for each attack. Every shadow model is the target once.

    Each mean has a confidence interval for the expected result on a new target, which is trained on another half of the
    *same* records, and attacked with other shadow models; see `leave_one_out`.

    Attributes:
        auc: mean area under the targets' ROC curves.
        tpr: mean share of members that are called members (true-positive rate).
        fpr: mean share of non-members that are called members (false-positive rate). The threshold for each target was
            chosen on other shadow models for a false-positive rate of `nominal_fpr`, so `fpr` is only close to
            `nominal_fpr`. Report `tpr` and `fpr` together.
        nominal_fpr: false-positive rate for which the thresholds were chosen.
        points: rates for each target, in the order of the shadow models.
        few: whether `fpr` is based on fewer than `attacks.statistics.FEW` false positives in total.
    """

    auc: Estimate
    tpr: Estimate
    fpr: Estimate
    nominal_fpr: float
    points: tuple[OperatingPoint, ...]
    few: bool

    def ppv(self, prior: float) -> Estimate:
        """Return the positive predictive value, that is, the share of members among the records called members.

        The value depends on `prior`, the share of members among all records that an attacker examines; see
        `attacks.ppv`.

        Args:
            prior: share of these records that are members, in (0, 1).

        Raises:
            TypeError, ValueError: the prior is out of range, or no record was called a member.
        """
        return ppv_interval(self.tpr, self.fpr, prior)

    def __str__(self) -> str:
        few = ", few false positives" if self.few else ""
        return f"TPR {_percent(self.tpr)} at FPR {_percent(self.fpr)}{few}; AUC {self.auc} ({len(self.points)} targets)"

    __repr__ = __str__


def leave_one_out(
    shadows: ShadowScores,
    attacks: Mapping[str, Attack] | None = None,
    *,
    scorer: str = "model",
    fpr: float = 0.01,
    confidence: float = 0.95,
    also_tried: int = 0,
    progress: bool = True,
) -> dict[str, AttackResult]:
    """Evaluate attacks with every shadow model in turn as the target, and average the results.

    A single target is a random sample, so only the mean over all targets should be reported. For each target, the
    attack uses all shadow models except the target itself and its complement, the model that was trained on exactly
    those records on which the target was not trained (`ShadowScores.without`). To choose the threshold, each of these
    shadow models is attacked like the target. The threshold is the loosest one at which at most a share `fpr` of the
    shadow models' non-members are called members. Therefore neither the attack nor its threshold depends on the target.

    The true-positive rate, the false-positive rate and the AUC have confidence intervals for the expected result on a
    new target, which is trained on another half of the same records, and attacked in the same way with other shadow
    models. The results of a target and of its complement are not independent. An interval is therefore computed from
    the spread between the pairs of a target and its complement, with Student's t quantiles (the cluster-robust error).
    Let a hit be a record that is called a member, and a miss a record that is not. If a rate is based on fewer than ten
    hits or fewer than ten misses, its interval is at least as wide as the Clopper-Pearson interval of the counts over
    all targets. `docs/results/audit.md` reports the measured coverage of the intervals. All intervals are corrected for
    the number of attacks (`bonferroni`), so you may report the best attack. Each attack runs S^2/2 times for S shadow
    models.

    Args:
        shadows: scores of shadow models that were all trained in the same way: at least 8 models for LiRA, and 32 or
            more for useful intervals.
        attacks: attacks by name, functions of a `Target`; `SHADOW_ATTACKS` by default. RMIA needs log-odds of the
            true class (`stable_logit`) as scores, also for records on which no model was trained
            (`ShadowScores.population`). By default it is used only if there are such scores and the scorer is "model".
        scorer: name, in `shadows.scores`, of the scores that the attacks use.
        fpr: false-positive rate for which thresholds are chosen, in (0, 1]; it must allow at least one false positive
            per target.
        confidence: probability that all intervals of a rate, or all intervals of the AUC, hold together, in (0, 1).
        also_tried: number of other attacks that you tried and that are not among `attacks`. The intervals are corrected
            for them, too.
        progress: whether to show a progress bar.

    Returns:
        The result of each attack, by its name.

    Raises:
        TypeError, ValueError: a value is out of range; there is no such scorer, or there are too few shadow models;
            `fpr` allows less than one false positive per target; or an attack does not return one finite score per
            record. Errors of the attacks are raised unchanged.

    Source: Liang and Zeger, "Longitudinal data analysis using generalized linear models" (Biometrika 1986), for the
    error of a mean of clusters.
    """
    check.instance(shadows, ShadowScores, "shadows", "ShadowScores")
    check.one_of(scorer, "scorer", tuple(shadows.scores))
    tried = _attacks(attacks, shadows, scorer)
    check.real_number(fpr, "fpr", above=0.0, most=1.0)
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    each = bonferroni(confidence, len(tried) + check.positive_int(also_tried, "also_tried", least=0))
    check.boolean(progress, "progress")
    others = int((~shadows.inside).sum(1).min())
    if fpr * others < 1:
        raise ValueError(
            f"fpr must be at least 1/{others}, one false positive among a target's non-members, got {fpr:g}; use more "
            "records, or a larger rate"
        )
    units = _units(shadows.inside)
    if int(units.max()) < 2:
        raise ValueError(f"shadows must be at least three pairs, a target's and two others, got {len(shadows)}")
    rounds = len(tried) * (int(units.max()) + 1)
    with bar(rounds, "attacks", unit="round", progress=progress) as shown:
        return {
            name: _evaluate(partial(_scores, name, attack), shadows, scorer, units, fpr, each, shown)
            for name, attack in tried.items()
        }


def _evaluate(
    score: Attack, shadows: ShadowScores, scorer: str, units: Tensor, fpr: float, confidence: float, shown: Any
) -> AttackResult:
    given = [shadows.scores[scorer], shadows.population.get(scorer), shadows.labels]
    truth, thresholds, before = shadows.inside.cpu(), list[Any](), [one is None or content(one) for one in given]
    own = [score(shadows.target(t, scorer)) for t in range(len(shadows))]
    for unit in range(int(units.max()) + 1):
        rest = units != unit
        known = shadows.only(rest)
        known_scores = torch.stack([score(known.target(i, scorer)) for i in range(len(known))])
        thresholds.append(_threshold(known_scores[~truth[rest]].sort(descending=True).values, fpr))
        shown.update()
    if [one is None or content(one) for one in given] != before:
        raise ValueError("attacks must not change their targets in place, but one did: use clones, such as s - m")
    points = [
        at_threshold(scores, member, thresholds[unit], confidence=confidence, chosen_elsewhere=True)
        for scores, member, unit in zip(own, truth, units.tolist())
    ]
    return AttackResult(
        _interval([roc(scores, member).auc for scores, member in zip(own, truth)], units, confidence),
        _rate([p.tpr for p in points], units, confidence),
        _rate([p.fpr for p in points], units, confidence),
        fpr,
        tuple(points),
        sum(p.fpr.hits for p in points) < FEW,
    )


def _attacks(attacks: Mapping[str, Attack] | None, shadows: ShadowScores, scorer: str) -> dict[str, Attack]:
    if attacks is None:
        logits = scorer == "model" and scorer in shadows.population
        return {n: a for n, a in SHADOW_ATTACKS.items() if logits or not n.startswith("RMIA")}
    for attack, run in check.mapping(attacks, "attacks").items():
        check.callable_with(run, f"attacks[{attack!r}]", ("target",), "a function of a Target")
    if not attacks:
        raise ValueError("attacks must hold at least one attack, got none; omit it for the defaults")
    return dict(attacks)


def _scores(name: str, run: Attack, target: Target) -> Tensor:
    found = finite_scores(run(target), f"the scores of attacks[{name!r}]").cpu()
    if found.shape != target.inside.shape[1:]:
        raise ValueError(
            f"attacks[{name!r}] must give one score per record, [{target.inside.shape[1]}], got {list(found.shape)}"
        )
    return found


def _threshold(falling: Tensor, fpr: float) -> float:
    """Return the smallest threshold that at most a share `fpr` of the non-members' scores reach."""
    allowed = math.floor(fpr * len(falling) + 1e-9)
    if allowed >= len(falling):
        return -math.inf
    above = int(torch.searchsorted(-falling, -falling[allowed]))  # number of larger scores
    return float(falling[above - 1]) if above else math.inf


def _units(inside: Tensor) -> Tensor:
    """Assign shadow models to pairs: each record was used to train exactly one of the two models of a pair."""
    first: dict[bytes, int] = {}
    units = []
    for row in inside.cpu():
        key, other = (half.numpy().tobytes() for half in (row, ~row))
        units.append(first.setdefault(min(key, other), len(first)))
    return torch.tensor(units)


def _interval(values: Sequence[float], units: Tensor, confidence: float) -> Estimate:
    """Return the mean of one value per target, with a confidence interval from the cluster-robust standard error."""
    from scipy.stats import t

    of, count = torch.tensor(values, dtype=torch.float64), int(units.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, units, of - of.mean())
    error = math.sqrt(count / (count - 1) * float(sums.square().sum())) / len(of)
    value, half = float(of.mean()), float(t.isf((1 - confidence) / 2, count - 1)) * error
    return Estimate(value, max(0.0, value - half), min(1.0, value + half), confidence)


def _rate(counted: Sequence[Rate], units: Tensor, confidence: float) -> Estimate:
    found = _interval([r.value for r in counted], units, confidence)
    hits, trials = sum(r.hits for r in counted), sum(r.trials for r in counted)
    if min(hits, trials - hits) >= FEW:
        return found
    whole = Rate.of(hits, trials, confidence)
    return Estimate(found.value, min(found.low, whole.low), max(found.high, whole.high), confidence)


def _percent(rate: Estimate) -> str:
    return f"{two_digits(rate.value)} % ({two_digits(rate.low)} to {two_digits(rate.high)})"
