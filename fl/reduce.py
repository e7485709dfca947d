"""What a reply must look like, and how replies combine: checked whole, folded in client order, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from distillkit.sets import LabeledImages
from fl.message import Entry, Message, Tensors, Value

__all__ = ["BadReply", "Like", "Reduced", "Reducer", "Schema", "check_reply"]

V = TypeVar("V")


class BadReply(ValueError):
    """A reply that cannot be folded; the message says which entry and why."""


@dataclass(frozen=True)
class Like:
    """What one entry of a reply must look like.

    Attributes:
        value: a value of the wanted kind; a tensor's or group's names, shapes and dtypes must equal its own. For a
            set, shape, classes and normalisation must.
        rows: the most rows that a set or tensor may have (then the first dimension is free).
        optional: may be left out.
        subset: a group may carry only some of the names.
    """

    value: Value
    rows: int | None = None
    optional: bool = False
    subset: bool = False


Schema = dict[str, Like]


def _check_tensor(name: str, got: Tensor, want: Tensor, rows: int | None) -> None:
    if got.dtype != want.dtype:
        raise BadReply(f"{name} has dtype {got.dtype}, want {want.dtype}")
    shapes = (got.shape[1:], want.shape[1:]) if rows is not None else (got.shape, want.shape)
    if got.ndim != want.ndim or shapes[0] != shapes[1]:
        raise BadReply(f"{name} has shape {list(got.shape)}, want {list(want.shape)}")
    if rows is not None and len(got) > rows:
        raise BadReply(f"{name} has {len(got)} rows, at most {rows} are allowed")


def _check_like(key: str, got: Value, like: Like) -> None:
    want = like.value
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        _check_tensor(key, got, want, like.rows)
    elif isinstance(want, dict) and isinstance(got, dict):
        missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        if (missing and not like.subset) or extra:
            raise BadReply(f"{key} lacks {missing[:3]} and has unknown {extra[:3]}")
        for name, tensor in got.items():
            _check_tensor(f"{key}[{name}]", tensor, want[name], like.rows)
    elif isinstance(want, LabeledImages) and isinstance(got, LabeledImages):
        try:
            want.require_same_space(got)
        except ValueError as error:
            raise BadReply(f"{key}: {error}") from error
        _check_tensor(f"{key} images", got.images, want.images, like.rows if like.rows is not None else len(got))
    elif isinstance(want, bool | int | float) and isinstance(got, int | float):
        pass
    elif type(want) is not type(got):
        raise BadReply(f"{key} is a {type(got).__name__}, want a {type(want).__name__}")


def _tensors_of(value: Value) -> Iterable[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, LabeledImages):
        yield "images", value.images
        if value.labels.is_floating_point():
            yield "labels", value.labels
    elif isinstance(value, int | float):
        yield "", torch.tensor(float(value), dtype=torch.float64)


def check_reply(reply: Message | None, entries: Mapping[str, Entry[Any]], schema: Schema) -> Message:
    """Return the reply if it can be folded: declared entries only, nothing missing, right shapes, finite, in bounds.

    Raises:
        BadReply: with the first thing that is wrong.
    """
    if reply is None or len(reply) == 0:
        raise BadReply("sent nothing")
    held = dict(reply.items())
    for key, like in schema.items():
        if key in held:
            _check_like(key, held[key], like)
        elif not like.optional:
            raise BadReply(f"{key} is missing")
    for key, value in held.items():
        if key not in entries:
            raise BadReply(f"{key} is not an entry that the method declares")
        entry = entries[key]
        for name, tensor in _tensors_of(value):
            label = f"{key}[{name}]" if name else key
            if not bool(torch.isfinite(tensor).all()):
                raise BadReply(f"{label} holds NaN or Inf")
            if entry.bound is not None and tensor.numel() and float(tensor.abs().max()) > entry.bound:
                raise BadReply(f"{label} exceeds its bound {entry.bound:g}")
            if entry.reduce in ("mean", "sum") and not (tensor.is_floating_point() or entry.reduce == "sum"):
                raise BadReply(f"{label} is {tensor.dtype}: integers have no mean (use max, sum or first)")
        if isinstance(value, str | LabeledImages) and entry.reduce in ("mean", "sum", "max"):
            raise BadReply(f"{key} is a {type(value).__name__}, which has no {entry.reduce}")
        if entry.by is not None and entry.by.key not in held:
            raise BadReply(f"{key} is weighted by {entry.by.key}, which is missing")
    return reply


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    value = value.detach().to(torch.float64)
    if isinstance(weight, Tensor) and weight.ndim:
        weight = weight.to(torch.float64).view(-1, *[1] * (value.ndim - 1))
    return value * weight


class Reduced:
    """The replies of a round, combined. `replies[entry]` is typed by the entry; what nobody sent is absent."""

    def __init__(
        self, values: Message, weights: Mapping[str, Any], sums: Mapping[str, Any], clients: list[int]
    ) -> None:
        self._values, self._weights, self._sums = values, weights, sums
        self.clients = clients

    def __getitem__(self, entry: Entry[V]) -> V:
        return self._values[entry]

    def __contains__(self, entry: object) -> bool:
        return entry in self._values

    @overload
    def get(self, entry: Entry[V]) -> V | None: ...
    @overload
    def get(self, entry: Entry[V], default: V) -> V: ...
    def get(self, entry: Entry[V], default: V | None = None) -> V | None:
        """The reduced value, or `default` if nobody sent it."""
        return self._values[entry] if entry in self else default

    def weight(self, entry: Entry[Any], name: str | None = None) -> Any:
        """Sum of the weights behind a mean: a number, or a vector for row weights. 0 if nobody sent it.

        `name` asks for one tensor of a group (groups are reduced key by key over the replies that carry the key).
        """
        found = self._weights.get(entry.key, 0.0)
        if isinstance(found, dict):
            return found.get(name, 0.0) if name is not None else max(found.values(), default=0.0)
        return found

    def sum(self, entry: Entry[Any]) -> Any:
        """Sum of (weighted) values before any division, float64."""
        return self._sums[entry.key]

    def replace(self, entry: Entry[Any], value: Value) -> Reduced:
        """The same replies with one reduced value changed (what a server-side filter returns)."""
        values = self._values.copy()
        values[entry] = value
        return Reduced(values, self._weights, self._sums, self.clients)


class Reducer:
    """Folds replies, already checked, one after the other in client order."""

    def __init__(self, entries: Mapping[str, Entry[Any]]) -> None:
        self._entries = entries
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        self._first: dict[str, Value] = {}
        self._rows: dict[str, list[tuple[int, Value]]] = {}
        self.clients: list[int] = []

    def fold(self, client: int, reply: Message) -> None:
        """Add one client's reply. Replies must come in the order that the drawn clients have."""
        self.clients.append(client)
        held = dict(reply.items())
        for key, value in held.items():
            entry = self._entries[key]
            self._first.setdefault(key, value)
            if entry.reduce == "union":
                self._rows.setdefault(key, []).append((client, value))
            elif entry.reduce in ("mean", "sum", "max"):
                weight: Any = held[entry.by.key] if entry.by is not None else 1.0
                if isinstance(value, dict):
                    sums, weights = self._sums.setdefault(key, {}), self._weights.setdefault(key, {})
                    for name, tensor in value.items():
                        self._add(entry, sums, weights, name, tensor, weight)
                else:
                    number = value if isinstance(value, Tensor) else _number(cast(float, value))
                    self._add(entry, self._sums, self._weights, key, number, weight)

    @staticmethod
    def _add(entry: Entry[Any], sums: Any, weights: Any, key: str, value: Tensor, weight: Any) -> None:
        if entry.reduce == "max":
            sums[key] = torch.maximum(sums[key], value) if key in sums else value
            return
        term = _weighted(value, weight) if value.is_floating_point() else value.to(torch.int64)
        sums[key] = sums[key] + term if key in sums else term
        total = weight.to(torch.float64) if isinstance(weight, Tensor) else weight
        weights[key] = weights[key] + total if key in weights else total

    def _finish(self, entry: Entry[Any], total: Tensor, weight: Any, like: Any) -> Any:
        if entry.reduce == "mean":
            if entry.over is not None:
                total = total / entry.over
            elif isinstance(weight, Tensor) and weight.ndim:
                rows = weight.view(-1, *[1] * (total.ndim - 1))
                total = torch.where(rows > 0, total / rows.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
            else:
                total = total / weight if float(weight) > 0 else torch.zeros_like(total)
        if isinstance(like, Tensor):
            return total.to(like.dtype) if like.is_floating_point() else total
        return float(total)

    def result(self) -> Reduced:
        """Combine what was folded."""
        values: dict[str, Value] = {}
        for key, first in self._first.items():
            entry = self._entries[key]
            if entry.reduce == "first":
                values[key] = first
            elif entry.reduce == "union":
                values[key] = self._union(key)
            elif isinstance(first, dict):
                names = self._sums[key]
                likes = self._likes(key, first)
                values[key] = {
                    n: self._finish(entry, names[n], self._weights[key].get(n), likes.get(n, names[n])) for n in names
                }
            else:
                values[key] = self._finish(entry, self._sums[key], self._weights.get(key), first)
        return Reduced(Message.of(values), self._weights, self._sums, self.clients)

    def _likes(self, key: str, first: Tensors) -> Tensors:
        dtype = next(iter(first.values())).dtype if first else torch.float32
        return {n: first.get(n, torch.empty(0, dtype=dtype)) for n in self._sums[key]}

    def _union(self, key: str) -> Value:
        parts = self._rows[key]
        kind = parts[0][1]
        if isinstance(kind, LabeledImages):
            sets = [
                s.replace(columns={**s.columns, "client": torch.full((len(s),), client, dtype=torch.int64)})
                for client, s in cast("list[tuple[int, LabeledImages]]", parts)
            ]
            return LabeledImages.concatenate(sets)
        if isinstance(kind, dict):
            groups = cast("list[tuple[int, Tensors]]", parts)
            names = dict.fromkeys(n for _, g in groups for n in g)
            return {n: torch.cat([g[n] for _, g in groups if n in g]) for n in names}
        return torch.cat([torch.atleast_1d(torch.as_tensor(v)) for _, v in cast("list[tuple[int, Tensor]]", parts)])
