"""Attacks judged on many targets: each shadow in turn, thresholds from the others, and a mean with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    clopper_pearson,
    ppv_interval,
    roc,
)
from distillkit._utils import check
from distillkit._utils.progress import bar

__all__ = ["ATTACKS", "Attack", "AttackResult", "leave_one_out"]

Attack = Callable[[Target], Tensor]
"""`attack(target)`: a score of each record, [N], higher for those that the target was trained on."""


def _rmia(target: Target, online: bool) -> Tensor:
    if target.z_scores is None or target.z_shadows is None:
        raise ValueError("population must be given to the pipeline for RMIA; leave RMIA out, or give such records")
    return rmia(target.scores, target.inside, target.shadows, target.z_scores, target.z_shadows, online=online)


ATTACKS: Mapping[str, Attack] = {
    "threshold": lambda t: t.scores,
    "LiRA offline": lambda t: lira(t.scores, t.inside, t.shadows),
    "LiRA online": lambda t: lira(t.scores, t.inside, t.shadows, online=True),
    "RMIA offline": lambda t: _rmia(t, False),
    "RMIA online": lambda t: _rmia(t, True),
}
"""The attacks that `leave_one_out` tries unless told otherwise: one threshold for all records, and LiRA and RMIA at
their defaults. RMIA wants stable logits and a population."""


@dataclass(frozen=True)
class AttackResult:
    """What one attack finds, over all targets. Made by `leave_one_out`; printed, it is a line of a report.

    The intervals are for one more run of the pipeline on another half of the *same* records; see `leave_one_out`.

    Attributes:
        auc: the mean area under the targets' curves.
        tpr, fpr: the means of the shares of members and of others that are called members, at thresholds that were
            chosen, for a false-positive rate of `wanted`, without the target. They cannot hit it exactly: quote both.
        wanted: that rate.
        points: what each target gave, in the order of the shadows.
        few: whether the mean false-positive rate rests on fewer than `attacks.statistics.FEW` false positives in all.
    """

    auc: Estimate
    tpr: Estimate
    fpr: Estimate
    wanted: float
    points: tuple[OperatingPoint, ...]
    few: bool

    def ppv(self, prior: float) -> Estimate:
        """What a hit is worth where a share `prior` of the candidates are members; as `attacks.OperatingPoint.ppv`.

        Args:
            prior: the share of the candidates that are members, in (0, 1).

        Raises:
            TypeError, ValueError: a prior out of range, or nobody was called a member.
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
    """Try attacks on every shadow in turn, with what the others allow, and say what they find on average.

    One target is one throw of the dice; the mean over all is what may be quoted. For each target its complement is
    taken out too (`ShadowScores.without`). The threshold comes from the rest: each of them is attacked in the target's
    place, by what is then left, and the threshold is the one that calls at most a share `fpr` of their non-members
    members. So neither a fit nor a threshold has seen the target.

    The intervals are for one more run of the pipeline on one more half of these records, attacked as these were: what
    the attacks and thresholds give on average that the other shadows make. A target and its complement belong together
    and count as one, so an interval comes from the spread over pairs, with Student's quantiles (the cluster-robust
    error). Where fewer than ten records are called members, or are not, it is at least as wide as Clopper and Pearson's
    for all records counted. How often they cover was counted (`docs/results/audit.md`). All are widened for the number
    of attacks (`bonferroni`), so that the best may be quoted. S shadows take S^2 / 2 attacks.

    Args:
        shadows: of one pipeline, at least 8 for LiRA; intervals want 32 and more.
        attacks: by name; `ATTACKS` by default. RMIA among them wants stable logits and a population, so by default it
            is tried where there is one, and on the scorer "model" alone.
        scorer: the scorer whose scores are attacked.
        fpr: the false-positive rate that thresholds are chosen for, in (0, 1], at least one false positive a target.
        confidence: that all intervals of a rate or of the areas hold together, in (0, 1).
        also_tried: how many attacks were tried besides and are not among `attacks`.
        progress: whether a bar is shown.

    Returns:
        What each attack found, by its name.

    Raises:
        TypeError, ValueError: numbers out of range, no such scorer, too few shadows, a rate below one false positive a
            target; an attack that gives other than one finite score a record; and what the attacks refuse.

    Source: Liang and Zeger, "Longitudinal data analysis using generalized linear models" (Biometrika 1986), for the
        error of a mean of clusters.
    """
    if not isinstance(shadows, ShadowScores):
        raise TypeError(f"shadows must be ShadowScores, got {type(shadows).__name__}")
    check.one_of(scorer, "scorer", tuple(shadows.scores))
    tried = _attacks(attacks, shadows, scorer)
    check.real_number(fpr, "fpr", above=0.0, most=1.0)
    check.real_number(confidence, "confidence", above=0.0, below=1.0)
    each = bonferroni(confidence, len(tried) + check.positive_int(also_tried, "also_tried", least=0))
    check.boolean(progress, "progress")
    others = int((~shadows.inside).sum(1).min())
    if fpr * others < 1:
        raise ValueError(
            f"fpr must be at least 1/{others}, one false positive among a target's non-members, got {fpr:g}; take more "
            "records, or a larger rate"
        )
    units = _units(shadows.inside)
    if int(units.max()) < 2:
        raise ValueError(f"shadows must be at least three pairs, a target's and two others, got {len(shadows)}")
    rounds = len(tried) * (int(units.max()) + 1)
    with bar(rounds, "attacks", unit="round", progress=progress) as shown:
        return {a: _found(a, run, shadows, scorer, units, fpr, each, shown.update) for a, run in tried.items()}


