"""Checks of delta."""

from __future__ import annotations

from distillkit._utils import check
from distillkit.privacy.errors import NotAccountable

__all__ = ["check_delta", "refuse_large_delta"]


def check_delta(delta: float) -> float:
    """Return `delta` if it is in (0, 1).

    Raises:
        NotAccountable: it is outside (0, 1), where no accountant applies.
        TypeError: it is not a number.
    """
    check.real_number(delta, "delta")
    if not 0 < delta < 1:
        raise NotAccountable(f"delta must be in (0, 1), well below one over the number of records, got {delta:g}")
    return float(delta)


def refuse_large_delta(size: float, delta: float) -> None:
    """Refuse a delta at which even publishing a random record would count as private.

    Args:
        size: a *public* number of records; 0 skips the check.
        delta: must be below 1 / size.

    Raises:
        NotAccountable: delta is at least 1 / size.
    """
    if size and delta >= 1 / size:
        raise NotAccountable(
            f"delta must be below one over the number of records (1/{size:g}), got {delta:g}: at that delta even "
            "publishing a random record passes"
        )
