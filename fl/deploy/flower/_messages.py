"""Conversion of messages to and from Flower's records, and sending of messages over Flower's grid.

Every tensor becomes one array of Flower. Flower identifies arrays by the hash of their content, so a model that is sent
to a hundred clients is stored only once. The usual arrays of Flower contain NumPy files, which do not support bfloat16.
The arrays of this module contain the tensor's bytes instead, little-endian and in C order, with PyTorch's name of the
dtype.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from fl._codec import Parts
from fl.message import DTYPES

MAX_MESSAGE_BYTES = 2**30
"""Default size limit of a received message, in bytes."""

_RAW = "distillkit.raw/1"
_APP_ERRORS = (1, 2, 7)
"""Flower's error codes for an app that cannot be loaded, an app that raises an exception, and an invalid app bundle."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class MissingFlower(ImportError):
    """Error: Flower is not installed. The message says how to install it."""


def flower(module: str) -> Any:
    """Import one of Flower's public modules."""
    try:
        return importlib.import_module(f"flwr.{module}")
    except ImportError as error:
        raise MissingFlower(
            f'runs on Flower need flwr 1.41 or later ({error}): pip install "distillkit[flower]"'
        ) from error


def to_records(parts: Parts) -> Any:
    """Convert the parts of a message (see `fl._codec.to_parts`) to Flower's `RecordDict`."""
    if sys.byteorder != "little":
        raise RuntimeError("tensors are sent in little-endian order, and this machine is big-endian")
    app, (tensors, strings) = flower("app"), parts
    arrays = {}
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        arrays[name] = app.Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _RAW, data)
    return app.RecordDict({"tensors": app.ArrayRecord(arrays), "strings": app.ConfigRecord(dict(strings))})


def from_records(content: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> Parts:
    """Convert the untrusted content of a Flower message to the parts of a message: tensors and strings by name.

    This function only checks Flower's records. `fl._codec.from_parts` then checks the parts, and returns the message.
    """
    if set(content) != {"tensors", "strings"}:
        raise ValueError(f"not a message of distillkit: its records are {sorted(content)[:5]}")
    strings = dict(content["strings"])
    if not all(isinstance(value, str) for value in strings.values()):
        raise ValueError("not a message of distillkit: its record of strings holds other values")
    size = sum(len(name) + len(value) for name, value in strings.items())
    size += sum(len(name) + len(array.data) for name, array in content["tensors"].items())
    if size > max_bytes:
        raise ValueError(f"its message has {size} bytes, more than max_message_bytes={max_bytes}, and was not read")
    return {name: _read_tensor(name, array) for name, array in content["tensors"].items()}, strings


def _read_tensor(name: str, array: Any) -> torch.Tensor:
    dtype = _DTYPES.get(array.dtype)
    if array.stype != _RAW or dtype is None:
        raise ValueError(f"its tensor {name!r} has the unsupported type {array.dtype!r}, format {array.stype!r}")
    shape = tuple(array.shape)
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"its tensor {name!r} has the shape {shape}")
    expected = math.prod(shape) * dtype.itemsize
    if len(array.data) != expected:
        raise ValueError(f"its tensor {name!r} has {len(array.data)} bytes; {dtype} of shape {shape} takes {expected}")
    if not expected:
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError) as error:  # one side is 0, and the product of the other sides exceeds 64 bits
            raise ValueError(f"its tensor {name!r} has the shape {shape}") from error
    raw = torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
    if dtype is torch.bool and bool((raw > 1).any()):
        raise ValueError(f"its tensor {name!r} holds bytes that are neither true nor false")
    return raw.view(dtype).reshape(shape)


class GridConnection:
    """Connection to the nodes over Flower's grid. The connection keeps track of the messages that wait for a reply.

    Args:
        grid: Flower's `Grid` object.
        poll_interval: seconds between two polls for replies.
        max_bytes: size limit of a reply, in bytes.
    """

    def __init__(self, grid: Any, poll_interval: float, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.grid, self.poll_interval, self._max_bytes = grid, poll_interval, max_bytes
        self._pending: dict[str, tuple[int, float]] = {}

    def send(self, kind: str, messages: Mapping[int, tuple[int, Parts]], group: str, seconds: float) -> list[int]:
        """Send messages, and return the recipients whose messages Flower did not accept."""
        message = flower("app").Message
        sent = [
            message(to_records(parts), node, kind, ttl=seconds, group_id=group) for node, parts in messages.values()
        ]
        names = list(self.grid.push_messages(sent))
        refused = []
        for recipient, name in zip(messages, [*names, *[""] * (len(sent) - len(names))]):
            if name:
                self._pending[name] = (recipient, time.monotonic() + seconds)
            else:
                refused.append(recipient)
        return refused

    def collect(self) -> list[tuple[int, Any]]:
        """Return the replies that have arrived since the last call, and the recipients that did not reply in time."""
        found: list[tuple[int, Any]] = []
        for message in self.grid.pull_messages(list(self._pending)):
            recipient, _ = self._pending.pop(message.metadata.reply_to_message_id, (None, 0.0))
            if recipient is not None:
                found.append((recipient, message))
        for name, (recipient, end) in list(self._pending.items()):
            if time.monotonic() > end:
                del self._pending[name]
                found.append((recipient, None))
        if not found:
            time.sleep(self.poll_interval)
        return found

    def read(self, message: Any) -> Parts:
        """Return the parts of a received reply: tensors and strings by name."""
        try:
            return from_records(message.content, self._max_bytes)
        except ValueError:
            raise
        except Exception as error:  # records of another app may hold anything
            raise ValueError(f"not a message of distillkit: {type(error).__name__}: {str(error)[:100]}") from error

    def is_waiting_for(self, recipient: int) -> bool:
        """Return whether the recipient may still reply: no reply has arrived, and the time limit has not passed."""
        return any(entry[0] == recipient for entry in self._pending.values())

    def forget(self, recipient: int) -> None:
        """Stop waiting for the recipient's replies, which are ignored if they arrive later."""
        self._pending = {name: entry for name, entry in self._pending.items() if entry[0] != recipient}

    def clear(self) -> None:
        """Stop waiting for replies. Replies that arrive later are ignored."""
        self._pending.clear()


def app_failed(message: Any) -> bool:
    """Return whether a reply is Flower's error that the node's app could not be loaded or raised an exception."""
    return message is not None and message.has_error() and message.error.code in _APP_ERRORS


def loss_reason(message: Any, seconds: float) -> str:
    """Return a text for the history that says why a client's reply is missing."""
    if message is None:
        return f"lost: no answer in {seconds:g} seconds"
    return f"lost: Flower says {message.error.reason or 'nothing'} (code {message.error.code})"
