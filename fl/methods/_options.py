"""What a composition of `FedAvg` takes: its own options, and those of `FedAvg` that it leaves open."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fl.averaging import FedAvg

__all__ = ["shows_options"]

Init = TypeVar("Init", bound=Callable[..., None])


def shows_options(*fixed: str) -> Callable[[Init], Init]:
    """Show `FedAvg`'s options in the place of an `__init__`'s `**options`, for `help` and `inspect.signature`.

    Args:
        fixed: the options that the composition sets itself, which nobody can give.
    """

    def show(init: Init) -> Init:
        own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {*fixed, *(p.name for p in own)}
        options: list[Any] = [
            p for p in inspect.signature(FedAvg).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in known
        ]
        init.__signature__ = inspect.Signature([*own, *options], return_annotation=None)  # type: ignore[attr-defined]
        return init

    return show
