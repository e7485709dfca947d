"""One-sided Clopper-Pearson bounds on a probability, for arrays of counts.

`attacks.statistics.clopper_pearson` is the public function for a single two-sided interval.
"""

from __future__ import annotations

from typing import Any


def lower(hits: Any, trials: int, error: float) -> Any:
    """Return a lower confidence bound on a probability, after a number of hits in independent trials.

    The true probability is below the bound with probability at most `error`. The bound is 0 if there are no hits.

    Args:
        hits: number of hits, as a NumPy array or a number.
        trials: number of trials.
        error: error probability of this bound, in (0, 1).
    """
    import numpy as np
    from scipy.special import betaincinv

    return np.where(hits == 0, 0.0, betaincinv(np.maximum(hits, 1), trials - hits + 1, error))


def upper(hits: Any, trials: int, error: float) -> Any:
    """Return an upper confidence bound on a probability, after a number of hits in independent trials.

    The true probability is above the bound with probability at most `error`. The bound is 1 if all trials are hits.

    Args:
        hits: number of hits, as a NumPy array or a number.
        trials: number of trials.
        error: error probability of this bound, in (0, 1).
    """
    return 1 - lower(trials - hits, trials, error)
