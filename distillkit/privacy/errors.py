"""What the privacy components refuse, one type for each reason."""

from __future__ import annotations

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
    """A request that would void a privacy guarantee, or that cannot be accounted for."""


class BudgetExhausted(PrivacyError):
    """The next release would exceed the budget; nothing was released and nothing was charged.

    Attributes:
        fits: how many of the event's repetitions the budget still allows.
    """

    def __init__(self, message: str, *, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


class NotAccountable(PrivacyError):
    """No accountant here gives a sound epsilon for this event or mixture of events."""


class NotSeparable(PrivacyError):
    """The loss is not a sum over real examples, so a single example's contribution cannot be bounded."""


class BatchStatistics(PrivacyError):
    """The network or augmentation mixes the examples of a batch, so they have no contribution of their own."""


class PrivateStatistics(PrivacyError):
    """A number that was measured on the private data would enter the release without noise."""


class PrivateInitialization(PrivacyError):
    """Private images would be the starting point of a set that is released."""
