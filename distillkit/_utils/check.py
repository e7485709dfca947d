"""Checks at the door: every refusal names the argument, what came and what is wanted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

__all__ = [
    "batch_of_images",
    "bool_tensor",
    "boolean",
    "callable_with",
    "class_labels",
    "device",
    "float_tensor",
    "mapping",
    "matrix",
    "one_of",
    "positive_int",
    "real_number",
    "sequence",
]


def batch_of_images(images: Tensor, name: str = "images") -> Tensor:
    """Return `images` if they are a batch that a component can work on: finite, floating, [N, C, H, W], not empty.

    Args:
        images: what was given.
        name: what the argument is called in the message.

    Raises:
        TypeError: not a tensor, or not floating point.
        ValueError: wrong number of dimensions, an empty dimension, or NaN/Inf values (the first is located).
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [N, C, H, W], got {type(images).__name__}")
    if not images.is_floating_point():
        raise TypeError(
            f"{name} must be floating point, got {images.dtype}; uint8 pixels become floats with "
            "`images.float() / 255`, then normalize"
        )
    if images.ndim != 4:
        raise ValueError(f"{name} must have 4 dimensions [N, C, H, W], got shape {list(images.shape)}")
    if 0 in images.shape:
        raise ValueError(f"{name} must not be empty, got shape {list(images.shape)}")
    if not bool(torch.isfinite(torch.stack(images.detach().aminmax())).all()):  # NaN is the extreme of what holds one
        bad = (~torch.isfinite(images.detach().flatten(1)).all(1)).nonzero().flatten()
        raise ValueError(
            f"{name} must be finite, but {len(bad)} of {len(images)} images hold NaN or Inf (first: {int(bad[0])})"
        )
    return images


def class_labels(labels: Tensor, count: int | None, num_classes: int | None, name: str = "labels") -> Tensor:
    """Return `labels` as int64 [N] if they are class indices.

    Args:
        labels: what was given.
        count: how many there must be; None for any number.
        num_classes: K: an index lies in [0, K); None for no upper bound.
        name: what the argument is called in the message.

    Raises:
        TypeError: not an integer tensor.
        ValueError: wrong shape or length, or an index out of range.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [N] of class indices, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"{name} must be class indices of an integer dtype, got {labels.dtype}")
    if labels.ndim != 1:
        raise ValueError(f"{name} must have one dimension [N], got shape {list(labels.shape)}")
    if count is not None and len(labels) != count:
        raise ValueError(f"{name} must have one entry an image: got {len(labels)} for {count} images")
    if num_classes is not None:
        num_classes = positive_int(num_classes, "num_classes", least=0)
    labels = labels.long()
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name} must be at least 0, got {int(labels.min())}")
    if num_classes is not None and len(labels) and int(labels.max()) >= num_classes:
        raise ValueError(f"{name} must be below num_classes={num_classes}, got {int(labels.max())}")
    return labels


def matrix(values: Tensor, name: str) -> Tensor:
    """Return `values` if they are rows to compute with: finite, floating, [N, d], neither dimension empty.

    Args:
        values: what was given.
        name: what the argument is called in the message.

    Raises:
        TypeError, ValueError: what they are instead.
    """
    float_tensor(values, name, "[N, d], one row an image")
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"{name} must have two dimensions, none empty, got shape {list(values.shape)}")
    if not bool(torch.isfinite(values.detach()).all()):
        raise ValueError(f"{name} must be finite, got NaN or Inf")
    return values


def bool_tensor(values: Tensor, name: str, shape: str = "") -> Tensor:
    """Return `values` if they are a tensor of truth values.

    Args:
        values: what was given.
        name: what the argument is called in the message.
        shape: what is wanted, for the message: "[n]".

    Raises:
        TypeError: no tensor, or one of another dtype.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor{f' {shape}' if shape else ''}, got {_came(values)}")
    return values


