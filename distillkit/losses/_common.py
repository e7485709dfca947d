"""Helpers for loss functions: input checks, reductions, and norms with finite gradients at zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check

Reduction = Literal["mean", "sum", "none"]


def require_float(value: Tensor, name: str, shape: str) -> Tensor:
    """Check that `value` is a non-empty floating-point tensor with the right number of dimensions, and return it.

    `shape` describes the dimensions as text, such as "N, d". The values are not checked, because reading them would
    synchronize with the GPU. If inputs are NaN, the loss is NaN.

    Raises:
        TypeError: `value` is not a tensor, or not floating point.
        ValueError: the number of dimensions is wrong, or the tensor is empty.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [{shape}], got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    check.has_values(value, name)
    wanted = len(shape.split(","))
    if value.ndim != wanted:
        raise ValueError(f"{name} must have {wanted} dimensions [{shape}], got shape {list(value.shape)}")
    if value.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {list(value.shape)}")
    return value


def require_same_shape(first: Tensor, second: Tensor, names: tuple[str, str], shape: str) -> None:
    """Check that two tensors are valid inputs of a loss (see `require_float`) and have the same shape.

    `names` are the names of the two arguments in error messages, and `shape` describes the dimensions as text.

    Raises:
        TypeError, ValueError: a tensor is invalid, or the shapes or the devices differ.
    """
    require_float(first, names[0], shape)
    require_float(second, names[1], shape)
    if first.device != second.device:
        raise ValueError(f"{names[0]} and {names[1]} must be on one device, got {first.device} and {second.device}")
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same shape, got {list(first.shape)} and {list(second.shape)}"
        )


def pair_tensors(
    first: Iterable[Tensor], second: Iterable[Tensor], names: tuple[str, str]
) -> list[tuple[Tensor, Tensor]]:
    """Check two sequences with one tensor per network parameter, and return a list of pairs.

    `names` are the names of the two arguments in error messages.

    Raises:
        TypeError: a value is not a floating-point tensor, such as the gradient None of an unused parameter.
        ValueError: the sequences are empty, or differ in length or in the shapes or devices of their tensors.
    """
    for name, values in zip(names, (first, second)):
        if not isinstance(values, Iterable):
            raise TypeError(f"{name} must be tensors, one per network parameter, got {type(values).__name__}")
    ours, theirs = list(first), list(second)
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{names[0]} and {names[1]} must have equal lengths > 0, got {len(ours)} and {len(theirs)}")
    for i, pair in enumerate(zip(ours, theirs)):
        for name, value in zip(names, pair):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{name}[{i}] must be a floating torch.Tensor, got {kind}")
            check.has_values(value, f"{name}[{i}]")
        if pair[0].device != pair[1].device:
            devices = [str(value.device) for value in pair]
            raise ValueError(f"{names[0]}[{i}] is on {devices[0]}, {names[1]}[{i}] on {devices[1]}; move one of them")
        if pair[0].shape != pair[1].shape:
            shapes = [list(value.shape) for value in pair]
            raise ValueError(f"{names[0]}[{i}] has shape {shapes[0]}, {names[1]}[{i}] has {shapes[1]}")
    return list(zip(ours, theirs))


def reduce(values: Tensor, reduction: Reduction) -> Tensor:
    """Reduce per-sample values to their mean or sum, or return them unchanged ("none").

    Raises:
        ValueError: `reduction` is unknown.
    """
    check.one_of(reduction, "reduction", ("mean", "sum", "none"))
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def at_least_float32(rows: Tensor) -> Tensor:
    """Convert half-precision rows to float32. Other rows are returned unchanged."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def row_norms(rows: Tensor) -> Tensor:
    """Return the L2 norms [N] of rows [N, d]. At a zero row, all derivatives are zero instead of NaN."""
    squared = rows.square().sum(1)
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)


def unit_rows(rows: Tensor) -> Tensor:
    """Divide each row by its L2 norm. A zero row is returned unchanged, with a finite gradient."""
    norms = row_norms(rows)
    return rows / torch.where(norms > 0, norms, 1).unsqueeze(1)
