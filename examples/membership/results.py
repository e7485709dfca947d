"""Attacks on the runs of one pipeline. The results are returned as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

from attacks import clopper_pearson
from attacks.membership import SHADOW_ATTACKS, Attack, AttackResult, ShadowScores, Target, leave_one_out, lira

Line = dict[str, Any]
FEW = 16


def fewer(target: Target, **options: Any) -> Tensor:
    """Return LiRA scores computed with only the first few shadow models."""
    return lira(target.scores, target.inside[:FEW], target.shadows[:FEW], **options)


def two_sided(target: Target) -> Tensor:
    """Return offline LiRA scores as in several public versions, in which unusually low scores also indicate members."""
    mean = (target.shadows * ~target.inside).sum(0) / (~target.inside).sum(0)
    return (target.scores - mean).abs()  # in the order of the density, as all records have one variance


MODEL: Mapping[str, Attack] = {
    **SHADOW_ATTACKS,
    "LiRA offline, per example": lambda t: lira(t.scores, t.inside, t.shadows, variance="example"),
    "LiRA online, per example": lambda t: lira(t.scores, t.inside, t.shadows, online=True, variance="example"),
}
CHOICES: Mapping[str, Attack] = {
    "LiRA offline, one-sided": SHADOW_ATTACKS["LiRA offline"],
    "LiRA offline, two-sided": two_sided,
    f"LiRA offline, pooled, {FEW} shadows": fewer,
    f"LiRA offline, per example, {FEW} shadows": lambda t: fewer(t, variance="example"),
    f"LiRA online, pooled, {FEW} shadows": lambda t: fewer(t, online=True),
    f"LiRA online, per example, {FEW} shadows": lambda t: fewer(t, online=True, variance="example"),
}


def share(called: Tensor, of: Tensor) -> list[float]:
    """Return the mean share of the records `of` that the attack calls members, with a 95 % interval.

    Both arguments are bool [S, N], for S runs and N records. The interval is computed over pairs of runs on
    complementary halves, and widened to contain the Clopper-Pearson interval of all runs together.
    """
    pairs = ((called & of).sum(1) / of.sum(1)).double().view(-1, 2).mean(1)
    half = float(student.isf(0.025, len(pairs) - 1)) * float(pairs.std()) / len(pairs) ** 0.5
    low, high = clopper_pearson(int((called & of).sum()), int(of.sum()))
    mean = float(pairs.mean())
    return [mean, max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))]


def result_lines(row: str, found: ShadowScores, facts: Line) -> list[Line]:
    """Return the results of the attacks on the runs of one pipeline, one line per attack."""

    def line(kind: str, attack: str, result: AttackResult, **more: Any) -> Line:
        rates = {name: (r := getattr(result, name)) and [r.value, r.low, r.high] for name in ("tpr", "fpr", "auc")}
        return {"row": row, "kind": kind, "attack": attack, **rates, "few": result.few, **facts, **more}

    facts = {**facts, "accuracy": float((found.population["margin"] > 0).double().mean())}
    lines = [line("model", name, result) for name, result in leave_one_out(found, MODEL).items()]
    if row == "raw" and len(found) >= FEW + 4:
        lines += [line("choice", name, result) for name, result in leave_one_out(found, CHOICES).items()]
    for name in ("nearest", "distance"):
        if name not in found.scores:
            continue
        [result] = leave_one_out(found, {name: lambda t: t.scores}, scorer=name, also_tried=1).values()
        groups: Line | None = None
        if "started" in found.scores:
            started = found.scores["started"] > 0
            called = found.scores[name] >= torch.tensor([p.threshold for p in result.points])[:, None]
            rest = found.inside & ~started
            groups = {"share": float(started.sum() / found.inside.sum())}
            groups |= {"tpr": share(called, started), "rest": share(called, rest)}
        lines.append(line("set", name, result, started=groups))
    return lines