def float_tensor(values: Tensor, name: str, shape: str = "") -> Tensor:
    """Return `values` if they are a tensor of floating-point numbers, NaN and infinite ones among them.

    Args:
        values, name, shape: as for `mask`.

    Raises:
        TypeError: no tensor, or one of another kind of numbers.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor{f' {shape}' if shape else ''}, got {_came(values)}")
    return values


def _came(values: object) -> str:
    return str(values.dtype) if isinstance(values, Tensor) else type(values).__name__


def positive_int(value: int, name: str, least: int = 1, most: int | None = None) -> int:
    """Return `value` as an int if it is one in `[least, most]` (by default a positive one).

    Args:
        value: what was given; NumPy's integers are ints, True is none.
        name: what the argument is called in the message.
        least, most: the bounds, which are allowed; None for no upper one.

    Raises:
        TypeError: no integer.
        ValueError: out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    value = int(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value


def real_number(
    value: float,
    name: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value` as a float if it is a finite number within bounds.

    Args:
        value: what was given; NumPy's numbers are numbers, True is none.
        name: what the argument is called in the message.
        least, most: bounds that are allowed themselves.
        above, below: bounds that are not.

    Raises:
        TypeError: no number.
        ValueError: NaN, infinity, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if above is not None and value <= above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value:g}")
    if below is not None and value >= below:
        raise ValueError(f"{name} must be less than {below:g}, got {value:g}")
    if not least <= value <= most:
        if math.isinf(most):
            wanted = f"at least {least:g}"
        else:
            wanted = f"at most {most:g}" if math.isinf(least) else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{name} must be {wanted}, got {value:g}")
    return float(value)


def one_of(value: T, name: str, allowed: Collection[T]) -> T:
    """Return `value` if it is among the words (or numbers) that an option may have.

    Args:
        value: what was given.
        name: what the argument is called in the message.
        allowed: what it may be.

    Raises:
        ValueError: another one; the message lists what is allowed.
    """
    same_kind = [a for a in allowed if isinstance(a, bool) == isinstance(value, bool)]  # True is no 1
    if not isinstance(value, Hashable) or value not in same_kind:
        raise ValueError(f"{name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")
    return value


def boolean(value: bool, name: str) -> bool:
    """Return `value` if it is True or False: a word such as "no" would count as yes.

    Args:
        value: what was given.
        name: what the argument is called in the message.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def mapping(values: Mapping[str, T], name: str) -> Mapping[str, T]:
    """Return `values` if they map names to something.

    Args:
        values: what was given.
        name: what the argument is called in the message.

    Raises:
        TypeError: no mapping.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must map names to values, got {type(values).__name__}")
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{name} must have strings as names, got {wrong[0]!r}")
    return values


def sequence(values: Sequence[T], name: str, wanted: str, count: int | None = None) -> tuple[T, ...]:
    """Return `values` as a tuple if they are a list, a tuple, a range or an array.

    Args:
        values: what was given.
        name: what the argument is called in the message.
        wanted: what they are, for the message: "class indices".
        count: how many there must be; None for any number.

    Raises:
        TypeError: one value alone, a string, or nothing that has an order.
        ValueError: another number of them.
    """
    if not isinstance(values, Sequence | Tensor | np.ndarray) or isinstance(values, str):
        raise TypeError(f"{name} must be a list of {wanted}, got {type(values).__name__}")
    if count is not None and len(values) != count:
        raise ValueError(f"{name} must be {count} {wanted}, got {len(values)}")
    return tuple(values)


def device(value: torch.device | str, name: str = "device") -> torch.device:
    """Return the device of that name, if this machine has it.

    Args:
        value: a name such as "cpu" or "cuda:0", or a device.
        name: what the argument is called in the message.

    Raises:
        TypeError: neither a name nor a device.
        ValueError: no device of that name, or none that can hold a tensor.
    """
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{name} must be a torch.device or a name such as 'cpu' or 'cuda', got {type(value).__name__}")
    try:
        found = torch.device(value)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"{name} must be one that this machine has, got {str(value)!r}: {first}") from error
    return found


def callable_with(value: T, name: str, arguments: Sequence[str], example: str, *, classes: bool = False) -> T:
    """Return `value` if it can be called as a component will call it: with these positional arguments.

    Args:
        value: what was given.
        name: of the argument that it was given for.
        arguments: the names of what it is called with, for the message; their number is what counts.
        example: what to give, as code.
        classes: whether a class is a function too, of its constructor's arguments.

    Raises:
        TypeError: not callable, a class, or a function of other arguments; the message says which are wanted.
    """
    wanted = f"{name} is called as {name}({', '.join(arguments)}); give {example}"
    if not callable(value):
        raise TypeError(f"{wanted}, got {type(value).__name__}")
    if inspect.isclass(value) and not classes:
        raise TypeError(f"{wanted}, got the class {value.__name__} itself")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some functions written in C say nothing of their arguments
        return value
    try:
        signature.bind(*([None] * len(arguments)))
    except TypeError as error:
        raise TypeError(f"{wanted}, got {_function_name(value)}, which takes {signature}") from error
    return value


def _function_name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))
