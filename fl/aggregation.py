"""Aggregation of a round's replies. Each entry of the replies has its own rule, such as the mean (see `Entry`).

Replies are added as float64 numbers, in the order of the client indices. The result therefore does not depend on the
order in which the replies arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from distillkit.sets import LabeledImages
from fl.message import Entry, Message, Tensors, Value
from fl.schema import BadReply, EntrySpec, Schema, check_reply

__all__ = ["AggregatedReplies", "Aggregator", "BadReply", "EntrySpec", "Schema", "check_reply", "finalize"]


_PIECE = 1 << 18
"""Number of elements that are multiplied and added per call: 2 MiB in float64, which fits in a CPU's cache."""


def _number(value: float, rule: str) -> Tensor:
    whole = isinstance(value, int) and rule != "mean"
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float64)


def _forms(entry: Entry[Any], value: Value) -> Iterator[tuple[str, object]]:
    """Yield pairs (name, properties) for the properties of an entry's value that must be equal for all clients.

    The properties are dtype and shape and, for image sets, normalization and number of classes. The name is that of a
    tensor in a dict of tensors; it is "" for other values.
    """
    if entry.rule == "first":
        return
    first = 1 if entry.rule == "union" else 0
    if isinstance(value, Tensor):
        yield "", (value.dtype, value.shape[first:])
    elif isinstance(value, dict):
        yield "", "group"
        yield from ((f"[{n}]", (t.dtype, t.shape[first:])) for n, t in value.items())
    elif isinstance(value, LabeledImages):
        rows = {"images": value.images, "labels": value.labels, **{f"column {n}": t for n, t in value.columns.items()}}
        yield "", (value.num_classes, value.normalization, {n: (t.dtype, t.shape[1:]) for n, t in rows.items()})
    else:
        yield "", "number"


def _weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    """Return the value times its weight, in float64, as a new tensor to which other values can be added in place."""
    value = value.detach()
    if isinstance(weight, Tensor) and weight.ndim:
        return value.to(torch.float64) * weight.to(torch.float64).view(-1, *[1] * (value.ndim - 1))
    return value.to(torch.float64, copy=True).mul_(weight)


def _add_weighted(total: Tensor, value: Tensor, weight: float | Tensor) -> None:
    """Add `value` times `weight` to `total` in place.

    Large CPU tensors are added in pieces that fit in the CPU cache.
    """
    even = value.is_cpu and total.is_contiguous() and value.is_contiguous()
    if not even or (isinstance(weight, Tensor) and weight.ndim):
        total.add_(_weighted(value, weight))
        return
    for partial_sum, part in zip(total.view(-1).split(_PIECE), value.detach().view(-1).split(_PIECE), strict=True):
        partial_sum.add_(_weighted(part, weight))


