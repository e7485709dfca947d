from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from distillkit import LabeledImages, Normalization
from distillkit._utils.files import checksum
from distillkit.normalization import ZCA
from fl import EntrySpec
from fl._codec import decode, digest, encode
from fl.message import Entry, Message, declared_entries, payload_bytes
from tests.refused import refused
from tests.stored import require_same_set


class Parts:
    weights = Entry[dict]("mean")
    pictures = Entry[LabeledImages]("union")
    number = Entry[float]("sum")
    text = Entry[str]("first")
    vector = Entry[torch.Tensor]("sum")


class MoreParts(Parts):
    extra = Entry[float]("max")


def full(seed: int = 0) -> Message:
    g = torch.Generator().manual_seed(seed)
    zca = ZCA(torch.zeros(12), torch.eye(12), torch.eye(12))
    pictures = LabeledImages(
        torch.randn(4, 3, 2, 2, generator=g),
        torch.tensor([0, 2, 1, 1]),
        num_classes=5,
        normalization=Normalization((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), zca),
        columns={"logits": torch.randn(4, 5, generator=g)},
        info={"method": "DM", "steps": 3},
    )
    weights = {"a/b.c": torch.randn(2, 3, generator=g), "n": torch.tensor(7)}
    values = {Parts.pictures: pictures, Parts.number: 2.5, Parts.text: "grüezi"}
    return Message({Parts.weights: weights, **values, Parts.vector: torch.randn(0, 3, generator=g)})


def test_entry_is_named_after_its_class_and_inherited_ones_declared() -> None:
    assert Parts.number.key == "Parts.number"
    assert [e.key for e in declared_entries(MoreParts())] == [
        "Parts.weights", "Parts.pictures", "Parts.number", "Parts.text", "Parts.vector", "MoreParts.extra",
    ]  # fmt: skip
    again = type("Other", (), {"alias": Parts.number}).alias  # type: ignore[attr-defined]
    assert (again.key, again.owner) == ("Parts.number", f"{__name__}.Parts")


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "median"}, {"rule": "max", "by": Parts.number}, {"by": 3},
    ],
)  # fmt: skip
def test_contradictory_options_of_entries_are_refused(options: dict) -> None:
    refused(lambda: Entry(**options), (TypeError, ValueError), "^(rule|by)")


@pytest.mark.parametrize(
    "options",
    [
        {"value": None}, {"value": [1.0]}, {"max_rows": -1}, {"max_per_class": 2.5}, {"minimum": math.nan},
        {"maximum": "1"}, {"max_norm": True}, {"minimum": 2, "maximum": 1}, {"max_norm": -1.0}, {"max_unit": None},
        {"nonnegative": "weight"}, {"same_rows_as": "number"}, {"max_per_class": -1}, {"max_ratio": math.nan},
    ],
)  # fmt: skip
def test_specifications_that_no_reply_can_match_are_refused(options: dict) -> None:
    name = "minimum" if "max_norm" in options and options["max_norm"] == -1 else next(iter(options))
    refused(lambda: EntrySpec(**{"value": 1.0, **options}), (TypeError, ValueError), name)


def test_message_round_trips_bitwise() -> None:
    message, facts = decode(encode(full(), {"round": "3"}))
    want = full()
    assert facts == {"round": "3"}
    assert message[Parts.number] == 2.5
    assert message[Parts.text] == "grüezi"
    assert message[Parts.vector].shape == (0, 3)
    for name, tensor in want[Parts.weights].items():
        assert torch.equal(message[Parts.weights][name], tensor)
        assert message[Parts.weights][name].dtype == tensor.dtype
    got, expected = message[Parts.pictures], want[Parts.pictures]
    require_same_set(got, expected)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_or_missing_byte_is_detected(place: int, value: int) -> None:
    data = encode(full())
    place %= len(data)
    if data[place] != value:
        with pytest.raises(ValueError, match="damaged|checksum|not a message"):
            decode(data[:place] + bytes([value]) + data[place + 1 :])
    refused(lambda: decode(data[:place]), ValueError, "damaged|not a message")


def test_sizes_count_payload_by_entry() -> None:
    assert payload_bytes(full()) == {
        "Parts.weights": 2 * 3 * 4 + 8,
        "Parts.pictures": 4 * 12 * 4,
        "Parts.pictures:labels": 4 * 8,
        "Parts.pictures:logits": 4 * 5 * 4,
        "Parts.number": 8,
        "Parts.text": 7,
        "Parts.vector": 0,
    }


def test_digest_changes_only_with_the_content() -> None:
    pictures = full()[Parts.pictures]
    again = full()[Parts.pictures]
    assert digest("k", pictures) == digest("k", again)
    other = pictures.images.clone()
    other[0, 0, 0, 0] += 1e-6
    assert digest("k", pictures.replace(images=other)) != digest("k", again)
    assert digest("k", pictures.replace(info={})) != digest("k", again)


