"""Conversion of messages to Flower's records: bitwise equal round trips, and refusal of foreign records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distillkit import LabeledImages
from distillkit.normalization import IDENTITY
from fl import Message
from fl._codec import from_parts, to_parts
from fl.deploy.flower._messages import GridConnection, MissingFlower, app_failed, from_records, loss_reason, to_records
from fl.message import DTYPES, Tensors
from tests.fl.flower import fake_flower
from tests.refused import refused

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
names = st.text(max_size=5)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    value = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return value.transpose(0, -1) if draw(st.booleans()) and value.ndim > 1 else value


values = st.one_of(
    tensors(), st.dictionaries(names, tensors(), max_size=3), st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False), names,
)  # fmt: skip


def bits(parts: tuple[Tensors, dict[str, str]]) -> Any:
    found = {
        n: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else [])
        for n, t in parts[0].items()
    }
    return found, parts[1]


@settings(max_examples=60, deadline=None)
@given(message=st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=4), fact=names)
def test_records_round_trip_bitwise(message: dict[str, Any], fact: str) -> None:
    try:
        parts = to_parts(Message.unchecked(message), {"fact": fact})
    except (TypeError, ValueError, UnicodeEncodeError):
        return  # what no message may hold
    content = to_records(parts)
    back = from_records(content)
    assert bits(back) == bits(parts)
    again, facts = from_parts(*back)
    assert facts == {"fact": fact}
    assert [key for key, _ in again.items()] == list(message)
    if fake_flower.REAL:  # as Flower itself takes records apart and puts them together
        for record in content.values():
            assert type(record).inflate(record.deflate(), record.children).object_id == record.object_id


def test_empty_set_round_trips_with_its_space() -> None:
    given = LabeledImages(torch.rand(0, 1, 4, 4), torch.arange(0), num_classes=7, normalization=IDENTITY)
    key = "Space.images"
    back = from_parts(*from_records(to_records(to_parts(Message.unchecked({key: given})))))[0]
    (found,) = (value for _, value in back.items())
    assert isinstance(found, LabeledImages)
    assert (found.shape, found.num_classes, found.normalization, len(found)) == ((1, 4, 4), 7, IDENTITY, 0)


def spoiled(change: str) -> Any:
    app = fake_flower.app_module()
    given = {"A.x": torch.arange(6.0).reshape(2, 3), "A.b": torch.tensor([True])}
    content = to_records(to_parts(Message.unchecked(given)))
    arrays, strings = content["tensors"], content["strings"]
    x = arrays["A.x"]
    put = {
        "dtype": ("A.x", app.Array("float8", x.shape, x.stype, x.data)),
        "stype": ("A.x", app.Array(x.dtype, x.shape, "numpy.ndarray", x.data)),
        "short": ("A.x", app.Array(x.dtype, x.shape, x.stype, x.data[:-1])),
        "negative": ("A.x", app.Array(x.dtype, (-2, -3), x.stype, x.data)),
        "empty and endless": ("A.x", app.Array(x.dtype, (0, *[2**31 - 1] * 3), x.stype, b"")),
        "no boolean alone": ("A.b", app.Array("bool", (1,), x.stype, b"\x02")),
        "no boolean": ("A.b", app.Array("bool", (2,), x.stype, b"\x01\x02")),
    }
    if change in put:
        arrays.update([put[change]])
    elif change == "number among strings":
        strings["forms"] = 3
    elif change == "further record":
        content["more"] = app.ConfigRecord()
    return app.RecordDict({"tensors": arrays}) if change == "record missing" else content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dtype", r"its tensor 'A\.x' has the unsupported type 'float8', format 'distillkit\.raw/1'"),
        ("stype", "has the unsupported type 'float32', format 'numpy.ndarray'"),
        ("short", r"its tensor 'A\.x' has 23 bytes; torch\.float32 of shape \(2, 3\) takes 24"),
        ("negative", r"its tensor 'A\.x' has the shape \(-2, -3\)"),
        ("empty and endless", r"'A\.x' has the shape \(0, 2147483647"),
        ("no boolean alone", "neither true nor false"),
        ("no boolean", r"'A\.b' holds bytes that are neither true nor false"),
        ("number among strings", "its record of strings holds other values"),
        ("record missing", r"its records are \['tensors'\]"),
        ("further record", r"its records are \['more', 'strings', 'tensors'\]"),
    ],
)  # fmt: skip
def test_foreign_records_are_refused_by_name(change: str, said: str) -> None:
    refused(lambda: from_records(spoiled(change)), ValueError, said)


def test_changed_array_fails_the_checksum() -> None:
    content = spoiled("nothing")
    x = content["tensors"]["A.x"]
    content["tensors"]["A.x"] = fake_flower.app_module().Array(x.dtype, x.shape, x.stype, x.data[:-1] + b"\x01")
    refused(lambda: from_parts(*from_records(content)), ValueError, "checksum")


def test_lost_reply_is_described_with_or_without_flowers_reason() -> None:
    error = fake_flower.app_module().Error
    given = [None, *(SimpleNamespace(error=one) for one in (error(5), error(7, "it is gone")))]
    assert [loss_reason(message, 2.5) for message in given] == [
        "lost: no answer in 2.5 seconds",
        "lost: Flower says nothing (code 5)",
        "lost: Flower says it is gone (code 7)",
    ]
    replies = [SimpleNamespace(has_error=lambda: True, error=error(code)) for code in range(9)]
    assert [code for code, reply in enumerate(replies) if app_failed(reply)] == [1, 2, 7]
    assert not app_failed(None)


def test_only_recipients_that_were_not_forgotten_run_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 5.0, sleep=slept.append)
    monkeypatch.setattr("fl.deploy.flower._messages.time", clock)
    connection = GridConnection(fake_flower.Grid(None, {}), 0.5)
    connection.send("query.node", {k: (100 + k, to_parts(Message(), {})) for k in range(3)}, "7", 2.0)
    sent = [message.metadata for _, message in connection.grid._jobs]
    assert [(one.message_type, one.group_id, one.ttl) for one in sent] == [("query.node", "7", 2.0)] * 3
    connection.forget(1)
    assert [connection.is_waiting_for(k) for k in range(3)] == [True, False, True]
    for clock.monotonic, late in ((lambda: 7.0, []), (lambda: 7.01, [(0, None), (2, None)]), (lambda: 7.02, [])):
        assert connection.collect() == late
    assert slept == [0.5, 0.5]  # if nothing has come
    monkeypatch.setattr(connection.grid, "push_messages", lambda messages: ["", "b"])
    letters = {k: (100 + k, to_parts(Message(), {})) for k in range(3)}
    assert connection.send("query.node", letters, "", 2.0) == [0, 2]
    assert [connection.is_waiting_for(k) for k in range(3)] == [False, True, False]
    connection.clear()
    assert not connection.is_waiting_for(1)


def test_error_without_flower_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.deploy.flower._messages.importlib.import_module", Mock(side_effect=ImportError("old")))
    refused(lambda: to_records(to_parts(Message())), MissingFlower, r'\(old\): pip install "distillkit\[flower\]"')