def _found(
    attack: str,
    run: Attack,
    shadows: ShadowScores,
    scorer: str,
    units: Tensor,
    fpr: float,
    confidence: float,
    tick: Callable[[], object],
) -> AttackResult:
    truth, thresholds = shadows.inside.cpu(), []
    own = [_scores(attack, run, shadows.target(t, scorer)) for t in range(len(shadows))]
    for unit in range(int(units.max()) + 1):
        rest = units != unit
        known = shadows.only(rest)
        judges = torch.stack([_scores(attack, run, known.target(i, scorer)) for i in range(len(known))])
        thresholds.append(_threshold(judges[~truth[rest]].sort(descending=True).values, fpr))
        tick()
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
        return {n: a for n, a in ATTACKS.items() if logits or not n.startswith("RMIA")}
    check.mapping(attacks, "attacks")
    if not attacks:
        raise ValueError("attacks must hold at least one attack, got none; leave it out for the usual ones")
    for attack, run in attacks.items():
        check.callable_with(run, f"attacks[{attack!r}]", ("target",), "a function of a Target")
    return dict(attacks)


def _scores(name: str, run: Attack, target: Target) -> Tensor:
    found = finite_scores(run(target), f"the scores of attacks[{name!r}]").cpu()
    if found.shape != target.inside.shape[1:]:
        raise ValueError(
            f"attacks[{name!r}] must give one score a record, [{target.inside.shape[1]}], got {list(found.shape)}"
        )
    return found


def _threshold(falling: Tensor, fpr: float) -> float:
    """The loosest threshold that at most a share `fpr` of these scores, sorted, reaches."""
    allowed = math.floor(fpr * len(falling) + 1e-9)
    if allowed >= len(falling):
        return -math.inf
    above = int(torch.searchsorted(-falling, -falling[allowed]))  # how many are larger
    return float(falling[above - 1]) if above else math.inf


def _units(inside: Tensor) -> Tensor:
    """The number of the pair that each shadow belongs to, int64 [S]; a shadow without a complement is its own."""
    first: dict[bytes, int] = {}
    units = []
    for row in inside.cpu():
        key, other = (half.numpy().tobytes() for half in (row, ~row))
        units.append(first.setdefault(min(key, other), len(first)))
    return torch.tensor(units)


def _interval(values: Sequence[float], units: Tensor, confidence: float) -> Estimate:
    """Around the mean of values of which those of one unit belong together: the cluster-robust error, Student's t."""
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
    low, high = clopper_pearson(hits, trials, confidence)
    return Estimate(found.value, min(found.low, low), max(found.high, high), confidence)


def _percent(rate: Estimate) -> str:
    return f"{100 * rate.value:.2g} % ({100 * rate.low:.2g} to {100 * rate.high:.2g})"
