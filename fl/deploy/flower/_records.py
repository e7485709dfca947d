"""Our messages as Flower's records, and back: an array a tensor, with its bytes as they are.

Flower stores arrays in pieces of 5 MB by the hash of their content. So a model that goes to a hundred clients as one
array a tensor is stored once, where a hundred files with a line of their own in front would be stored a hundred times.
Its own arrays are NumPy files, which know no bfloat16; ours are the tensor's bytes, little-endian and in C order, with
the dtype's name in PyTorch.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from fl._codec import Parts
from fl.deploy.flower._import import flower
from fl.message import DTYPES

__all__ = ["LARGEST", "from_records", "to_records"]

LARGEST = 2**30
"""Bytes of the largest message that is read, where nobody says otherwise."""

_RAW = "distillkit.raw/1"
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def to_records(parts: Parts) -> Any:
    """The parts of a message (`fl._codec.to_parts`) as a `flwr.app.RecordDict`.

    Raises:
        MissingFlower: Flower is not installed.
        RuntimeError: this machine is big-endian, and nobody has tried that.
    """
    if sys.byteorder != "little":
        raise RuntimeError("tensors travel in little-endian order, and this machine is big-endian")
    app, (tensors, strings) = flower("app"), parts
    arrays = {
        name: app.Array(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            _RAW,
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
        )
        for name, tensor in tensors.items()
    }
    return app.RecordDict({"tensors": app.ArrayRecord(arrays), "strings": app.ConfigRecord(dict(strings))})


def from_records(content: Any, largest: int = LARGEST) -> Parts:
    """The parts of a message again, from the content of a Flower message, which may come from anywhere.

    Args:
        content: a `flwr.app.RecordDict`.
        largest: bytes of names, strings and tensors beyond which nothing of it is read.

    Raises:
        ValueError: it is too large, or not what `to_records` writes; what is wrong is named. Whether the parts are a
            message is for `fl._codec.from_parts` to say.
    """
    if set(content) != {"tensors", "strings"}:
        raise ValueError(f"not a message of distillkit: its records are {sorted(content)[:5]}")
    strings = dict(content["strings"])
    if not all(isinstance(value, str) for value in strings.values()):
        raise ValueError("not a message of distillkit: its strings hold something else")
    size = sum(len(name) + len(value) for name, value in strings.items())
    size += sum(len(name) + len(array.data) for name, array in content["tensors"].items())
    if size > largest:
        raise ValueError(f"its message has {size} bytes, more than largest_message={largest}: nothing of it was read")
    return {name: _tensor(name, array) for name, array in content["tensors"].items()}, strings


def _tensor(name: str, array: Any) -> torch.Tensor:
    dtype = _NAMES.get(array.dtype)
    if array.stype != _RAW or dtype is None:
        raise ValueError(f"its tensor {name!r} is {array.dtype!r} as {array.stype!r}, which is not read here")
    shape = tuple(array.shape)
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"its tensor {name!r} has the shape {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if len(array.data) != wanted:
        raise ValueError(f"its tensor {name!r} has {len(array.data)} bytes, and {dtype} {shape} takes {wanted}")
    if not wanted:
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError) as error:  # no side is negative, and their product is beyond 64 bits
            raise ValueError(f"its tensor {name!r} has the shape {shape}") from error
    raw = torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
    if dtype is torch.bool and bool((raw > 1).any()):
        raise ValueError(f"its tensor {name!r} holds bytes that are neither true nor false")
    return raw.view(dtype).reshape(shape)
