"""A reply as one vector of whole numbers that can be added mod 2^64, and the sum of such vectors as reduced replies.

Fixed point with public units: a value v of an entry whose numbers are at most B, with a weight w of at most W, becomes
the whole number nearest to 2^bits w v / (W B). With N clients the sum is at most N 2^bits, below 2^63, so that it is
the true sum; its error is at most half a unit a client, W B / 2^(bits + 1). Integers are added as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distillkit.privacy import PrivacyError
from fl.averaging.fedavg import FedAvg
from fl.message import Entry, Message, Value
from fl.reduce import Like, Reduced, Schema, divided
from fl.schema import MOST

__all__ = ["Layout", "Line", "TooLarge"]

_FULL = 2**63


class TooLarge(ValueError):
    """A client's value is beyond the public maximum; nothing was sent. Which one it was is said, how large is not."""


@dataclass(frozen=True)
class Line:
    """One entry of a reply, as both sides know it.

    Attributes:
        key: of the entry.
        form: "number", "tensor" or "group".
        rule: "sum" or "mean".
        by: the key of the entry that holds the weights of this one, or "".
        over: the public denominator of a mean, if it has one.
        most: B, the largest absolute value of a number in it.
        parts: name ("" but in a group), shape and dtype ("" of a number) of each tensor.
    """

    key: str
    form: str
    rule: str
    by: str
    over: float | None
    most: float
    parts: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def whole(self) -> bool:
        """Whether it holds integers, which are added as they are."""
        return all(dtype.startswith(("int", "uint")) for _, _, dtype in self.parts) and bool(self.parts)


