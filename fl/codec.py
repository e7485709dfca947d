"""One codec for the wire, the checkpoint and client memory: messages as safetensors, and fingerprints of values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from distillkit.sets import LabeledImages
from fl.message import Message, Tensors, Value

__all__ = ["decode", "digest", "encode"]

_SEPARATOR = "\x1f"


def _pack(key: str, value: Value, tensors: Tensors) -> dict[str, Any]:
    """Put a value's tensors into `tensors`; return what else is needed to build it again."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"kind": "tensor"}
    if isinstance(value, dict):
        for name, tensor in value.items():
            tensors[f"{key}{_SEPARATOR}{name}"] = tensor
        return {"kind": "group", "names": list(value)}
    if isinstance(value, LabeledImages):
        parts, facts = value.parts()
        for name, tensor in parts.items():
            tensors[f"{key}{_SEPARATOR}{name}"] = tensor
        return {"kind": "set", "names": list(parts), **facts}
    return {"kind": "plain", "value": value}


def _unpack(key: str, form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Value:
    if form["kind"] == "tensor":
        return tensors[key]
    if form["kind"] == "plain":
        return cast(Value, form["value"])
    group = {name: tensors[f"{key}{_SEPARATOR}{name}"] for name in form["names"]}
    if form["kind"] == "group":
        return group
    return LabeledImages.from_parts(group, form)


def encode(message: Message, facts: Mapping[str, str] | None = None) -> bytes:
    """Serialise a message (and string facts beside it) as safetensors, with a checksum of its content."""
    from safetensors.torch import save

    tensors: Tensors = {}
    forms = {key: _pack(key, value, tensors) for key, value in message.items()}
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    meta = {"format": "distillkit.Message/1", "forms": json.dumps(forms), **(facts or {})}
    return save(stored, metadata={**meta, "checksum": _checksum(stored, meta)})


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    state = hashlib.blake2b(json.dumps(dict(sorted(meta.items()))).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def decode(data: bytes) -> tuple[Message, dict[str, str]]:
    """Rebuild what `encode` wrote: the message and its facts.

    Raises:
        ValueError: the bytes are truncated, altered, or not a message.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        meta = dict(json.loads(data[8 : 8 + size]).get("__metadata__", {}))
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"damaged or truncated: {error}") from error
    if meta.get("format") != "distillkit.Message/1":
        raise ValueError(f"not a message (format {meta.get('format')!r})")
    checksum = meta.pop("checksum", "")
    if _checksum(tensors, meta) != checksum:
        raise ValueError("its content does not match its checksum")
    forms = json.loads(meta["forms"])
    facts = {k: v for k, v in meta.items() if k not in ("format", "forms")}
    return Message.of({key: _unpack(key, form, tensors) for key, form in forms.items()}), facts


def digest(key: str, value: Value) -> str:
    """A 32-character fingerprint of one value, equal on every machine that holds the same bits."""
    tensors: Tensors = {}
    form = _pack(key, value, tensors)
    return _checksum({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, {"form": json.dumps(form)})
