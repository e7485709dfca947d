"""Ends of Clopper-Pearson intervals for arrays of counts; `statistics.clopper_pearson` is the public function."""

from __future__ import annotations

from typing import Any

__all__ = ["lower", "upper"]


def lower(hits: Any, trials: int, error: float) -> Any:
    """Return the lower end. The true share is below it with probability at most `error`. It is 0 without hits.

    Args:
        hits: number of hits, as a NumPy array or a number.
        trials: number of trials.
        error: error probability of this end alone.
    """
    import numpy as np
    from scipy.special import betaincinv

    return np.where(hits == 0, 0.0, betaincinv(np.maximum(hits, 1), trials - hits + 1, error))


def upper(hits: Any, trials: int, error: float) -> Any:
    """Return the upper end. The true share is above it with probability at most `error`. It is 1 if all trials hit.

    Args:
        hits, trials, error: arguments as in `lower`.
    """
    return 1 - lower(trials - hits, trials, error)