def test_wrong_values_and_unknown_entries_are_refused_by_name() -> None:
    message = Message()
    with pytest.raises(TypeError, match=r"Parts\.number must be a tensor"):
        message[Parts.number] = [1, 2]
    with pytest.raises(TypeError, match=r"Parts\.weights must map names to tensors"):
        message[Parts.weights] = {"a": 3}
    with pytest.raises(TypeError, match=r"Parts\.weights must map names to tensors, but 3 does not"):
        message[Parts.weights] = {"a": torch.zeros(1), 3: torch.zeros(1)}
    refused(lambda: message[Parts.text], KeyError, r"holds no 'Parts\.text'")
    with pytest.raises(ValueError, match="declared as a class attribute"):
        message[Entry()] = 1.0
    assert message.get(Parts.number, 4.0) == 4.0


def test_changing_a_copy_leaves_the_original_unchanged() -> None:
    message = full()
    twin = message.copy()
    del twin[Parts.text]
    assert Parts.text in message
    assert Parts.text not in twin


# Bytes from anywhere.


def written(forms: Any, tensors: dict[str, torch.Tensor] | None = None, **meta: str) -> bytes:
    """Write a file with a valid checksum and any header."""
    tensors = tensors or {}
    text = forms if isinstance(forms, str) else json.dumps(forms)
    meta = {"format": "distillkit.Message/1", "forms": text, **meta}
    return save(tensors, metadata={**meta, "checksum": checksum(tensors, meta)})


