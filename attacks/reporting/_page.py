"""Sections of a report with what each found, and the sentence that sums them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import pages
from distillkit._utils.pages import Picture, drawn

KINDS = ("claim", "inversion", "images", "shadows", "model", "classes")
"""Kinds of leaks, the most serious first.

They are: a refuted privacy claim, records reconstructed from an update, members recognized from images, members
recognized by attacks with shadow models, members recognized by one threshold on the last model's scores, and disclosed
classes of clients.
"""

_NEGATIVE_ORDER = ("images", "shadows", "inversion", "model", "classes", "claim")
"""Order of attacks that found no leak: the attacks that were most likely to find one come first."""


@dataclass
class Section(pages.Section):
    """Section of a report, with what was found.

    Attributes:
        leaks: leaks, each with its kind (see `KINDS`) and the end of a sentence that begins "This run leaks:".
        negatives: attacks that found no leak, each with its kind and the smallest leak that it would have detected.
        missing: questions that could not be answered, each with the argument of `report` that would allow an answer.
        recovered: text that states the share of private records that are recognizable in the sent images.
    """

    leaks: list[tuple[str, str]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    recovered: str = ""

    def leak(self, kind: str, phrase: str) -> None:
        """Add a leak."""
        self.leaks.append((kind, phrase))


class Findings:
    """Results of all sections, ordered.

    Attributes:
        leaks: leaks, the most serious first.
        not_found: attacks that found no leak, starting with those that were most likely to find one.
        missing: questions that could not be answered.
        verdict: sentence at the head of the report. It states the worst leak, or that none was found, and never that
            the run protects its records.
        other_leaks: the leaks that the verdict does not mention.
    """

    def __init__(self, sections: Sequence[Section], sends_records: bool) -> None:
        leaks = [leak for one in sections for leak in one.leaks]
        negatives = [negative for one in sections for negative in one.negatives]
        self.leaks = tuple(phrase for _, phrase in sorted(leaks, key=lambda one: KINDS.index(one[0])))
        ordered = sorted(negatives, key=lambda one: _NEGATIVE_ORDER.index(one[0]))
        self.not_found = tuple(phrase for _, phrase in ordered)
        self.missing = tuple(question for one in sections for question in one.missing)
        self.other_leaks = self.leaks if sends_records else self.leaks[1:]
        if sends_records:
            shares = "".join(f", and {one.recovered}" for one in sections if one.recovered)
            self.verdict = f"This run sends private records: its images start from real ones{shares}."
        elif leaks:
            self.verdict = f"This run leaks: {self.leaks[0]}."
        elif negatives:
            rest = "smaller leaks and other attacks remain possible"
            self.verdict = f"No leak found at this resolution: {self.not_found[0]}; {rest}."
        else:
            self.verdict = "No verdict yet: no attack on individual records was run (see the last section)."


def histogram(series: Mapping[str, Tensor], caption: str, unit: str, marks: Sequence[int]) -> Picture:
    """Return a picture with the histograms of several groups of values, each drawn as a stepped line.

    Args:
        series: values of each group by name, at most three groups; infinite values are counted in the last bin.
        caption: description of the picture.
        unit: label of the horizontal axis.
        marks: values at which a thin vertical line is drawn.
    """
    from matplotlib.figure import Figure

    finite = torch.cat([v[v.isfinite()] for v in series.values()] + [torch.tensor([10.0, 40.0])])
    low, high = 2 * int(finite.min() // 2), 2 * int(finite.clamp(max=48).max() // 2) + 2
    figure = Figure(figsize=(6.4, 3.4), layout="constrained", dpi=150)
    axes = figure.subplots()
    for (name, values), colour, line in zip(series.items(), ("#c7761a", "#2f6db3", "#6a7480"), ("-", "--", ":")):
        look: dict[str, Any] = {"facecolor": f"{colour}26", "edgecolor": colour, "linestyle": line, "label": name}
        shown, percents = values.clamp(low, high).tolist(), [100 / len(values)] * len(values)
        axes.hist(shown, range(low, high + 1, 2), weights=percents, histtype="stepfilled", **look)
    for mark in marks:
        axes.axvline(mark, color="#b9c0c8", linestyle=(0, (3, 3)), linewidth=1)
    axes.set(xlabel=unit, ylabel="share of the group (%)", xlim=(low, high))
    axes.set_xticks(sorted({*range(-(-low // 10) * 10, high + 1, 10), *marks}))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return drawn(figure, caption)
