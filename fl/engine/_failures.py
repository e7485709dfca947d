"""Whose fault a failure is, and where: the words for the history."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

import distillkit

__all__ = ["RequestError", "reason_of"]

_ENGINE = Path(__file__).parent
_LIBRARIES = (
    _ENGINE.parent,
    Path(distillkit.__file__).parent,
    Path(torch.__file__).parents[1],
    Path(sysconfig.get_path("stdlib")),
)


class RequestError(RuntimeError):
    """The method could not say what a client is to be told; the error is its cause."""


def reason_of(error: Exception) -> str:
    """Why a client has no usable answer: what was raised, by whom, and where in the method's code.

    Args:
        error: what came up while the client was told something or worked.
    """
    if isinstance(error, RequestError) and isinstance(error.__cause__, Exception):
        return f"was told nothing, for the server's send {reason_of(error.__cause__)}"
    return f"raised {type(error).__name__}: {error}{_where(error)}"


def _where(error: Exception) -> str:
    """The last line of the author's own that the error passed, or else of a library outside of this engine."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(_ENGINE)]
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(place) for place in _LIBRARIES)]
    shown = own or frames
    return f" (line {shown[-1].lineno} of {Path(shown[-1].filename).name}, in {shown[-1].name})" if shown else ""
