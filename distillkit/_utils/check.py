"""Argument checks. Each error message contains the name of the argument, its value and the expected values."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distillkit._utils.devices import is_accelerator

T = TypeVar("T")


def batch_of_images(images: Tensor, name: str = "images", *, values: bool = True) -> Tensor:
    """Check that `images` is a non-empty, finite floating-point batch [N, C, H, W] and return it.

    With `values=False`, the values are not read: the batch may be empty, and NaN is not noticed.
    """
    if not isinstance(images, Tensor):
        hint = f"; {images.read_hint()}" if hasattr(images, "read_hint") else ""
        raise TypeError(f"{name} must be a torch.Tensor [N, C, H, W], got {type(images).__name__}{hint}")
    if values:
        has_values(images, name)
    if not images.is_floating_point():
        raise TypeError(
            f"{name} must be floating point, got {images.dtype}; uint8 pixels become floats with "
            "`images.float() / 255`, then normalize"
        )
    if images.ndim != 4:
        raise ValueError(f"{name} must have 4 dimensions [N, C, H, W], got shape {list(images.shape)}")
    if not values:
        return images
    if 0 in images.shape:
        raise ValueError(f"{name} must not be empty, got shape {list(images.shape)}")
    if not bool(torch.isfinite(torch.stack(images.detach().aminmax())).all()):  # extremes propagate NaN
        bad = (~torch.isfinite(images.detach().flatten(1)).all(1)).nonzero().flatten()
        raise ValueError(
            f"{name} must be finite, but {len(bad)} of {len(images)} images hold NaN or Inf (first: {int(bad[0])})"
        )
    return images


def class_labels(
    labels: Tensor, count: int | None, num_classes: int | None, name: str = "labels", *, step: bool = False
) -> Tensor:
    """Check that `labels` are class indices and return them as int64 [N].

    With `step`, for losses in a loop, the values are not read on an accelerator, which would wait for it.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [N] of class indices, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"{name} must be class indices of an integer dtype, got {labels.dtype}")
    labels = has_values(labels, name)
    if labels.ndim != 1:
        raise ValueError(f"{name} must have one dimension [N], got shape {list(labels.shape)}")
    if count is not None and len(labels) != count:
        raise ValueError(f"{name} must have one entry per image: got {len(labels)} for {count} images")
    if num_classes is not None:
        num_classes = positive_int(num_classes, "num_classes", least=0)
    labels = labels.long()
    if step and is_accelerator(labels.device):
        return labels
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name} must be at least 0, got {int(labels.min())}")
    if num_classes is not None and len(labels) and int(labels.max()) >= num_classes:
        raise ValueError(f"{name} must be below num_classes={num_classes}, got {int(labels.max())}")
    return labels


_MOST_CLASSES = 10**6
"""Largest number of classes that is derived from labels: larger ones are ids, and would take all memory."""


def classes_of(labels: Tensor, name: str = "labels") -> int:
    """Return the number of classes that class indices imply: the largest one + 1, or 1 for no labels."""
    largest = int(labels.max()) if len(labels) else 0
    if largest >= _MOST_CLASSES:
        raise ValueError(
            f"{name} must be class indices from 0, got {largest}, which implies {largest + 1} classes; number the "
            "classes, as labels.unique(return_inverse=True)[1] does, or state the number of classes"
        )
    return largest + 1


def matrix(values: Tensor, name: str) -> Tensor:
    """Check that `values` is a finite floating-point tensor [N, d] without empty dimensions and return it."""
    float_tensor(values, name, "[N, d], one row an image")
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"{name} must have two dimensions, none empty, got shape {list(values.shape)}")
    return finite_tensor(values, name)


def bool_tensor(values: Tensor, name: str, shape: str = "") -> Tensor:
    """Check that `values` is a bool tensor and return it."""
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor{f' {shape}' if shape else ''}, got {_came(values)}")
    return has_values(values, name)


