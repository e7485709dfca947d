"""Comparison of the replies of one exchange: replies far larger than most are refused, dominant ones are named."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping
from typing import IO, Any, cast

import torch

from distillkit.sets import LabeledImages
from fl._codec import decode, encode
from fl.message import Entry, Message, Value, payload_bytes
from fl.schema import Schema, l2_norm

LEAST_REPLIES = 4
"""Number of replies from which they are compared: among fewer, the median may be that of a hostile client."""
_IN_MEMORY = 1 << 27
"""Bytes of replies that wait in memory; further ones wait in a temporary file."""


Compared = dict[str, tuple[float, float, float]]
"""What is compared of a reply, by entry: its size, the largest ratio of this size to the median, and its weight."""


def _size(value: Value) -> float:
    """Return the root mean square of all numbers of an entry's value; 0 if it has none."""
    norm, count = l2_norm(value)
    return norm / math.sqrt(max(1, count))


def compared(reply: Message, entries: Mapping[str, Entry[Any]], schema: Schema) -> Compared:
    """Return what is compared of a valid reply."""
    values, found = dict(reply.items()), Compared()
    for key, spec in schema.items():
        if key in values and spec.ratio is not None:
            by = entries[key].by
            weight = 1.0 if by is None else float(torch.as_tensor(values[by.key], dtype=torch.float64).mean())
            found[key] = (_size(values[key]), spec.ratio, weight if entries[key].rule in ("mean", "sum") else 0.0)
    return found


def too_large(found: Mapping[int, Compared]) -> dict[int, str]:
    """Return the clients whose replies are refused, with the reason."""
    refused: dict[int, str] = {}
    for key in dict.fromkeys(key for one in found.values() for key in one):
        known = {client: one[key] for client, one in found.items() if key in one}
        usual = statistics.median(size for size, _, _ in known.values())
        for client, (size, ratio, _) in known.items():
            if len(known) >= LEAST_REPLIES and size > ratio * usual > 0:
                said = f"{key} is {size / usual:.3g} times as large as the median of {len(known)} replies"
                refused.setdefault(client, f"{said}, at most {ratio:g} times is allowed")
    return refused


def dominant(found: Mapping[int, Compared]) -> dict[int, str]:
    """Return the clients that make up more than half of a weighted mean or sum, or more than a third of six or more."""
    named: dict[int, str] = {}
    for key in dict.fromkeys(key for one in found.values() for key in one):
        shares = {client: one[key][0] * one[key][2] for client, one in found.items() if key in one}
        total = sum(shares.values())
        for client, share in shares.items():
            if len(shares) >= LEAST_REPLIES and share > max(1 / 3, 2 / len(shares)) * total:
                named.setdefault(client, f"{share / total:.0%} of {key}")
    return named


class HeldReplies:
    """Replies that wait until all of an exchange have come. Many large ones wait in a temporary file."""

    def __init__(self) -> None:
        self._held: dict[int, Message | tuple[int, int, dict[str, tuple[str, ...]]]] = {}
        self._bytes = 0
        self._file: IO[bytes] | None = None

    def put(self, client: int, reply: Message) -> None:
        """Keep a client's reply."""
        size = sum(payload_bytes(reply).values())
        if self._bytes + size <= _IN_MEMORY:
            self._bytes += size
            self._held[client] = reply
            return
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        data = encode(reply)
        names = {key: value.class_names for key, value in reply.items() if isinstance(value, LabeledImages)}
        self._held[client] = (self._file.seek(0, 2), len(data), names)  # encoded messages have no class names
        self._file.write(data)

    def take(self, client: int) -> Message:
        """Return a client's reply, which is no longer kept."""
        held = self._held.pop(client)
        if isinstance(held, Message):
            return held
        assert self._file is not None
        start, size, names = held
        self._file.seek(start)
        values = dict(decode(self._file.read(size))[0].items())
        for key, own in names.items():
            values[key] = cast(LabeledImages, values[key]).replace(class_names=own)
        return Message.unchecked(values)