def finalize(rule: str, total: Tensor, weight: Any, like: Any) -> Any:
    """Return the aggregate of one entry, in the dtype of the clients' values, from the weighted sum over clients.

    Args:
        rule: the entry's aggregation rule, see `Entry`.
        total: sum of the clients' values times their weights.
        weight: sum of the clients' weights: a number, or a vector with one weight per row.
        like: one client's value, a tensor or a number, whose type and dtype the result gets.
    """
    if rule == "mean":
        if isinstance(weight, Tensor) and weight.ndim:
            rows = weight.view(-1, *[1] * (total.ndim - 1))
            total = torch.where(rows > 0, total / rows.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        else:
            total = total / weight if float(weight) > 0 else torch.zeros_like(total)
    if isinstance(like, Tensor):
        return total.to(like.dtype) if like.is_floating_point() else total
    return float(total)


class AggregatedReplies(Message):
    """Aggregated replies of a round, which `Method.receive` gets in place of the individual replies.

    `replies[entry]` is the mean, sum or other aggregate of the values that the clients sent under that entry.
    `entry in replies` is true if any client sent the entry. The engine builds the object (`Aggregator.result`).

    Args:
        values: the aggregated values.
        weights: sum of the clients' weights for each entry, by entry key. An entry whose value is a dict of
            tensors has one sum for each tensor, by the tensor's name.
        sums: weighted sum of the clients' values for each entry, in float64, by entry key. Division by the sum of the
            weights gives the mean.
        clients: indices of the clients whose replies are included, in ascending order.
    """

    def __init__(
        self, values: Message, weights: Mapping[str, Any], sums: Mapping[str, Any], clients: list[int]
    ) -> None:
        self._values, self._weights, self._sums, self.clients = dict(values.items()), weights, sums, clients

    def weight(self, entry: Entry[Any], name: str | None = None) -> Any:
        """Return the sum of the weights of the clients that sent the entry.

        For an entry with the rule `mean`, the weighted sum of the values is divided by this sum.

        Args:
            entry: entry whose rule is `mean` or `sum`.
            name: if the value is a dict of tensors, the name of one tensor. Each tensor is aggregated over the replies
                that contain it, so the sums of weights can differ between tensors. Default: the largest of these sums.

        Returns:
            A number, or a vector with one sum for each row of the value if every row has its own weight; 0 if no client
            sent the entry.
        """
        found = self._weights.get(entry.key, 0.0)
        if isinstance(found, dict):
            return found.get(name, 0.0) if name is not None else max(found.values(), default=0.0)
        return found

    def sum(self, entry: Entry[Any]) -> Any:
        """Return the weighted sum of the clients' values, in float64. It is not divided by the sum of the weights.

        Args:
            entry: entry whose rule is `mean` or `sum`. For a dict of tensors, the result is a dict with the same names.

        Raises:
            KeyError: no client sent the entry.
        """
        return self._sums[entry.key]

    def replace(self, entry: Entry[Any], value: Value) -> AggregatedReplies:
        """Return a copy of these replies in which `entry` has a new aggregated value. Filters on the server use it.

        Args:
            entry: entry to change.
            value: new aggregated value. The methods `weight` and `sum` of the copy return the same values as before.
        """
        values = self.copy()
        values[entry] = value
        return AggregatedReplies(values, self._weights, self._sums, self.clients)


class Aggregator:
    """Running aggregate of a round's replies. Each reply is added to running sums, so replies need not be stored.

    The engine checks each reply with `check_reply`, adds it with `fold` in client order, and calls `result` at the end.

    Args:
        entries: the entries that the method declares, by key.

    Attributes:
        clients: indices of the clients whose replies were added so far.
    """

    def __init__(self, entries: Mapping[str, Entry[Any]]) -> None:
        self._entries = entries
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        self._first: dict[str, Value] = {}
        self._rows: dict[str, list[tuple[int, Value]]] = {}
        self._forms: dict[tuple[str, str], object] = {}
        self.clients: list[int] = []

    def fold(self, client: int, reply: Message) -> None:
        """Add one client's reply to the aggregate.

        Args:
            client: index of the client. Clients must come in ascending order, because the order affects rounding.
            reply: reply of this client, which `check_reply` has accepted.

        Raises:
            BadReply: a value differs from that of an earlier reply in dtype, shape, normalization or number of classes,
                or the method does not declare its entry. No part of the reply was added.
        """
        values, forms = dict(reply.items()), dict(self._forms)
        for key, value in values.items():
            if key not in self._entries:
                raise BadReply(f"{key} is not an entry that the method declares")
            for name, form in _forms(self._entries[key], value):
                if (known := forms.setdefault((key, name), form)) != form:
                    raise BadReply(
                        f"{key}{name} has a different type or shape than in other replies: {form}, want {known}"
                    )
        self._forms = forms
        self.clients.append(client)
        for key, value in values.items():
            entry = self._entries[key]
            self._first.setdefault(key, value)
            if entry.rule == "union":
                self._rows.setdefault(key, []).append((client, value))
            elif entry.rule in ("mean", "sum", "max"):
                weight: Any = values[entry.by.key] if entry.by is not None else 1.0
                if isinstance(value, dict):
                    sums, weights = self._sums.setdefault(key, {}), self._weights.setdefault(key, {})
                    for name, tensor in value.items():
                        self._add(entry, sums, weights, name, tensor, weight)
                else:
                    number = value if isinstance(value, Tensor) else _number(cast(float, value), entry.rule)
                    self._add(entry, self._sums, self._weights, key, number, weight)

    @staticmethod
    def _add(entry: Entry[Any], sums: Any, weights: Any, key: str, value: Tensor, weight: Any) -> None:
        if entry.rule == "max":
            sums[key] = torch.maximum(sums[key], value) if key in sums else value
            return
        if value.is_floating_point():
            if key in sums:
                _add_weighted(sums[key], value, weight)
            else:
                sums[key] = _weighted(value, weight)
        else:
            term = value.to(torch.int64)
            sums[key] = sums[key] + term if key in sums else term
        total = weight.to(torch.float64) if isinstance(weight, Tensor) else weight
        weights[key] = weights[key] + total if key in weights else total

    def result(self) -> AggregatedReplies:
        """Return the aggregate of all added replies, with values in the dtype of the replies."""
        values: dict[str, Value] = {}
        for key, first in self._first.items():
            entry = self._entries[key]
            if entry.rule == "first":
                values[key] = first
            elif entry.rule == "union":
                values[key] = self._union(key)
            elif isinstance(first, dict):
                other = torch.empty(0, dtype=next(iter(first.values())).dtype if first else torch.float32)
                values[key] = {
                    n: finalize(entry.rule, total, self._weights[key].get(n), first.get(n, other))
                    for n, total in self._sums[key].items()
                }
            else:
                values[key] = finalize(entry.rule, self._sums[key], self._weights.get(key), first)
        return AggregatedReplies(Message.unchecked(values), self._weights, self._sums, self.clients)

    def _union(self, key: str) -> Value:
        parts = self._rows[key]
        kind = parts[0][1]
        if isinstance(kind, LabeledImages):
            sets = [
                s.replace(columns={**s.columns, "client": s.labels.new_full((len(s),), client, dtype=torch.int64)})
                for client, s in cast("list[tuple[int, LabeledImages]]", parts)
            ]
            return LabeledImages.concatenate(sets)
        if isinstance(kind, dict):
            groups = cast("list[tuple[int, Tensors]]", parts)
            names = dict.fromkeys(n for _, g in groups for n in g)
            return {n: torch.cat([g[n] for _, g in groups if n in g]) for n in names}
        return torch.cat([torch.atleast_1d(torch.as_tensor(v)) for _, v in cast("list[tuple[int, Tensor]]", parts)])
