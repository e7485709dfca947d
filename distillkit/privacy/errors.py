"""Errors of the privacy package, with one exception type for each reason.

All errors derive from `PrivacyError`, so that one `except` catches them. All checks that
are possible before a run take place before any release is recorded in the privacy ledger.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = ["PrivacyError"]


class PrivacyError(ValueError):
    """Error for a request that would void a privacy guarantee, or for which no sound epsilon can be computed.

    The message gives the remedy.
    """


class BudgetExhausted(PrivacyError):
    """Error for a release that would exceed the ledger's budget. Nothing was released and nothing was charged.

    Args:
        message: error message, with the refused charge and its client.
        remaining: number of the requested releases that the budget still allows.
        ledger: ledger that refuses the release.

    Attributes:
        remaining: number of the requested releases that the budget still allows.
    """

    def __init__(self, message: str, *, remaining: int, ledger: object = None) -> None:
        super().__init__(message)
        self.remaining, self._ledger = remaining, None if ledger is None else id(ledger)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), remaining=self.remaining), self.args, vars(self)


class NotAccountable(PrivacyError):
    """Error for releases for which no sound epsilon can be computed.

    Causes are an unsupported kind of sampling, releases with different neighboring relations, or too large a delta.
    """


class NotCapturable(PrivacyError):
    """Error for a network, loss or augmentation that is not a fixed function of one record.

    Such an object can only be evaluated by running the user's code on private records.
    """


class NotSeparable(PrivacyError):
    """Error for a loss that is not a sum over examples, so clipping cannot bound the contribution of one example."""


class BatchStatistics(PrivacyError):
    """Error for a network or augmentation that mixes the examples of a batch, as batch norm does."""


class PrivateStatistics(PrivacyError):
    """Error for a statistic of the private data, such as the mean pixel, that would be released without noise."""


class PrivateInitialization(PrivacyError):
    """Error for a synthetic set that would be released and whose initial images are private.

    The private images would stay visible, however much noise is added later.
    """
