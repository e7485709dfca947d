"""Encoding of replies as integer vectors that are summed mod 2^64, and decoding of the sum into aggregated replies.

The encoding is fixed-point. A reply consists of entries, such as numbers or tensors. Let B be the public maximum of the
absolute value of an entry, W the public maximum of the weight with which the entry is averaged, and `bits` the
precision. A value v with weight w becomes the integer nearest to 2^bits w v / (W B). The sum over N clients is at most
N 2^bits, which must be below 2^63, so that the sum cannot overflow. Rounding changes the decoded sum by at most
W B / 2^(bits + 1) for each client. Entries of integers are added without scaling.
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
from fl.aggregation import AggregatedReplies, EntrySpec, Schema, finalize
from fl.averaging.fedavg import FedAvg
from fl.message import Entry, Message, Value
from fl.schema import MAX_WEIGHT

_INT64_LIMIT = 2**63


class BoundExceeded(ValueError):
    """Error: an entry of a client's reply exceeds its public maximum in absolute value, so no reply is sent.

    The message names the entry. It does not contain the value, which is secret.
    """


@dataclass(frozen=True)
class EntryLayout:
    """Layout of one entry of a reply.

    Attributes:
        key: key of the entry.
        rule: aggregation rule of the entry: "sum" or "mean".
        by: key of the entry that contains the weights of the mean; "" if there are no weights.
        most: the largest absolute value that the entry may contain.
        parts: name, shape and dtype of each tensor in the entry; ("", (), "") for a number, and ("", shape, dtype) for
            a single tensor.
    """

    key: str
    rule: str
    by: str
    most: float
    parts: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def is_integer(self) -> bool:
        """True if the entry contains integers, which are added without scaling."""
        return all(dtype.startswith(("int", "uint")) for _, _, dtype in self.parts) and bool(self.parts)


@dataclass(frozen=True)
class ReplyLayout:
    """Layout of replies that are encoded as one integer vector. Clients encode with it, and the server decodes with it.

    Args:
        entries: layouts of the entries, in the order of their keys.
        bits: precision: the largest allowed value of an entry is encoded as 2^bits.
        clients: N, the largest number of clients in a sum.

    Raises:
        ValueError: a sum over `clients` clients could overflow 64 bits.
    """

    entries: tuple[EntryLayout, ...]
    bits: int
    clients: int

    def __post_init__(self) -> None:
        if self.clients * (2**self.bits + 1) >= _INT64_LIMIT:
            raise ValueError(f"bits={self.bits} is too large: a sum over {self.clients} clients could overflow 64 bits")
        for entry in self.entries:
            if entry.is_integer and self.clients * entry.most >= _INT64_LIMIT:
                raise ValueError(
                    f"the sum of {entry.key} over {self.clients} clients could overflow 64 bits: give it a smaller "
                    "maximum in bounds"
                )

    @classmethod
    def from_schema(
        cls, schema: Schema, entries: Mapping[str, Entry[Any]], bounds: Mapping[str, float], bits: int, clients: int
    ) -> ReplyLayout:
        """Return the layout of replies with a given schema.

        Args:
            schema: specification of each entry in a reply, by key.
            entries: the method's declared entries, by key.
            bounds: largest allowed absolute value of an entry, by key. These values replace the maxima in the schema.
            bits, clients: attributes of the layout.

        Raises:
            PrivacyError: an entry is not aggregated by a sum or mean, has no fixed shape, or would be rounded to a
                coarser grid than its noise allows (`EntrySpec.max_unit`).
            ValueError: an entry has no public maximum of its absolute value, or `bounds` has the key of an entry that
                is not in the replies.
        """
        unknown = sorted(set(bounds) - set(schema))
        if unknown:
            raise ValueError(
                f"bounds names {unknown[0]}, which is not in the replies; the replies have {', '.join(sorted(schema))}"
            )
        weights = {entry.by.key for entry in entries.values() if entry.by is not None}
        layouts = [_entry_layout(entries[k], schema[k], bounds.get(k), k in weights) for k in sorted(schema)]
        layout = cls(tuple(layouts), bits, clients)
        for one in layout.entries:
            unit, most = layout.unit(one), schema[one.key].max_unit
            if unit > most:
                raise PrivacyError(
                    f"bits={bits} rounds {one.key} to multiples of {unit:.3g}, which would change or even remove the "
                    f"clients' shares of the noise: at most {most:.3g} is allowed. Use "
                    f"bits={bits + math.ceil(math.log2(unit / most))}, or a smaller maximum in bounds"
                )
        return layout

    @property
    def length(self) -> int:
        """Number of integers in an encoded reply."""
        return sum(math.prod(shape) for entry in self.entries for _, shape, _ in entry.parts)

    def to_json(self) -> str:
        """Return the layout as JSON text, which is sent to the clients."""
        return json.dumps(
            {"lines": [asdict(entry) for entry in self.entries], "bits": self.bits, "clients": self.clients}
        )

    @classmethod
    def from_json(cls, text: str) -> ReplyLayout:
        """Return the layout from the JSON `text` that `to_json` returned."""
        found = json.loads(text)
        entries = [
            EntryLayout(
                **{**entry, "parts": tuple((name, tuple(shape), dtype) for name, shape, dtype in entry["parts"])}
            )
            for entry in found["lines"]
        ]
        return cls(tuple(entries), found["bits"], found["clients"])

    def unit(self, entry: EntryLayout) -> float:
        """Return the value that is encoded as the integer 1: W B / 2^bits, or 1 for an entry of integers."""
        if entry.is_integer:
            return 1.0
        weight = next((other.most for other in self.entries if other.key == entry.by), 1.0)
        return weight * entry.most / 2.0**self.bits

    def select(self, keys: Collection[str]) -> ReplyLayout:
        """Return the layout of replies that contain only the entries with these keys."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.key in keys))

    def matches(self, schema: Schema) -> bool:
        """Return whether every entry of the schema is in this layout, with the same names, shapes and dtypes."""
        parts = {entry.key: entry.parts for entry in self.entries}
        return all(parts.get(key) == _value_parts(like.value) for key, like in schema.items())

    # On a client.

    def encode(self, reply: Message) -> Tensor:
        """Encode a reply as one vector, int64 [length], on the CPU.

        Args:
            reply: message with all or some of the layout's entries.

        Raises:
            BoundExceeded: an absolute value in an entry exceeds the entry's public maximum (see `EntryLayout`), or a
                value is NaN.
            ValueError: an entry of the reply is unknown, or has another shape or dtype than in the layout.
        """
        values = dict(reply.items())
        other = sorted(set(values) - {entry.key for entry in self.entries})
        if other:
            raise ValueError(f"the reply holds {other[0]}, which the server does not expect")
        found = [part for entry in self.select(values).entries for part in self._encode_entry(entry, values)]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def _encode_entry(self, entry: EntryLayout, values: Mapping[str, Value]) -> Iterator[Tensor]:
        weight = _named_tensors(values[entry.by])[""].double() if entry.by else None
        tensors = _named_tensors(values[entry.key])
        if sorted(_value_parts(values[entry.key])) != sorted(entry.parts):
            raise ValueError(f"{entry.key} has another shape, dtype or type than the server expects")
        for name, _, _ in entry.parts:
            value = tensors[name]
            if not bool((value.double().abs() <= entry.most).all()):  # false for NaN
                where = f"{entry.key}[{name}]" if name else entry.key
                raise BoundExceeded(
                    f"{where} exceeds its public maximum {entry.most:g}, or is NaN: use a smaller "
                    f"learning rate, or a larger SecureSums(bounds={{{entry.key}: ...}}) on the server and all clients"
                )
            if entry.is_integer:
                yield value.to(torch.int64).flatten()
                continue
            value = value.double()
            if weight is not None:
                value = value * (weight.view(-1, *[1] * (value.ndim - 1)) if weight.ndim else weight)
            yield (value / self.unit(entry)).round().to(torch.int64).flatten()

    # On the server.

    def decode(self, total: Tensor, clients: list[int], expected: Schema) -> AggregatedReplies:
        """Decode the sum of encoded replies, and return the sums and means of all entries.

        Args:
            total: sum of the vectors that `encode` returned on the clients, int64 [length].
            clients: indices of the clients in the sum.
            expected: schema of one client's reply.
        """
        sums: dict[str, dict[str, Tensor]] = {}
        entries, start = self.select(expected).entries, 0
        for entry in entries:
            for name, shape, _ in entry.parts:
                part = total[start : start + math.prod(shape)].view(shape)
                start += part.numel()
                sums.setdefault(entry.key, {})[name] = part if entry.is_integer else part.double() * self.unit(entry)
        values, weights, totals = dict[str, Value](), dict[str, Any](), dict[str, Any]()
        for entry in entries:
            like, group = expected[entry.key].value, sums.get(entry.key, {})
            weight: Any = float(len(clients))
            if entry.by:
                weight = sums[entry.by][""]
                weight = weight if weight.ndim else float(weight)
            parts = {
                n: finalize(entry.rule, t, weight, like[n] if isinstance(like, dict) else like)
                for n, t in group.items()
            }
            grouped = isinstance(like, dict)
            values[entry.key] = parts if grouped else parts[""]
            weights[entry.key] = dict.fromkeys(group, weight) if grouped else weight
            totals[entry.key] = group if grouped else group[""]
        return AggregatedReplies(Message.unchecked(values), weights, totals, clients)


