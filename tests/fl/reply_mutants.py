"""Mutants of a valid reply, each of which violates its schema in one known way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit import LabeledImages, Normalization
from fl.message import Entry, Message
from fl.schema import MAX_WEIGHT, EntrySpec, Schema

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip

Mutant = tuple[str, Any]


def mutants(reply: Message, schema: Schema, entries: Mapping[str, Entry[Any]]) -> Iterator[Mutant]:
    """Yield names and replies: replies of another kind, missing or extra entries, and each entry with one fault."""
    held = dict(reply.items())
    whole: list[Any] = [{}, held, "reply", 7, [reply], torch.zeros(3), object(), Message.unchecked({1: 2.0})]  # type: ignore[dict-item]
    for i, other in enumerate(whole):
        yield f"whole {i}", other
    for key, like in schema.items():
        if key in held and not like.optional:
            yield f"{key} left out", Message.unchecked({k: v for k, v in held.items() if k != key})
    yield "undeclared", Message.unchecked({**held, "Nobody.declared": 1.0})
    yield "a key beside", Message.unchecked({**held, f"{next(iter(held))} ": 1.0})
    model = next((v for v in held.values() if isinstance(v, dict)), {"a": torch.zeros(2)})
    for key in entries:
        if key not in schema:
            for value in (1.0, torch.zeros(3), model, {}, {"global": torch.ones(12)}, "last"):
                yield f"{key} not due: {type(value).__name__}", Message.unchecked({**held, key: value})
    weights = {e.by.key for e in entries.values() if e.by is not None}
    for key, value in held.items():
        for name, wrong in _values(value, schema[key], key in weights):
            yield f"{key} {name}", Message.unchecked({**held, key: wrong})


def _values(value: Any, like: EntrySpec, weight: bool) -> Iterator[Mutant]:
    kinds = {
        "none": None, "bool": True, "list": [1.0], "tuple": (), "bytes": b"1", "complex": 1j, "object": object(),
        "text": "1", "surrogate": "\ud800", "number": 1.0, "tensor": torch.zeros(2), "group": {"a": torch.zeros(2)},
        "numbers": {"a": 1.0}, "keys": {1: torch.zeros(2)}, "set": _bare(),
    }  # fmt: skip
    own = {
        float: ["number"], Tensor: ["tensor"], dict: ["group"], LabeledImages: ["set"],
    }[next(t for t in (Tensor, dict, LabeledImages, float) if isinstance(value, t))]  # fmt: skip
    yield from ((f"is {n}", v) for n, v in kinds.items() if n not in own)
    least, most = (max(like.minimum, 0.0), min(like.maximum, MAX_WEIGHT)) if weight else (like.minimum, like.maximum)
    if isinstance(value, float):
        yield from ((f"is {v}", v) for v in (math.nan, math.inf, -math.inf))
        yield from ((f"is huge {i}", v) for i, v in enumerate((10**400, -(10**400), 2**64)))
        yield from ((f"is {v}", v) for v in _outside(least, most))
    elif isinstance(value, Tensor):
        yield from _tensors(value, like.max_rows, least, most)
        if like.same_rows_as is not None:
            yield "a row short", value[:-1]
    elif isinstance(value, dict):
        yield from _groups(value, like, least, most)
    else:
        yield from _sets(value, like)


def _outside(least: float, most: float) -> list[float]:
    low = [] if math.isinf(least) else [least - 1, least - 431.0, -1e4, -1e308]
    return low + ([] if math.isinf(most) else [most + 1, 10 * most + 1, 1e308])


def _tensors(value: Tensor, rows: int | None, least: float, most: float) -> Iterator[Mutant]:
    for dtype in DTYPES:
        if dtype != value.dtype:
            yield f"as {dtype}", value.to(dtype)
    yield "with a dimension more", value[None]
    yield "with a dimension behind", value[..., None]
    yield "sparse", value.to_sparse()
    yield "nowhere", value.to("meta")
    if value.ndim > 1:
        yield "flat", value.flatten()
        yield "with another width", torch.cat([value, value], -1)
    if value.ndim:
        yield "a scalar", value.sum()
        many = 2 if rows is None else rows // max(1, len(value)) + 1
        yield "with too many rows", torch.cat([value] * many)
        if rows is None:
            yield "empty", value[:0]
    places = {0, value.numel() // 2, value.numel() - 1}
    if value.is_floating_point():
        odd = [math.nan, math.inf, -math.inf]
        yield from ((f"{x} at {i}", _with(value, i, x)) for i in places for x in odd)
    room = torch.finfo(value.dtype).max if value.is_floating_point() else 2.0**62
    for i in places:
        yield from ((f"{x} at {i}", _with(value, i, x)) for x in _outside(least, most) if abs(x) < room)


def _with(value: Tensor, place: int, number: float) -> Tensor:
    other = value.clone().reshape(-1)
    other[place] = number
    return other.view_as(value)


def _groups(value: dict[str, Tensor], like: EntrySpec, least: float, most: float) -> Iterator[Mutant]:
    for name, tensor in value.items():
        rest = {n: t for n, t in value.items() if n != name}
        yield f"without {name}", rest
        yield f"with {name} renamed", {**rest, f"{name}_": tensor}
        yield f"with a number as {name}", {**value, name: 1.0}
        yield from ((f"[{name}] {how}", {**value, name: wrong}) for how, wrong in _tensors(tensor, None, least, most))
    yield "with more", {**value, "more": torch.zeros(1)}
    yield "empty", {}


def _bare() -> LabeledImages:
    return LabeledImages(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64), num_classes=3)


def _sets(value: LabeledImages, like: EntrySpec) -> Iterator[Mutant]:
    n = len(value)
    c, h, w = value.shape
    rows = torch.nn.functional.one_hot(value.labels, value.num_classes).to(value.images.dtype)
    other = value.normalization.mean[0] + 0.25
    yield "with a column", value.replace(columns={"client": torch.arange(n)})
    yield "with two columns", value.replace(columns={"a": torch.zeros(n), "b": torch.zeros(n, 2)})
    yield "with info", value.replace(info={"absent_classes": [1]})
    yield "with more info", value.replace(info={"method": "DM"})
    yield "otherwise normalised", value.replace(normalization=Normalization((other,), (1.0,)))
    yield "of more classes", value.replace(num_classes=value.num_classes + 1)
    yield "of other labels", value.replace(labels=rows)
    yield "in float64", value.to(dtype=torch.float64)
    yield "in float16", value.to(dtype=torch.float16)
    yield "wider", value.replace(images=torch.zeros(n, c, h, w + 1))
    yield "in colour", value.replace(images=torch.zeros(n, c + 1, h, w))
    assert like.max_per_class is not None
    assert like.max_rows is not None
    many = like.max_per_class + 1
    yield "with too many of a class", value[torch.zeros(many, dtype=torch.int64)]
    every = torch.arange(like.max_rows + 1) % n
    yield "with too many images", value[every]
    spoiled: list[tuple[str, str, Any]] = [
        ("labels out of range", "labels", value.labels + value.num_classes),
        ("negative labels", "labels", value.labels - value.num_classes),
        ("labels too few", "labels", value.labels[:-1]),
        ("labels in floats", "labels", value.labels.double()),
        ("no labels", "labels", None),
        ("images too few", "images", value.images[:-1]),
        ("flat images", "images", value.images.flatten(1)),
        ("whole images", "images", value.images.long()),
        ("no images", "images", None),
        ("class count of text", "num_classes", "3"),
        ("no class count", "num_classes", None),
        ("no normalisation", "normalization", None),
        ("columns in a list", "columns", [1]),
        ("info in a list", "info", [1]),
        *((f"{x} at {i}", "images", _with(value.images, i, x))
          for i in (0, value.images.numel() - 1) for x in (math.nan, math.inf, -math.inf)),
    ]  # fmt: skip
    for name, field, wrong in spoiled:
        twin = value.replace()
        setattr(twin, field, wrong)
        yield f"changed after it was made: {name}", twin
