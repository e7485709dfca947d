"""Warnings that point to the user's code, and a way to silence them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["warn", "without_warnings"]

_OURS = ("distillkit.", "fl.", "attacks.")
_silent: ContextVar[bool] = ContextVar("silent", default=False)


def warn(message: str) -> None:
    """Issue a `UserWarning` that points to the first stack frame outside this project's packages.

    Args:
        message: description of the problem, and what to do about it.
    """
    if _silent.get():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence `warn` in this thread during a `with` block. Use it for code that uses unusual values on purpose."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
