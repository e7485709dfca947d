"""Conversion of an entry's value to one vector, and clipping of its norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fl.message import Tensors, Value

__all__ = ["clipped", "group", "like"]


def group(value: Value) -> Tensors:
    """Return the tensors of a number, a tensor or a group, by name, in float64."""
    if isinstance(value, dict):
        return {n: t.detach().double() for n, t in value.items()}
    return {"": value.detach().double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)}


def like(tensors: Tensors, value: Value) -> Any:
    """Return the tensors in the form of `value`."""
    if isinstance(value, dict):
        return {n: t.to(value[n].dtype) for n, t in tensors.items()}
    return tensors[""].to(value.dtype) if isinstance(value, Tensor) else float(tensors[""])


def clipped(value: Value, most: float) -> tuple[Any, bool]:
    """Scale a value, as one vector, to norm at most `most`; return it, and whether its norm was within the limit.

    A value that is not finite is replaced by zeros.
    """
    vector = group(value)
    norm = math.sqrt(sum(float(t.square().sum()) for t in vector.values()))
    if norm <= most:
        return value, True
    finite = math.isfinite(norm)
    return like({n: t * (most / norm) if finite else torch.zeros_like(t) for n, t in vector.items()}, value), False