@dataclass(frozen=True)
class Layout:
    """How replies of one form are written as one vector.

    Args:
        lines: of the entries, in the order of their keys.
        bits: as above.
        clients: N, the most clients that a sum is ever over.

    Raises:
        ValueError: a sum could leave the range.
    """

    lines: tuple[Line, ...]
    bits: int
    clients: int

    def __post_init__(self) -> None:
        if self.clients * (2**self.bits + 1) >= _FULL:
            raise ValueError(
                f"bits must be smaller: a sum of whole numbers of {self.bits} bits over {self.clients} clients could "
                "leave 64 bits"
            )
        for line in self.lines:
            if line.whole and self.clients * line.most >= _FULL:
                raise ValueError(
                    f"the sum of {line.key} over {self.clients} clients could leave 64 bits: give it a smaller maximum "
                    "in most"
                )

    @classmethod
    def of(
        cls, schema: Schema, entries: Mapping[str, Entry[Any]], most: Mapping[str, float], bits: int, clients: int
    ) -> Layout:
        """The layout of the replies that a schema describes.

        Args:
            schema: what a reply holds.
            entries: what the method declares, by key.
            most: maxima that were given, by key; they go before those that an entry or the schema states.
            bits, clients: see `Layout`.

        Raises:
            PrivacyError: an entry is no sum, or has no fixed form.
            ValueError: an entry has no public maximum, or one is given for what replies do not hold.
        """
        unknown = sorted(set(most) - set(schema))
        if unknown:
            raise ValueError(
                f"most names {unknown[0]}, which replies do not hold; they hold {', '.join(sorted(schema))}"
            )
        weights = {entry.by.key for entry in entries.values() if entry.by is not None}
        return cls(
            tuple(_line(entries[key], schema[key], most.get(key), key in weights) for key in sorted(schema)),
            bits,
            clients,
        )

    @property
    def length(self) -> int:
        """How many whole numbers a reply is."""
        return sum(math.prod(shape) for line in self.lines for _, shape, _ in line.parts)

    def text(self) -> str:
        """The layout as JSON, to be sent."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Layout:
        """The layout that `text` gave."""
        said = json.loads(text)
        lines = [
            Line(**{**line, "parts": tuple((name, tuple(shape), dtype) for name, shape, dtype in line["parts"])})
            for line in said["lines"]
        ]
        return cls(tuple(lines), said["bits"], said["clients"])

    def unit(self, line: Line) -> float:
        """What one whole number of a line stands for.

        Args:
            line: one of the layout's.
        """
        if line.whole:
            return 1.0
        weight = next((other.most for other in self.lines if other.key == line.by), 1.0)
        return weight * line.most / 2.0**self.bits

    def only(self, keys: Collection[str]) -> Layout:
        """The layout of replies that hold only these of the entries, as in a round in which no weights travel.

        Args:
            keys: of entries.
        """
        return replace(self, lines=tuple(line for line in self.lines if line.key in keys))

    def fits(self, schema: Schema) -> bool:
        """Whether replies of this `schema`, with all entries or only some of them, are written so."""
        forms = {line.key: (line.form, line.parts) for line in self.lines}
        wanted = {key: (_form(like.value), tuple(_parts(like.value))) for key, like in schema.items()}
        return all(forms.get(key) == form for key, form in wanted.items())

    # On a client.

    def encode(self, reply: Message) -> Tensor:
        """A reply as one vector, int64 [length], on the CPU.

        Args:
            reply: of the form that the layout says, with all entries or only some of them.

        Raises:
            TooLarge: a number beyond its entry's maximum, or none at all (NaN).
            ValueError: a reply of another form.
        """
        held = dict(reply.items())
        other = sorted(set(held) - {line.key for line in self.lines})
        if other:
            raise ValueError(f"the reply holds {other[0]}, which the server does not expect")
        found = [part for line in self.only(held).lines for part in self._encoded(line, held)]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def _encoded(self, line: Line, held: Mapping[str, Value]) -> Iterator[Tensor]:
        weight = _tensors(held[line.by])[""].double() if line.by else None
        came = _tensors(held[line.key])
        form = [(name, tuple(t.shape), _dtype(t, held[line.key])) for name, t in came.items()]
        if sorted(form) != sorted(line.parts):
            raise ValueError(f"{line.key} has another form than the server expects")
        for name, _, _ in line.parts:
            value = came[name]
            if not bool((value.double().abs() <= line.most).all()):  # NaN is not
                where = f"{line.key}[{name}]" if name else line.key
                raise TooLarge(
                    f"{where} is beyond its public maximum {line.most:g}, or no number: train with a smaller step, or "
                    f"give SecureSums a larger one, most={{{line.key}: ...}}, on the server and all clients"
                )
            if line.whole:
                yield value.to(torch.int64).flatten()
                continue
            value = value.double() if weight is None else value.double() * _rows(weight, value)
            yield (value / self.unit(line)).round().to(torch.int64).flatten()

    # On the server.

    def decode(self, total: Tensor, clients: list[int], expected: Schema) -> Reduced:
        """The reduced replies that a sum of vectors stands for.

        Args:
            total: int64 [length].
            clients: whose vectors are in it.
            expected: the schema of one reply.
        """
        sums: dict[str, dict[str, Tensor]] = {}
        lines, start = self.only(expected).lines, 0
        for line in lines:
            for name, shape, _ in line.parts:
                part = total[start : start + math.prod(shape)].view(shape)
                start += part.numel()
                sums.setdefault(line.key, {})[name] = part if line.whole else part.double() * self.unit(line)
        values, weights, totals = dict[str, Value](), dict[str, Any](), dict[str, Any]()
        for line in lines:
            like, group = expected[line.key].value, sums.get(line.key, {})
            weight: Any = float(len(clients))
            if line.by:
                weight = sums[line.by][""]
                weight = weight if weight.ndim else float(weight)
            parts = {
                n: divided(line.rule, line.over, t, weight, like[n] if isinstance(like, dict) else like)
                for n, t in group.items()
            }
            grouped = line.form == "group"
            values[line.key] = parts if grouped else parts[""]
            weights[line.key] = dict.fromkeys(group, weight) if grouped else weight
            totals[line.key] = group if grouped else group[""]
        return Reduced(Message.of(values), weights, totals, clients)


def _tensors(value: Any) -> dict[str, Tensor]:
    if isinstance(value, dict):
        return {name: t.detach().cpu() for name, t in value.items()}
    return {"": value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)}


def _dtype(tensor: Tensor, value: Any) -> str:
    return "" if not isinstance(value, dict | Tensor) else str(tensor.dtype).removeprefix("torch.")


def _rows(weight: Tensor, value: Tensor) -> Tensor:
    return weight.view(-1, *[1] * (value.ndim - 1)) if weight.ndim else weight


def _line(entry: Entry[Any], like: Like, given: float | None, weighs: bool) -> Line:
    """The line of one entry, or why there is none."""
    value, key = like.value, entry.key
    if key in (FedAvg.buffers.key, FedAvg.counters.key) and entry.reduce not in ("mean", "sum"):
        raise PrivacyError(
            f"{entry.name} counts a network's batches, of which the server takes the maximum, and that is no sum: give "
            "buffers='drop', or a network without batch norm (norm='instance')"
        )
    if entry.reduce == "union":
        raise PrivacyError(
            f"{entry.name} holds each client's rows apart, for the server to read, and is no sum: leave its owner out"
        )
    if entry.reduce not in ("mean", "sum"):
        raise PrivacyError(
            f"{entry.name} combines by {entry.reduce!r}, which is no sum over clients: leave its owner out"
        )
    if isinstance(value, str) or not isinstance(value, Tensor | dict | float | int):
        raise PrivacyError(f"{entry.name} is a {type(value).__name__}, and no numbers that add up: leave its owner out")
    if like.rows is not None or like.optional:
        what = "is not in every reply" if like.optional else "has as many rows as a client likes"
        raise PrivacyError(f"{entry.name} {what}, which a sum would show: leave its owner out")
    if given is None and entry.bound is not None:
        given = entry.bound
    if given is None and math.isfinite(like.least) and math.isfinite(like.most):
        given = max(abs(like.least), abs(like.most))
    if given is None and weighs:
        given = MOST
    if given is None or not 0 < given < math.inf:
        raise ValueError(
            f"{entry.name} has no public maximum, without which a sum has no unit: give "
            f"SecureSums(most={{{entry.name}: B}}), the largest absolute value that a client's may have"
        )
    by = entry.by.key if entry.by is not None else ""
    return Line(key, _form(value), entry.reduce, by, entry.over, float(given), tuple(_parts(value)))


def _form(value: Value) -> str:
    return "group" if isinstance(value, dict) else "tensor" if isinstance(value, Tensor) else "number"


def _parts(value: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for name, tensor in _tensors(value).items():
        yield name, tuple(tensor.shape), _dtype(tensor, value)