def float_tensor(values: Tensor, name: str, shape: str = "") -> Tensor:
    """Check that `values` is a floating-point tensor and return it. NaN and infinity are allowed."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor{f' {shape}' if shape else ''}, got {_came(values)}")
    return has_values(values, name)


def finite_tensor(values: Tensor, name: str, shape: str = "", remedy: str = "") -> Tensor:
    """Check that `values` is a floating-point tensor without NaN and infinity, and return it."""
    bad = ~torch.isfinite(float_tensor(values, name, shape).detach())
    if bool(bad.any()):
        advice = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} must be finite, but {int(bad.sum())} of {bad.numel()} values are not{advice}")
    return values


def _came(values: object) -> str:
    return str(values.dtype) if isinstance(values, Tensor) else type(values).__name__


def positive_int(value: int, name: str, least: int = 1, most: int | None = None) -> int:
    """Check that `value` is an integer (no bool) in [`least`, `most`], by default a positive one, and return it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    value = int(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    most = 2**63 - 1 if most is None else most
    if value > most:
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
    """Check that `value` is a finite number within bounds and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        remedy = "; convert it with float()" if isinstance(value, Real) and not isinstance(value, bool) else ""
        raise TypeError(f"{name} must be a number, got {type(value).__name__}{remedy}")
    try:
        value = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got a number beyond 1e308") from None
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
    return value


def learning_rate(value: float, name: str = "lr") -> float:
    """Check that `value` is a learning rate and return it as a float. Adam's first step is 10 times as large."""
    value = real_number(value, name, above=0.0)
    if value > 1e37:
        raise ValueError(f"{name} must be at most 1e37, whose steps float32 can hold, got {value:g}")
    return value


def temperature(value: float, name: str = "temperature") -> float:
    """Check that `value` is a softmax temperature, of at least 1e-6 so that logits stay finite, and return it."""
    return real_number(value, name, least=1e-6)


def one_of(value: T, name: str, allowed: Collection[T]) -> T:
    """Check that `value` is one of the allowed values and return it."""
    same_kind = [a for a in allowed if isinstance(a, bool) == isinstance(value, bool)]  # True is not 1
    if not isinstance(value, Hashable) or value not in same_kind:
        raise ValueError(f"{name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")
    return value


def boolean(value: bool, name: str) -> bool:
    """Check that `value` is True or False and return it. Truthy values such as the string "no" are refused."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def instance(value: T, kind: Any, name: str, wanted: str) -> T:
    """Check that `value` is an instance of `kind` and return it."""
    if not isinstance(value, kind):
        came = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be {wanted}, got {came}")
    return value


def path(value: str | os.PathLike[str], name: str) -> Path:
    """Check that `value` is a path, and return it with `~` replaced by the home folder."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be a path, as a string or a pathlib.Path, got {type(value).__name__}")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ValueError(f"{name} must be the path of a file or folder, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} must begin with a known user's folder, got {text!r}") from error


def folder(value: str | os.PathLike[str], name: str) -> Path:
    """Check that `value` is the path of a folder, which need not exist, and return it (see `path`)."""
    found = path(value, name)
    if (file := next((one for one in (found, *found.parents) if one.is_file()), None)) is not None:
        raise NotADirectoryError(f"{name} must be a folder, but {file} is a file; give another path")
    return found