def _named_tensors(value: Any) -> dict[str, Tensor]:
    if isinstance(value, dict):
        return {name: t.detach().cpu() for name, t in value.items()}
    return {"": value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)}


def _entry_layout(entry: Entry[Any], spec: EntrySpec, bound: float | None, is_weight: bool) -> EntryLayout:
    """Check that one entry of a reply can be summed, and return its layout."""
    key = entry.key
    if key in (FedAvg.buffers.key, FedAvg.counters.key) and entry.rule not in ("mean", "sum"):
        raise PrivacyError(
            f"{entry.key} counts a network's batches and is combined by the maximum, which is not a sum: use "
            "buffers='drop', or a network without batch norm (norm='instance')"
        )
    if why := _unsummable_reason(entry, spec):
        raise PrivacyError(f"{entry.key} {why}: remove the part that declares it")
    if bound is None and math.isfinite(spec.minimum) and math.isfinite(spec.maximum):
        bound = max(abs(spec.minimum), abs(spec.maximum))
    if bound is None and is_weight:
        bound = MAX_WEIGHT
    if bound is None or not 0 < bound < math.inf:
        raise ValueError(
            f"{entry.key} has no public maximum, which its encoding needs: pass the largest absolute value "
            f"allowed in it, SecureSums(bounds={{{entry.key}: B}})"
        )
    by = entry.by.key if entry.by is not None else ""
    return EntryLayout(key, entry.rule, by, float(bound), _value_parts(spec.value))


def _unsummable_reason(entry: Entry[Any], spec: EntrySpec) -> str | None:
    if entry.rule == "union":
        return "keeps each client's rows separate for the server, which is not a sum"
    if entry.rule not in ("mean", "sum"):
        return f"combines by {entry.rule!r}, which is not a sum"
    if isinstance(spec.value, str) or not isinstance(spec.value, Tensor | dict | float | int):
        return f"is a {type(spec.value).__name__}, which cannot be summed"
    if spec.optional:
        return "is not in every reply, which a sum would reveal"
    return None if spec.max_rows is None else "has a number of rows that each client chooses, which a sum would reveal"


def _value_parts(value: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return name, shape and dtype of each tensor of a value; see `EntryLayout.parts`."""
    if not isinstance(value, dict | Tensor):
        return (("", (), ""),)
    found = value if isinstance(value, dict) else {"": value}
    return tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in found.items())
