"""Extension of searches whose best value lies at the edge, by equally many configurations for all candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distillkit._utils import check
from distillkit.study._tuning import best_configuration
from distillkit.study.candidate import Candidate

__all__ = ["check_extend", "extend_searches"]

Search = Mapping[tuple[str, str], Sequence[Any]]


def check_extend(extend: Mapping[str, int], candidates: Mapping[str, Candidate]) -> dict[str, int]:
    """Check that every candidate searches the settings to extend.

    Args:
        extend: largest number of extensions, by name of the setting.
        candidates: candidates by name.

    Raises:
        TypeError, ValueError: a number is not positive, or a candidate does not search at least two positive values of
            a setting, one of them a float.
    """
    for setting, times in check.mapping(extend, "extend").items():
        check.positive_int(times, f"extend[{setting!r}]")
        for name, candidate in ((n, c) for n, c in candidates.items() if c.like is None):
            values = {one.get(setting) for one in candidate.configurations()}
            positive = all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)
            if not positive or len(values) < 2 or not any(isinstance(v, float) for v in values):
                raise ValueError(
                    f"extend needs at least two positive values of {setting!r} in every search, written as 0.1 or 1.0; "
                    f"candidates[{name!r}] searches {sorted(values, key=str)}"
                )
    return dict(extend)


def extend_searches(
    extend: Mapping[str, int], runs: Search, scores: Search, step: int
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return additional configurations for each task on which a candidate's best value lies at the edge.

    For each such setting and edge, every candidate gets one configuration: its best configuration so far, with the next
    value beyond the edge of its own search. The ratio of the next value to the outermost value is that of the two
    outermost values, and the result is rounded to three digits. Candidates with equal values thus keep equal values.

    Args:
        extend: largest number of extensions, by name of the setting.
        runs: tuning runs of each configuration, by task and candidate.
        scores: results of `score_configuration` for each configuration, by task and candidate.
        step: number of earlier extensions.

    Returns:
        Configurations by task and candidate, equally many for all candidates; empty if no search is to be extended.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for task in dict.fromkeys(task for task, _ in runs):
        tried = {key: [specs[0].settings for specs in search] for key, search in runs.items() if key[0] == task}
        best = {key: settings[_best(key, scores)] for key, settings in tried.items()}
        for setting in (name for name, times in extend.items() if step < times):
            values = {key: sorted({one[setting] for one in settings}) for key, settings in tried.items()}
            for edge, inner in ((0, 1), (-1, -2)):
                if any(best[key][setting] == values[key][edge] for key in tried):
                    for key in tried:
                        beyond = _beyond(values[key][edge], values[key][inner])
                        found.setdefault(key, []).append({**best[key], setting: beyond})
    return found


def _best(key: tuple[str, str], scores: Search) -> int:
    return best_configuration(scores[key], f"candidates[{key[1]!r}] on {key[0]}")


def _beyond(outer: float, inner: float) -> float:
    """Return the next value after `outer` in the same ratio, rounded to three digits if this keeps the order."""
    exact = outer * (outer / inner)
    rounded = float(f"{exact:.3g}")
    return rounded if (rounded - outer) * (outer - inner) > 0 else exact
