"""Messages that a server saw: a recorded run's transcript, read as plain tensors and sets, without the federated layer.

What the other attacks start from when they are aimed at a run: `read_transcript` gives every message of the folder `transcript`,
which a run keeps when it is asked to.

A file is `transcript/<round>/<client>-<up or down>.safetensors`, or `<client>-<exchange>-<up or down>.safetensors`
where a method has further exchanges in a round besides the training. Its metadata say `format`, the `round` and the
`client`, a `checksum`, and `forms`: JSON, for each entry's key how its value is put together,

- `{"kind": "tensor"}`: the file's tensor of that key;
- `{"kind": "group", "names": [...]}`: named tensors, each at the key, the character U+001F, and its name;
- `{"kind": "set", "names": [...], "mean": ..., "std": ..., "num_classes": ..., "info": ...}`: the parts of a
  `LabeledImages`, stored like a group's;
- `{"kind": "plain", "value": ...}`: a number or a string.

The checksum is BLAKE2b, 16 bytes, over the other metadata as sorted JSON, then for each tensor in the order of their
names its name, type, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distillkit.sets import LabeledImages

__all__ = ["DamagedTranscript", "NoTranscript", "TranscriptMessage", "Value", "read_transcript"]

Value: TypeAlias = Tensor | dict[str, Tensor] | LabeledImages | int | float | str | bool
"""What an entry of a message holds: a tensor, named tensors (a model), a set of images, or a plain value."""

_FORMAT = "distillkit.Message/1"
_BETWEEN = "\x1f"
_FILE = re.compile(r"(\d+)-(?:(\w+)-)?(down|up)\.safetensors")


class NoTranscript(FileNotFoundError):
    """The folder has no messages to look at; the message says how a run keeps them."""


class DamagedTranscript(ValueError):
    """A message of a transcript is truncated, altered, or in the wrong place; the file is named."""


@dataclass(frozen=True, eq=False)
class TranscriptMessage:
    """One message that the server sent or got. Made by `read_transcript`.

    Attributes:
        round: from 1; 0 of what clients were asked before round 1, with the exchange "answer".
        client: its number, from 0: who got it, or who sent it.
        direction: "down", from the server to the client, or "up".
        values: by the entry's key, such as "FedAvg.update".
        exchange: in which exchange of the round, by the verb that the client was asked; "local" is the training.
    """

    round: int
    client: int
    direction: str
    values: dict[str, Value]
    exchange: str = "local"

    @property
    def sets(self) -> dict[str, LabeledImages]:
        """The sets of images in the message, by key."""
        return {key: value for key, value in self.values.items() if isinstance(value, LabeledImages)}


def read_transcript(folder: str | os.PathLike[str]) -> Iterator[TranscriptMessage]:
    """Read the messages of a recorded run one after another: by round, by client and exchange, "down" before "up".

    Call it for attacks on what a server saw. The order within a round is by the clients' numbers, not that in which
    they answered. Files that are no messages are passed over, a message that is damaged is not.

    Args:
        folder: of the run; `simulate(..., out=folder, transcript=True)` makes one.

    Yields:
        Each message, tensors on the CPU. Only one is in memory at a time.

    Raises:
        TypeError: the folder is no path.
        NoTranscript: the folder is none, or no messages were kept in it. Raised by the call itself.
        DamagedTranscript: a message that is not what was written; raised when it is reached.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be the path of a run's folder, got {type(folder).__name__}")
    at = Path(folder) / "transcript"
    if not Path(folder).is_dir():
        raise NoTranscript(f"folder must be that of a run, but {folder} is not there")
    rounds = sorted((int(p.name), p) for p in at.glob("*") if p.is_dir() and p.name.isdecimal())
    found = []
    for number, place in rounds:
        named = [(match, path) for path in place.iterdir() if (match := _FILE.fullmatch(path.name))]
        found += [(number, int(match[1]), match[2] or "local", match[3], path) for match, path in named]
    if not found:
        raise NoTranscript(
            f"{at} holds no messages: run again with simulate(..., transcript=True), which keeps what the server sees"
        )
    return (_seen(*one) for one in sorted(found))


def _seen(number: int, client: int, exchange: str, direction: str, path: Path) -> TranscriptMessage:
    try:
        values, facts = _decoded(path.read_bytes())
    except ValueError as error:
        raise DamagedTranscript(
            f"{path} is damaged, {error}: take the folder from a backup, or run again; what a part of a transcript "
            "gives away says nothing of all of it"
        ) from error
    if facts.get("round") != str(number) or facts.get("client") != str(client):
        raise DamagedTranscript(
            f"{path} is the message of client {facts.get('client')} in round {facts.get('round')}: the files of the "
            "transcript are mixed up; take the folder from a backup, or run again"
        )
    return TranscriptMessage(number, client, direction, values, exchange)


def _decoded(data: bytes) -> tuple[dict[str, Value], dict[str, str]]:
    from safetensors.torch import load

    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        meta = dict(json.loads(data[8 : 8 + size]).get("__metadata__") or {})
    except Exception as error:  # the parsers fail in many ways, and all of them mean the same here
        raise ValueError(f"no safetensors file ({error})") from error
    if meta.get("format") != _FORMAT:
        raise ValueError(f"no message (format {meta.get('format')!r}, want {_FORMAT!r})")
    if meta.pop("checksum", None) != _checksum(tensors, meta):
        raise ValueError("its content does not match its checksum")
    try:
        values = {key: _value(key, form, tensors) for key, form in json.loads(meta["forms"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its entries cannot be put together ({type(error).__name__}: {error})") from error
    return values, meta


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    state = hashlib.blake2b(json.dumps(dict(sorted(meta.items()))).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _value(key: str, form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Value:
    if form["kind"] == "plain":
        return form["value"]
    if form["kind"] == "tensor":
        return tensors[key]
    group = {name: tensors[f"{key}{_BETWEEN}{name}"] for name in form["names"]}
    if form["kind"] == "group":
        return group
    if form["kind"] == "set":
        return LabeledImages.from_parts(group, form)
    raise ValueError(f"{key} is of the unknown kind {form['kind']!r}")
