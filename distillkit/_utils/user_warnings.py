"""Warnings that point to the user's code, and a way to silence them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OURS = ("distillkit.", "fl.", "attacks.")
_silent: ContextVar[bool] = ContextVar("silent", default=False)
_given: ContextVar[set[str] | None] = ContextVar("given", default=None)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the first stack frame outside this project's packages."""
    given = _given.get()
    if _silent.get() or (given is not None and message in given):
        return
    if given is not None:
        given.add(message)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence `warn` in this thread during a `with` block. Use it for code that uses unusual values on purpose."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextmanager
def each_warning_once() -> Iterator[bool]:
    """Give each warning once in this thread during a `with` block, which may call other functions of the library.

    The value of the block is True in the outermost block only. The functions inside need not repeat its checks.
    """
    if _given.get() is not None:
        yield False
        return
    token = _given.set(set())
    try:
        yield True
    finally:
        _given.reset(token)
