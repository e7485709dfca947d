"""Former names of functions and arguments, which work for a while and warn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from distillkit._utils.user_warnings import warn

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _warn_once(old: str, new: str, removal: str) -> None:
    warn(f"{old} is deprecated and will be removed in distillkit {removal}; use {new}", FutureWarning)


def renamed(old: str, function: Callable[P, R], *, removal: str) -> Callable[P, R]:
    """Return the function under its former name `old`. The first call warns and names the release of the removal."""

    @functools.wraps(function)
    def former(*args: P.args, **kwargs: P.kwargs) -> R:
        _warn_once(old, function.__qualname__, removal)
        return function(*args, **kwargs)

    former.__name__ = former.__qualname__ = old
    return former


def renamed_argument(old: str, new: str, *, removal: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that also takes the keyword `old` for its parameter `new`, and warns once.

    Its signature has the new name only. A call with both names raises a TypeError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                value = kwargs.pop(old)
                where = function.__qualname__
                if new in inspect.signature(function).bind_partial(*args, **kwargs).arguments:
                    raise TypeError(f"{where} got {new} and its former name {old}; pass {new} only")
                _warn_once(f"{old} of {where}", new, removal)
                kwargs[new] = value
            return function(*args, **kwargs)

        return accepting

    return decorate
