"""Encoding of messages as safetensors bytes, and digests of values.

The bytes are sent, written to checkpoints, and stored as the memory of a client: the values that it keeps between
rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distillkit._utils.files import checksum, contiguous_cpu
from distillkit.sets import LabeledImages
from fl.message import DTYPES, Message, Tensors, Value, check_value

Parts = tuple[Tensors, dict[str, str]]
"""Parts of a message: its tensors by name, and strings that describe the values to which they belong."""

_SEPARATOR = "\x1f"
_FLAGS = ("measured", "given")
_FORMS = {
    "tensor": {"kind"},
    "group": {"kind", "names"},
    "set": {"kind", "names", "mean", "std", "num_classes", "info", *_FLAGS},
    "plain": {"kind", "value"},
}
"""Fields of a value's description, by kind of value. All are required."""
_PARTS = ("images", "labels", "zca.center", "zca.matrix", "zca.inverse")


def _pack(key: str, value: Value, tensors: Tensors) -> dict[str, Any]:
    """Add the tensors of an entry's value to `tensors`, and return a JSON-compatible description of the value.

    The description and the tensors are enough for `_unpack` to rebuild the value.
    """
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"kind": "tensor"}
    if not isinstance(value, dict | LabeledImages):
        return {"kind": "plain", "value": value}
    group, metadata = LabeledImages.parts(value) if isinstance(value, LabeledImages) else (value, {})
    metadata.pop("class_names", None)  # not part of a message, because both sides know the task's classes
    tensors.update({f"{key}{_SEPARATOR}{name}": tensor for name, tensor in group.items()})
    return {"kind": "group" if isinstance(value, dict) else "set", "names": list(group), **metadata}


def _unpack(key: str, form: Any, tensors: Tensors) -> Value:
    """Rebuild an entry's value from its description and its tensors, as `_pack` stored them."""
    kind = form.get("kind") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in _FORMS or set(form) != _FORMS[kind]:
        raise ValueError(f"{key}: its form is none of {', '.join(_FORMS)} with their fields")
    if kind == "plain":
        return _finite(key, check_value(key, form["value"]))
    if kind == "tensor":
        return _pop_tensor(key, tensors)
    names = form["names"]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise ValueError(f"{key}: its tensors' names must be a list of different strings")
    group = {name: _pop_tensor(f"{key}{_SEPARATOR}{name}", tensors) for name in names}
    return group if kind == "group" else _set(key, group, form)


def _pop_tensor(name: str, tensors: Tensors) -> Tensor:
    if name not in tensors:
        raise ValueError(f"its tensor {name!r} is missing")
    return tensors.pop(name)


def _set(key: str, parts: Tensors, form: Mapping[str, Any]) -> LabeledImages:
    unknown = [n for n in parts if n not in _PARTS and not n.startswith("column.")]
    if unknown:
        raise ValueError(f"{key} is not a valid set: its parts {unknown[:3]} are unknown")
    check_value(f"{key}: num_classes", form["num_classes"])
    for name in ("mean", "std"):
        if not isinstance(form[name], list) or not all(type(x) in (int, float) for x in form[name]):
            raise ValueError(f"{key} is not a valid set: its {name} must be a list of numbers")
    if not isinstance(form["info"], dict) or not all(isinstance(form[f], bool) for f in _FLAGS):
        raise ValueError(f"{key} is not a valid set: its info must be a map, and {' and '.join(_FLAGS)} true or false")
    try:
        return LabeledImages.from_parts(parts, form)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, RuntimeError) as error:
        raise ValueError(f"{key} is not a valid set: {type(error).__name__}: {error}") from error


def _finite(key: str, value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be finite, got {value}")
    return value


def to_parts(message: Message, metadata: Mapping[str, str] | None = None) -> Parts:
    """Split a message into named tensors and named strings, from which `from_parts` rebuilds it."""
    tensors: Tensors = {}
    forms = {key: _pack(key, _finite(key, check_value(key, value)), tensors) for key, value in message.items()}
    stored = contiguous_cpu(tensors)
    meta = {"format": "distillkit.Message/1", "forms": json.dumps(forms), **(metadata or {})}
    return stored, {**meta, "checksum": checksum(stored, meta)}


def from_parts(tensors: Mapping[str, Tensor], strings: Mapping[str, str]) -> tuple[Message, dict[str, str]]:
    """Rebuild a message, and the strings `metadata` that were stored with it, from the result of `to_parts`.

    The parts may come from an untrusted source. The function checks the checksum and every value, and that every tensor
    belongs to exactly one entry.
    """
    left, meta = dict(tensors), dict(strings)
    if meta.get("format") != "distillkit.Message/1":
        raise ValueError(f"not a message (format {meta.get('format')!r})")
    strange = [n for n, t in left.items() if t.dtype not in DTYPES]
    if strange:
        raise ValueError(f"its tensor {strange[0]!r} has dtype {left[strange[0]].dtype}, which messages cannot hold")
    stated = meta.pop("checksum", "")
    if checksum(left, meta) != stated:
        raise ValueError("its content does not match its checksum")
    try:
        forms = json.loads(meta.pop("forms", ""))
        if not isinstance(forms, dict):
            raise TypeError("its forms must be a map from keys")
        message = Message.unchecked({key: _unpack(key, form, left) for key, form in forms.items()})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a message: {error}") from error
    if left:
        raise ValueError(f"its tensor {next(iter(left))!r} belongs to no entry")
    return message, {k: v for k, v in meta.items() if k != "format"}


def encode(message: Message, metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialize a message in the safetensors format, with a checksum of its content.

    The bytes can be sent, or stored in a checkpoint or a client's memory. `decode` restores the message exactly.

    Args:
        message: any message; tensors may be on any device.
        metadata: further strings to store with the message, by name.

    Raises:
        TypeError, ValueError: the message holds a value that `check_value` refuses, or a number that is not finite.
    """
    from safetensors.torch import save

    tensors, strings = to_parts(message, metadata)
    return save(tensors, metadata=strings)


def decode(data: bytes) -> tuple[Message, dict[str, str]]:
    """Deserialize the bytes that `encode` returned.

    Return the message, with tensors on the CPU, and the strings `metadata` that were stored with it.

    Args:
        data: bytes, which may come from an untrusted source.

    Raises:
        ValueError: the bytes are truncated, do not match the checksum, or are not an encoded message.
    """
    from safetensors.torch import load

    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        meta = dict(json.loads(data[8 : 8 + size]).get("__metadata__") or {})
    except Exception as error:  # the parsers raise many kinds of errors, which all mean that the bytes are damaged
        raise ValueError(f"damaged or truncated: {error}") from error
    return from_parts(tensors, meta)


def digest(key: str, value: Value) -> str:
    """Return a 32-character digest of one value. Bit-identical values have the same digest on every machine.

    The server sends the digest in place of a value that the client already holds (`Entry(cached=True)`).

    Args:
        key: key of the entry that holds the value. The digest depends on the key, so equal values in different entries
            have different digests.
        value: any value that a message may hold.
    """
    tensors: Tensors = {}
    form = _pack(key, value, tensors)
    return checksum({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, {"form": json.dumps(form)})
