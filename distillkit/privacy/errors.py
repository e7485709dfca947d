"""Errors of the privacy components, with one type for each reason.

All errors derive from `PrivacyError`, so that one `except` catches them. Every check that is possible before a run is
made before anything is charged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "BatchStatistics",
    "BudgetExhausted",
    "NotAccountable",
    "NotCapturable",
    "NotSeparable",
    "PrivacyError",
    "PrivateInitialization",
    "PrivateStatistics",
]


class PrivacyError(ValueError):
    """A request that would void a privacy guarantee or cannot be accounted for; the message gives the remedy."""


class BudgetExhausted(PrivacyError):
    """The next release would exceed the ledger's budget; nothing was released and nothing was charged.

    Args:
        message: error message that names the refused charge and its client.
        remaining: number of the event's releases that the budget still allows.

    Attributes:
        remaining: number of the event's releases that the budget still allows.
    """

    def __init__(self, message: str, *, remaining: int) -> None:
        super().__init__(message)
        self.remaining = remaining

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), remaining=self.remaining), self.args, vars(self)


class NotAccountable(PrivacyError):
    """No accountant gives a sound epsilon: unsupported sampling, mixed relations or too large a delta."""


class NotCapturable(PrivacyError):
    """The network, loss or augmentation is not a fixed function of one record, so it would run user code on records."""


class NotSeparable(PrivacyError):
    """The loss is not a sum over real examples, so clipping cannot bound the contribution of one example."""


class BatchStatistics(PrivacyError):
    """The network or augmentation mixes the examples of a batch, as batch norm does."""


class PrivateStatistics(PrivacyError):
    """A statistic of the private data, such as the mean pixel, would enter the release without noise."""


class PrivateInitialization(PrivacyError):
    """A released set would start from private images, which stay visible however much noise is added later."""