def parts_of(message: Message) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the header and the tensors of an encoded message."""
    data = encode(message)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["forms"]), load(data)


ONE = {"t": torch.ones(2)}
SET: dict[str, Any] = {"kind": "set", "names": ["images", "labels"], "mean": [0.0], "std": [1.0], "num_classes": 2}
SET |= {"info": {}, "measured": False, "given": True}
PIXELS = {"s\x1fimages": torch.zeros(2, 1, 2, 2), "s\x1flabels": torch.tensor([0, 1])}


def changed(**fields: Any) -> dict[str, Any]:
    return {"s": {**SET, **fields}}


FORM = "t: its form is none of tensor, group, set, plain with their fields"
NAMES = "t: its tensors' names must be a list of different strings"
INVALID = "s is not a valid set: "
FLAGS = f"{INVALID}its info must be a map, and measured and given true or false"


@pytest.mark.parametrize(
    ("forms", "tensors", "said"),
    [
        ({"t": {"kind": "plain", "value": None}}, {}, "t must be a tensor, a dict of tensors, .* got NoneType"),
        ({"t": {"kind": "plain", "value": [1]}}, {}, "t must be a tensor, a dict of tensors, .* got list"),
        ({"t": {"kind": "plain"}}, {}, FORM),
        ('{"t": {"kind": "plain", "value": NaN}}', {}, "t must be finite, got nan"),
        ('{"t": {"kind": "plain", "value": 1e999}}', {}, "t must be finite, got inf"),
        (f'{{"t": {{"kind": "plain", "value": 1{"0" * 400}}}}}', {}, "t must fit in 64 bits"),
        ({"t": {"kind": "plain", "value": "\ud800"}}, {}, "t must be Unicode text"),
        ({"t": {}}, ONE, FORM),
        ({"t": {"kind": "tensor", "names": []}}, ONE, FORM),
        ({"t": {"kind": "table"}}, ONE, FORM),
        ({"t": {"kind": ["tensor"]}}, ONE, FORM),
        ({"t": "tensor"}, ONE, FORM),
        ({"u": {"kind": "tensor"}}, ONE, "its tensor 'u' is missing"),
        ({}, ONE, "its tensor 't' belongs to no entry"),
        ({"t": {"kind": "tensor"}, "u": {"kind": "tensor"}}, ONE, "its tensor 'u' is missing"),
        ({"t": {"kind": "group", "names": ["a"]}}, ONE, r"its tensor 't\x1fa' is missing"),
        ({"t": {"kind": "group", "names": ["a", "a"]}}, {"t\x1fa": torch.ones(2)}, NAMES),
        ({"t": {"kind": "group", "names": [1]}}, {"t\x1f1": torch.ones(2)}, NAMES),
        ({"t": {"kind": "group", "names": "a"}}, {"t\x1fa": torch.ones(2)}, NAMES),
        ([["t", {"kind": "tensor"}]], ONE, "its forms must be a map from keys"),
        *((text, {}, "its forms must be a map from keys") for text in ('"t"', "3", "null")),
        *((text, {}, "not a message: ") for text in ("{", "[" * 100_000)),
        (changed(names=["images"]), PIXELS, "KeyError: 'labels'"),
        *((changed(names=[*names, "zca.matrix"]), {**PIXELS, "s\x1fzca.matrix": torch.eye(4)}, "'zca.center'")
          for names in (SET["names"], SET["names"][::-1])),
        *((changed(names=[*names, "more"]), {**PIXELS, "s\x1fmore": torch.eye(4)}, "parts ['more'] are unknown")
          for names in (SET["names"], SET["names"][::-1])),
        (changed(mean=None), PIXELS, f"{INVALID}its mean must be a list of numbers"),
        (changed(mean=[True]), PIXELS, f"{INVALID}its mean must be a list of numbers"),
        (changed(std=["1"]), PIXELS, f"{INVALID}its std must be a list of numbers"),
        (changed(mean=[]), PIXELS, f"{INVALID}ValueError"),
        (changed(std=[0.0]), PIXELS, f"{INVALID}ValueError"),
        (changed(num_classes=1), PIXELS, f"{INVALID}ValueError"),
        (changed(num_classes=2.0), PIXELS, f"{INVALID}TypeError"),
        (changed(num_classes=None), PIXELS, "s: num_classes must be a tensor, .* got NoneType"),
        (changed(info=[1]), PIXELS, FLAGS),
        (changed(measured=1), PIXELS, FLAGS),
        (changed(given=None), PIXELS, FLAGS),
        (changed(more=1), PIXELS, FORM.replace("t:", "s:")),
        (changed(), {**PIXELS, "s\x1flabels": torch.tensor([0, -1])}, f"{INVALID}ValueError"),
        (changed(), {**PIXELS, "s\x1fimages": torch.full((2, 1, 2, 2), torch.nan)}, f"{INVALID}ValueError"),
        (changed(), {**PIXELS, "s\x1fimages": torch.zeros(2, 4)}, f"{INVALID}ValueError"),
        *(({"t": {"kind": "tensor"}}, {"t": torch.ones(2).to(dtype)}, f"its tensor 't' has dtype {dtype}")
          for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint64)),
    ],
)  # fmt: skip
def test_invalid_content_raises_value_error(forms: Any, tensors: dict[str, torch.Tensor], said: str) -> None:
    refused(lambda: decode(written(forms, tensors)), ValueError, re.escape(said).replace(r"\.\*", ".*"))


def test_bytes_without_a_header_and_other_files_are_refused() -> None:
    forms, tensors = parts_of(full())
    decode(written(forms, tensors))
    meta = {"format": "distillkit.Message/1"}
    bare = save(tensors, metadata={**meta, "checksum": checksum(tensors, meta)})
    other = written(forms, tensors, format="distillkit.Message/2")
    for data in (bare, other, save(tensors), b"", b"\0" * 8, b"\xff" * 40, (2).to_bytes(8, "little") + b"[]"):
        with pytest.raises(ValueError, match=r"damaged|not a message"):
            decode(data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.randoms(use_true_random=False), anything, st.sampled_from(["field", "form", "drop", "tensor", "add"]))
def test_any_header_gives_a_message_or_a_value_error(random: Any, value: Any, what: str) -> None:
    """An accepted message can be encoded again."""
    forms, tensors = parts_of(full())
    key = random.choice(sorted(forms))
    field = random.choice(sorted(forms[key]))
    if what == "field":
        forms[key][field] = value
    elif what == "form":
        forms[key] = value
    elif what == "drop":
        del forms[key][field]
    elif what == "tensor":
        del tensors[random.choice(sorted(tensors))]
    else:
        forms[key][str(value)[:9]] = value
    try:
        message, _ = decode(written(forms, tensors))
    except ValueError:
        return
    again, _ = decode(encode(message))
    assert payload_bytes(again) == payload_bytes(message)


def test_unsupported_values_are_refused_when_encoded() -> None:
    for value in (math.nan, math.inf, None, True, 10**400, [1], torch.zeros(2, dtype=torch.complex64), "\ud800"):
        with pytest.raises((TypeError, ValueError), match=r"Parts\.number"):
            encode(Message.unchecked({Parts.number.key: value}))  # type: ignore[dict-item]


def test_misuse_of_a_message_is_refused() -> None:
    message: Any = full()
    name = Parts.number.key
    with pytest.raises(AttributeError, match="h"):
        message.h = torch.zeros(2)
    refused(lambda: list(message), TypeError, r"`items\(\)` yields")
    for use in (lambda: message[name], lambda: message.get(name), lambda: name in message):
        refused(use, TypeError, r"by an Entry, got 'Parts.number'")
    refused(lambda: message.__delitem__(MoreParts.extra), KeyError, "holds no 'MoreParts.extra'")
