from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from distillkit.normalization import ZCA
from fl.codec import decode, digest, encode
from fl.message import Entry, Message, declared, sizes


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
    return Message(
        {
            Parts.weights: {"a/b.c": torch.randn(2, 3, generator=g), "n": torch.tensor(7)},
            Parts.pictures: pictures,
            Parts.number: 2.5,
            Parts.text: "grüezi",
            Parts.vector: torch.randn(0, 3, generator=g),
        }
    )


def test_an_entry_is_named_after_its_class_and_inherited_ones_are_declared() -> None:
    assert Parts.number.key == "Parts.number"
    assert [e.key for e in declared(MoreParts())] == [
        "Parts.weights", "Parts.pictures", "Parts.number", "Parts.text", "Parts.vector", "MoreParts.extra",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "median"}, {"reduce": "sum", "over": 2.0}, {"reduce": "max", "by": Parts.number},
        {"by": Parts.number, "over": 2.0}, {"over": 0.0}, {"bound": -1.0},
    ],
)  # fmt: skip
def test_contradictory_rules_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="reduce|by|over|bound"):
        Entry(**options)


def test_encode_then_decode_gives_every_bit_back() -> None:
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
    assert torch.equal(got.images, expected.images)
    assert torch.equal(got.columns["logits"], expected.columns["logits"])
    assert got.normalization == expected.normalization
    assert got.info == expected.info
    assert got.num_classes == 5


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_or_missing_byte_is_noticed(place: int, value: int) -> None:
    data = encode(full())
    place %= len(data)
    if data[place] != value:
        with pytest.raises(ValueError, match="damaged|checksum|not a message"):
            decode(data[:place] + bytes([value]) + data[place + 1 :])
    with pytest.raises(ValueError, match="damaged|not a message"):
        decode(data[:place])


def test_sizes_count_payload_by_entry() -> None:
    assert sizes(full()) == {
        "Parts.weights": 2 * 3 * 4 + 8,
        "Parts.pictures": 4 * 12 * 4,
        "Parts.pictures:labels": 4 * 8,
        "Parts.pictures:logits": 4 * 5 * 4,
        "Parts.number": 8,
        "Parts.text": 7,
        "Parts.vector": 0,
    }


def test_a_digest_changes_with_content_and_only_then() -> None:
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
    with pytest.raises(KeyError, match=r"holds no 'Parts\.text'"):
        message[Parts.text]
    with pytest.raises(ValueError, match="declared as a class attribute"):
        message[Entry()] = 1.0
    assert message.get(Parts.number, 4.0) == 4.0


def test_a_copy_can_be_changed_alone() -> None:
    message = full()
    twin = message.copy()
    del twin[Parts.text]
    assert Parts.text in message
    assert Parts.text not in twin
