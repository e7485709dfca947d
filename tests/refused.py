"""Check of one call that must be refused, in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["refused"]


def refused(call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...], words: str) -> None:
    """Assert that `call()` raises the error, and that its message matches the regular expression `words`."""
    with pytest.raises(error, match=words):
        call()
