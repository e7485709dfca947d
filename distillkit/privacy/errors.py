"""What the privacy components refuse, one type for each reason.

All are `PrivacyError`, so that one `except` catches them. What can be known before a run is refused before anything is
charged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "BatchStatistics",
    "BudgetExhausted",
    "NotAccountable",
    "NotSeparable",
    "PrivacyError",
    "PrivateInitialization",
    "PrivateStatistics",
]


class PrivacyError(ValueError):
    """A request that would void a privacy guarantee, or that cannot be accounted for; the message gives the remedy."""


class BudgetExhausted(PrivacyError):
    """The next release would exceed the ledger's budget; nothing was released and nothing was charged.

    Args:
        message: what would have been spent, and by whom.
        remaining: as the attribute.

    Attributes:
        remaining: how many of the event's repetitions the budget still allows.
    """

    def __init__(self, message: str, *, remaining: int) -> None:
        super().__init__(message)
        self.remaining = remaining

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), remaining=self.remaining), self.args, vars(self)


class NotAccountable(PrivacyError):
    """No accountant here gives a sound epsilon for what was asked: odd sampling, mixed relations, a delta too large."""


class NotSeparable(PrivacyError):
    """The loss is not a sum over real examples, so a single example has no contribution that a clip could bound."""


class BatchStatistics(PrivacyError):
    """The network or augmentation mixes the examples of a batch, as batch norm does: none has a share of its own."""


class PrivateStatistics(PrivacyError):
    """A number that was measured on the private data, as their mean pixel, would enter the release without noise."""


class PrivateInitialization(PrivacyError):
    """Private images would be the starting point of a set that is released, and show in it whatever is added later."""
