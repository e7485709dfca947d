"""Extension of the searches of a study whose best value is the smallest or largest searched value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distillkit.study import Study

Search = Sequence[Mapping[str, Any]]


def extended(study: Study, limits: Mapping[str, int], **options: Any) -> Study | None:
    """Tune a study, extend its searches, and return the study with the longer searches.

    If some candidate's best value of a setting is its smallest or largest searched value, every candidate gets its best
    configuration with the next value of the geometric sequence: after 0.03 and 0.1, the next value is 0.333. The study
    must have one task if `limits` is not empty.

    Args:
        study: the study, whose folder may contain finished runs.
        limits: largest number of extensions, by setting.
        options: options of `Study.tune`.

    Returns:
        The study; None if its time ended before all tuning runs were finished.
    """
    for step in range(max(limits.values(), default=0) + 1):
        tuned = study.tune(**options)
        if not tuned:
            return None
        design = study.design
        found = {t.method: (design.candidates[t.method].search, t.chosen) for t in tuned if t.chosen is not None}
        settings = [name for name, times in limits.items() if step < times]
        more = [values for name in settings for values in _further(found, name)]
        if not more:
            break
        candidates = {
            name: replace(one, search=[*one.search, *(added[name] for added in more)]) if name in found else one
            for name, one in design.candidates.items()
        }
        study = Study(
            study.out, [*design.tasks.values()], candidates, seeds=design.seeds, tune_seeds=design.tune_seeds,
            rule=study.rule, late_rounds=study.late_rounds,
        )  # fmt: skip
    return study


def _further(found: Mapping[str, tuple[Search, int]], setting: str) -> list[dict[str, dict[str, Any]]]:
    """Return one more configuration per candidate for each end of the range at which some best value is."""
    values = {name: sorted({one[setting] for one in search}) for name, (search, _) in found.items()}
    best = {name: search[chosen] for name, (search, chosen) in found.items()}
    return [
        {name: {**best[name], setting: beyond(values[name][edge], values[name][inner])} for name in found}
        for edge, inner in ((0, 1), (-1, -2))
        if any(best[name][setting] == values[name][edge] for name in found)
    ]


def beyond(outer: float, inner: float) -> float:
    """Return the value that follows `inner` and `outer` in a geometric sequence, with three significant digits."""
    exact = outer * (outer / inner)
    rounded = float(f"{exact:.3g}")
    return rounded if (rounded - outer) * (outer - inner) > 0 else exact
