"""Calls that compute a share of a larger call, in one of several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_SPLIT: ContextVar[str] = ContextVar("split", default="")


@contextlib.contextmanager
def share_of(name: str) -> Iterator[None]:
    """Mark the calls in a `with` block as a share of a call of the function `name`."""
    before = _SPLIT.set(name)
    try:
        yield
    finally:
        _SPLIT.reset(before)


def require_unsplit(why: str, name: str | None = None) -> None:
    """Refuse a call in a share, of any larger call or of one of the function `name`, which would change its result."""
    if (found := _SPLIT.get()) and name in (None, found):
        raise ValueError(f"{found} cannot split this call, because {why}")