def mapping(values: Mapping[str, T], name: str) -> Mapping[str, T]:
    """Check that `values` is a mapping with string keys and return it."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must map names to values, got {type(values).__name__}")
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{name} must have strings as names, got {wrong[0]!r}")
    return values


def sequence(values: Sequence[T], name: str, wanted: str, count: int | None = None) -> tuple[T, ...]:
    """Check that `values` is a list, tuple, range or array and return it as a tuple."""
    single = isinstance(values, str) or (isinstance(values, Tensor | np.ndarray) and not values.ndim)
    if not isinstance(values, Sequence | Tensor | np.ndarray) or single:
        raise TypeError(f"{name} must be a list of {wanted}, got {type(values).__name__}")
    if count is not None and len(values) != count:
        raise ValueError(f"{name} must be {count} {wanted}, got {len(values)}")
    return tuple(values)


def differentiable(result: Tensor, name: str, inputs: str) -> Tensor:
    """Check that a result has a gradient and return it."""
    if not result.requires_grad:
        raise ValueError(
            f"{name} must be differentiable with respect to {inputs}, but its result has no gradient; remove detach "
            "and torch.no_grad from its code, leave torch.no_grad and torch.inference_mode, and check requires_grad"
        )
    return result


def converged(images: Tensor, options: str) -> Tensor:
    """Check that an optimization gave finite images and return them."""
    return finite(images, "the optimized images", f"the optimization diverged; lower {options}")


def finite(result: Tensor, name: str, remedy: str) -> Tensor:
    """Check that a computed result is finite and return it."""
    if not bool(torch.isfinite(result).all()):
        raise FloatingPointError(f"NaN or Inf in {name}: {remedy}")
    return result


def default_device() -> None:
    """Refuse the default device "meta" of PyTorch, on which new tensors have no values."""
    if torch.get_default_device().type == "meta":
        raise ValueError("PyTorch's default device must hold values, got 'meta'; use torch.set_default_device('cpu')")


def has_values(tensor: Tensor, name: str) -> Tensor:
    """Check that a tensor is dense and has values, as tensors on the device "meta" do not, and return it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        came = "a nested tensor" if tensor.is_nested else f"one of the layout {tensor.layout}"
        raise ValueError(f"{name} must be a dense tensor, got {came}; convert it with to_dense() or torch.stack")
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} must have values, got a tensor on the device 'meta'; move it to 'cpu' or 'cuda' first"
        )
    return tensor


def with_values(network: nn.Module, words: str = "network must be one") -> nn.Module:
    """Check that no parameter of a network is lazy, as in `nn.LazyLinear`, or on the device "meta", and return it."""
    if lazy := [name for name, parameter in network.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"{words} whose shapes are known, but {lazy[0]} is lazy: give the layer its input size, or call the "
            "network on an image first"
        )
    if any(parameter.device.type == "meta" for parameter in network.parameters()):
        raise ValueError(f"{words} with values, but its parameters are on the device 'meta'; build it on 'cpu'")
    return network


def device(value: torch.device | str, name: str = "device") -> torch.device:
    """Check that a device exists on this machine and return it. "auto" is the accelerator, or the CPU without one."""
    if not isinstance(value, str | torch.device):
        words = "a torch.device or a name such as 'auto', 'cpu' or 'cuda'"
        raise TypeError(f"{name} must be {words}, got {type(value).__name__}")
    if value == "auto":
        value = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        found = torch.device(value)
        torch.zeros((), device=found).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"{name} must be one that this machine has, got {str(value)!r}: {first}") from error
    return found


def callable_with(value: T, name: str, arguments: Sequence[str], example: str, *, classes: bool = False) -> T:
    """Check that `value` can be called with the given positional arguments and return it."""
    wanted = f"{name} is called as {name}({', '.join(arguments)}); give {example}"
    if not callable(value):
        raise TypeError(f"{wanted}, got {type(value).__name__}")
    if inspect.isclass(value) and not classes:
        raise TypeError(f"{wanted}, got the class {value.__name__} itself")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some C functions have no signature
        return value
    try:
        signature.bind(*([None] * len(arguments)))
    except TypeError as error:
        raise TypeError(f"{wanted}, got {_function_name(value)}, which takes {signature}") from error
    return value


def accepts(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Check that a function has the options that an argument `name` maps to values."""
    try:
        inspect.signature(function).bind_partial(**options)
    except TypeError as error:
        raise TypeError(f"{name} must be options of {_function_name(function)}: {error}") from error


def _function_name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))
