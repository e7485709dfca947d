"""Pictures of the pages on attacks and protection."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from _drawing import GREY, LINE_COLOURS, OUT, below, plain, subplots, write
from torch import Tensor, nn

from attacks import roc
from attacks.audit import epsilon_lower_bound, max_lower_bound
from attacks.membership import Pipeline, lira, model_scorer, run_shadows
from attacks.statistics import clopper_pearson
from distillkit.data import load
from distillkit.privacy import gaussian_sigma
from distillkit.rng import derive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = OUT.parent / "results"


def regression() -> Pipeline:
    """A classifier by least squares on half of 400 digits: small enough to be fitted many times."""
    digits = load("digits", size=8).train
    data = digits[:400]

    def fit(indices: Tensor, seed: int) -> dict[str, object]:
        x, y = data.images[indices].flatten(1), torch.eye(10)[data.labels[indices]]
        solution = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(64), x.T @ y)
        linear = nn.utils.skip_init(nn.Linear, 64, 10, bias=False)
        linear.weight.data = 5 * solution.T
        return {"model": model_scorer(nn.Sequential(nn.Flatten(), linear))}

    return Pipeline(fit, *data, tag="least squares, 0.1")


def membership() -> None:
    """What members and others score before and after shadow models are asked, and the curves of both."""
    found = run_shadows(regression(), 128)
    scores: dict[str, list[Tensor]] = {"threshold": [], "LiRA offline": [], "LiRA online": []}
    truth = []
    for number in range(0, 128, 2):
        target = found.target(number, "model")
        truth.append(found.inside[number])
        scores["threshold"].append(target.scores)
        scores["LiRA offline"].append(lira(target.scores, target.inside, target.shadows))
        scores["LiRA online"].append(lira(target.scores, target.inside, target.shadows, online=True))
    member = torch.cat(truth)
    joined = {name: torch.cat(values) for name, values in scores.items()}
    figure, axes = subplots(None, 3, 3.4, 3.1)
    for ax, name in zip(axes, ("threshold", "LiRA online"), strict=False):
        values = joined[name]
        low, high = values.quantile(torch.tensor([0.001, 0.999], dtype=values.dtype)).tolist()
        bins = torch.linspace(low, high, 61).tolist()
        for colour, kind, rows in (
            (LINE_COLOURS[1], "trained on", member),
            (LINE_COLOURS[0], "not trained on", ~member),
        ):
            ax.hist(values[rows].tolist(), bins, color=colour, alpha=0.55, label=kind, density=True)
        ax.set(xlabel="score of a record", ylabel="density", title=f"{name}: scores")
    for colour, (name, values) in zip(LINE_COLOURS[2:], joined.items(), strict=False):
        curve = roc(values, member)
        axes[2].plot(curve.fpr[1:], curve.tpr[1:], color=colour, label=f"{name}, AUC {curve.auc:.2f}")
    axes[2].plot([1e-4, 1], [1e-4, 1], color=GREY, linestyle="--", label="guessing")
    axes[2].axvline(0.01, color=GREY, linewidth=0.6)
    axes[2].set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1), title="what it is worth")
    axes[2].set(xlabel="false positives (share of others)", ylabel="members found (share)")
    for ax in axes:
        ax.title.set_fontsize(10)
        plain(ax)
        below(ax)
    write(figure, "membership")


def audit() -> None:
    """What a lower bound reaches, and which planted mistakes an audit sees."""
    figure, (left, right) = subplots(None, 2, 4.9, 3.8)
    claims = [0.5, 1, 2, 3, 4, 6, 8]
    noise = torch.randn(2, 10_000, generator=derive(0), dtype=torch.float64)
    for runs, colour in ((500, LINE_COLOURS[0]), (10_000, LINE_COLOURS[1])):
        found = []
        for claim in claims:
            sigma = gaussian_sigma(claim, 1e-5)
            found.append(epsilon_lower_bound(1 + sigma * noise[0, :runs], sigma * noise[1, :runs], 1e-5))
        left.plot(claims, found, marker="o", color=colour, label=f"bound of {runs:,} runs")
        left.axhline(max_lower_bound(runs), color=colour, linestyle=":", label=f"most that {runs:,} can say")
    left.plot([0, 8], [0, 8], color=GREY, linestyle="--", label="the claim")
    left.set(xlabel="claimed epsilon at delta 1e-5, which is true", ylabel="epsilon is at least", title="a sound claim")
    mistakes(right)
    for ax in (left, right):
        ax.title.set_fontsize(10)
        plain(ax)
        below(ax)
    write(figure, "audit")


def mistakes(ax: Axes) -> None:
    """How often each planted mistake was refuted, from the records of the page of results."""
    counts: dict[str, list[int]] = {}
    for line in map(json.loads, (RESULTS / "audit.jsonl").read_text(encoding="utf-8").splitlines()[1:]):
        one = line["line"]
        if one["task"].startswith("audit"):
            own = counts.setdefault(one["method"], [0, 0, 0])
            for place, key in enumerate(("refuted", "raw_refuted", "audits")):
                own[place] += one[key]
    places = torch.arange(len(counts))
    for shift, place, name in ((-0.18, 0, "whole profile"), (0.18, 1, "one bound")):
        share = [100 * c[place] / c[2] for c in counts.values()]
        spans = [[100 * end for end in clopper_pearson(c[place], c[2])] for c in counts.values()]
        errors = [[s - low for s, (low, _) in zip(share, spans)], [high - s for s, (_, high) in zip(share, spans)]]
        mark = "o" if place == 0 else "s"
        ax.errorbar(share, places + shift, xerr=errors, fmt=mark, color=LINE_COLOURS[2 + place], capsize=2, label=name)
    ax.set_yticks(places.tolist(), list(counts), fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="audits that refute the claim (%)", xlim=(-4, 104), title="planted mistakes")
