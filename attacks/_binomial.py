"""The ends of Clopper and Pearson's interval for many counts at once; `stats.clopper_pearson` is the public one."""

from __future__ import annotations

from typing import Any

__all__ = ["lower", "upper"]


def lower(hits: Any, trials: int, error: float) -> Any:
    """Below which the true share lies with probability `error` at most; 0 where nothing was hit.

    Args:
        hits: counts, a NumPy array or a number.
        trials: of how many.
        error: of this end alone.
    """
    import numpy as np
    from scipy.special import betaincinv

    return np.where(hits == 0, 0.0, betaincinv(np.maximum(hits, 1), trials - hits + 1, error))


def upper(hits: Any, trials: int, error: float) -> Any:
    """Above which the true share lies with probability `error` at most; 1 where all were hit.

    Args:
        hits, trials, error: as for `lower`.
    """
    return 1 - lower(trials - hits, trials, error)
