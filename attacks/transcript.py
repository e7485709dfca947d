"""Reader of a run's transcript: the messages between server and clients, as plain tensors and sets.

`read_transcript` yields every message in the folder `transcript` of a run that was made with
`out=RunFolder(path, transcript=True)`. The package `fl` is not needed.

Each message is a file `transcript/<round>/<client>-<up or down>.safetensors`. If a method has additional exchanges in a
round, their files are `<client>-<exchange>-<up or down>.safetensors`. The metadata of a file have the keys `format`,
`round`, `client`, `checksum` and `forms`. The value of `forms` is a JSON object that describes the value of each
message entry, by the entry's key:

- `{"kind": "tensor"}`: the tensor with this key in the file;
- `{"kind": "group", "names": [...]}`: a dictionary of tensors. Each tensor in the file is named by the entry's key, the
  character U+001F, and the tensor's name;
- `{"kind": "set", "names": [...], "mean": ..., "std": ..., "num_classes": ..., "info": ...}`: a `LabeledImages`. Its
  tensors are named like the tensors of a "group";
- `{"kind": "plain", "value": ...}`: a number or a string.

The checksum is a 16-byte BLAKE2b hash. It covers the other metadata as sorted JSON, followed by each tensor's name,
type, shape and bytes, in the order of the tensors' names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from distillkit._utils import check
from distillkit._utils.files import read_tensors
from distillkit.sets import LabeledImages

__all__ = ["DamagedTranscript", "NoTranscript", "TranscriptMessage", "Value", "read_transcript"]

Value: TypeAlias = Tensor | dict[str, Tensor] | LabeledImages | int | float | str | bool
"""Value of a message's entry: a tensor, named tensors (a model), a set of images, or a plain value."""

_FORMAT = "distillkit.Message/1"
_SEPARATOR = "\x1f"
_FILE_NAME = re.compile(r"(\d+)-(?:(\w+)-)?(down|up)\.safetensors")


class NoTranscript(FileNotFoundError):
    """Error: the folder has no transcript. The message explains how to record one."""


class DamagedTranscript(ValueError):
    """Error: a file of a transcript is truncated or altered, or has the wrong path. The message names the file."""


@dataclass(frozen=True, eq=False)
class TranscriptMessage:
    """Message that the server sent or received, as `read_transcript` yields it.

    Attributes:
        round: index of the round, from 1; 0 for messages before round 1.
        client: index of the client.
        direction: direction of the message: "down" (from the server to the client) or "up".
        values: contents of the message: values by entry key, such as "FedAvg.update".
        exchange: name of the exchange to which the message belongs. In an exchange, the server sends a request to
            clients, and they reply. "local" is the training. "answer" is the query that some methods send before round
            1, for example to ask for class counts.
    """

    round: int
    client: int
    direction: str
    values: dict[str, Value]
    exchange: str = "local"

    @property
    def sets(self) -> dict[str, LabeledImages]:
        """The entries of the message that are sets of images, by entry key."""
        return {key: value for key, value in self.values.items() if isinstance(value, LabeledImages)}


def read_transcript(folder: str | os.PathLike[str]) -> Iterator[TranscriptMessage]:
    """Yield the messages of a recorded run, ordered by round, client and exchange.

    An exchange consists of a request to a client and the client's reply, for example for the training. The request is
    yielded before the reply. Within a round, messages are ordered by client index, not by time of reply.

    Args:
        folder: path of the run's folder, made by `simulate(..., out=RunFolder(folder, transcript=True))`.

    Yields:
        Each message, with its tensors on the CPU. Only one message is read into memory at a time.

    Raises:
        TypeError, ValueError: `folder` is not a path.
        NotADirectoryError: `folder` is a file.
        NoTranscript: the folder does not exist or has no messages. The call raises this error before the iteration
            begins.
        DamagedTranscript: a message is damaged. The error is raised when the iteration reaches the message.
    """
    at = check.folder(folder, "folder") / "transcript"
    if not at.parent.is_dir():
        raise NoTranscript(f"folder must be the folder of a run, but {folder} does not exist")
    rounds = sorted((int(p.name), p) for p in at.glob("*") if p.is_dir() and p.name.isdecimal())
    found = []
    for number, place in rounds:
        named = [(match, path) for path in place.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
        found += [(number, int(match[1]), match[2] or "local", match[3], path) for match, path in named]
    if not found:
        raise NoTranscript(
            f"{at} holds no messages: run again with simulate(..., out=RunFolder(path, transcript=True)) to record them"
        )
    return (_read_message(*one) for one in sorted(found))


def _read_message(number: int, client: int, exchange: str, direction: str, path: Path) -> TranscriptMessage:
    try:
        tensors, facts = read_tensors(path, kind=_FORMAT, content="a message")
        values = {key: _value(key, form, tensors) for key, form in json.loads(facts["forms"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedTranscript(
            f"{path} is damaged ({type(error).__name__}: {error}): restore the folder from a backup, or run again. An "
            "attack on a part of the transcript would not cover all of it"
        ) from error
    if facts.get("round") != str(number) or facts.get("client") != str(client):
        raise DamagedTranscript(
            f"{path} is the message of client {facts.get('client')} in round {facts.get('round')}: the files of the "
            "transcript are mixed up; restore the folder from a backup, or run again"
        )
    return TranscriptMessage(number, client, direction, values, exchange)


def _value(key: str, form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Value:
    if form["kind"] == "plain":
        return form["value"]
    if form["kind"] == "tensor":
        return tensors[key]
    group = {name: tensors[f"{key}{_SEPARATOR}{name}"] for name in form["names"]}
    if form["kind"] == "group":
        return group
    if form["kind"] == "set":
        return LabeledImages.from_parts(group, form)
    raise ValueError(f"{key} is of the unknown kind {form['kind']!r}")
