"""Extension of a hyperparameter search, if the best value is the smallest or largest of the searched values.

All candidates (the compared methods) get the same number of additional configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distillkit._utils import check
from distillkit.study._tuning import best_configuration
from distillkit.study.candidate import Candidate

__all__ = ["check_extend", "extend_searches"]

Search = Mapping[tuple[str, str], Sequence[Any]]


def check_extend(extend: Mapping[str, int], candidates: Mapping[str, Candidate]) -> dict[str, int]:
    """Check that every candidate searches at least two values of each setting whose search may be extended.

    An extension adds a value below the smallest or above the largest searched value, as the next value of a geometric
    sequence. The searched values must therefore be positive.

    Args:
        extend: maximum number of extensions, by name of the setting.
        candidates: candidates by name.

    Raises:
        TypeError, ValueError: a maximum in `extend` is not a positive integer, or a candidate does not search at least
            two positive values of a setting, of which at least one is a float.
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
    """Return the configurations to add to the searches on each task.

    The searches on a task are extended if some candidate's best configuration has the smallest or largest searched
    value of a setting. Every candidate then gets one more configuration: its best configuration so far, with a new
    value of this setting below the smallest or above the largest searched value. The new value continues the geometric
    sequence of the two smallest or the two largest searched values: after 0.01, 0.03, 0.1, the new value is 0.333. It
    is rounded to three significant digits. Candidates with the same searched values get the same new value.

    Args:
        extend: maximum number of extensions, by name of the setting.
        runs: tuning runs of each configuration, by task and candidate.
        scores: results of `score_configuration` for each configuration, by task and candidate.
        step: number of extensions that were already made.

    Returns:
        The new configurations, by task and candidate, with the same number for all candidates of a task. Empty if no
        search is extended.
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
    """Return the value that follows `inner` and `outer` in a geometric sequence, `outer` ** 2 / `inner`.

    The result is rounded to three significant digits, unless the rounded value would be equal to `outer` or
    closer to `inner` than `outer` is.
    """
    exact = outer * (outer / inner)
    rounded = float(f"{exact:.3g}")
    return rounded if (rounded - outer) * (outer - inner) > 0 else exact
