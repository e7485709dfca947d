"""Transcripts: read without the federated layer that wrote them, and refused after any change."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.transcript import DamagedTranscript, NoTranscript, read_transcript
from distillkit import LabeledImages, Normalization
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.rng import derive
from fl.engine.store import Store
from fl.message import Message
from tests.refused import refused


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (10 * torch.randn(shape, generator=derive(seed))).to(dtype)


def small_set(seed: int) -> LabeledImages:
    return LabeledImages(
        tensor(seed, 4, 1, 3, 3), [0, 1, 1, 2], num_classes=4, normalization=Normalization((0.3,), (0.5,)),
        columns={"logits": tensor(seed + 1, 4, 2)}, info={"ipc": 2},
    )  # fmt: skip


VALUES = st.one_of(
    st.builds(tensor, st.integers(0, 99), st.integers(0, 3), dtype=st.sampled_from([torch.float32, torch.int64])),
    st.builds(lambda s: {"w": tensor(s, 2, 2), "deep.bias": tensor(s + 1)}, st.integers(0, 99)),
    st.builds(lambda seed, n: small_set(seed)[:n], st.integers(0, 99), st.sampled_from([0, 4])),
    st.integers(-9, 9), st.floats(-1, 1), st.text(max_size=3),
)  # fmt: skip


def plain(value: object) -> object:
    """Return a value in types that compare with `==`, and its own type."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, LabeledImages):
        value = dict(enumerate(value.parts()))
    return [(key, plain(one)) for key, one in value.items()] if isinstance(value, dict) else (type(value), value)


@settings(max_examples=20)
@given(values=st.dictionaries(st.text(st.characters(codec="ascii", categories=("L", "P")), min_size=1), VALUES))
def test_transcript_of_the_federated_layer_is_read(
    values: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("run")
    for exchange in ("announce", "local"):
        Store(out).record(3, 12, "up", Message.unchecked(values), exchange)
    for seen, exchange in zip(read_transcript(out), ("announce", "local"), strict=True):
        assert (seen.round, seen.client, seen.direction, seen.exchange) == (3, 12, "up", exchange)
        assert plain(seen.values) == plain(values)
    assert set(seen.sets) == {k for k, v in values.items() if isinstance(v, LabeledImages)}


def run(out: Path) -> Path:
    store = Store(out)
    for number in (10, 2):
        for client in (11, 3):
            for direction in ("up", "down"):
                store.record(number, client, direction, Message.unchecked({"set": small_set(client), "n": number}))
    return out


def test_messages_are_selected_by_round_client_and_direction(tmp_path: Path) -> None:
    (run(tmp_path) / "transcript" / "2" / "3-up.safetensors.tmp").touch()
    (tmp_path / "transcript" / "7").touch()
    (tmp_path / "transcript" / "²").mkdir()  # a digit, and no number
    found = [(s.round, s.client, s.direction) for s in read_transcript(tmp_path)]
    assert found == [(r, c, d) for r in (2, 10) for c in (3, 11) for d in ("down", "up")]


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_altered_bits_are_detected(place: float, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("run")
    Store(out).record(1, 0, "up", Message.unchecked({"set": small_set(0), "model": {"w": tensor(0, 3)}, "n": 0.5}))
    path = out / "transcript" / "1" / "0-up.safetensors"
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    if b"\\u001F" in data:  # the same JSON as before
        return
    refused(lambda: list(read_transcript(out)), DamagedTranscript, "0-up.safetensors")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_messages_are_refused(size: int, tmp_path: Path) -> None:
    path = run(tmp_path) / "transcript" / "2" / "11-down.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    messages = read_transcript(tmp_path)
    assert [next(messages).client for _ in range(2)] == [3, 3]
    refused(lambda: next(messages), DamagedTranscript, f"{path} is damaged")


def test_message_in_anothers_place_is_refused(tmp_path: Path) -> None:
    place = run(tmp_path) / "transcript" / "2"
    for client, number in ((11, 2), (3, 10)):
        (place / "3-up.safetensors").write_bytes((place.parent / f"{number}/{client}-up.safetensors").read_bytes())
        said = f"3-up.safetensors is the message of client {client} in round {number}: the files .* mixed up"
        refused(lambda: list(read_transcript(tmp_path)), DamagedTranscript, said)
    path = place / "3-down.safetensors"  # the first that is read
    tensors, facts = read_tensors(path, kind="distillkit.Message/1", content="a message")
    for name in ("round", "client"):
        write_tensors(path, tensors, {key: value for key, value in facts.items() if key != name})
        refused(lambda: list(read_transcript(tmp_path)), DamagedTranscript, f"message of .*{name} None")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = run(tmp_path) / "transcript" / "2" / "3-up.safetensors"
    small_set(0).save(path)
    refused(lambda: list(read_transcript(tmp_path)), DamagedTranscript, "is not a message")


@pytest.mark.parametrize(
    ("forms", "why"),
    [
        ({"set": {"kind": "cube", "names": []}}, "ValueError: set is of the unknown kind 'cube'"),
        ({"set": {"kind": "tensor"}}, "KeyError: 'set'"),
        ([], "AttributeError: "),
        ({"set": 3}, "TypeError: 'int'"),
    ],
    ids=["kind", "absent", "list", "number"],
)
def test_valid_file_with_unknown_entries_is_refused(forms: object, why: str, tmp_path: Path) -> None:
    """As another version of the federated layer might write; its checksum is valid."""
    path = run(tmp_path) / "transcript" / "2" / "3-up.safetensors"
    tensors, facts = read_tensors(path, kind="distillkit.Message/1", content="a message")
    write_tensors(path, tensors, {**facts, "forms": json.dumps(forms)})
    refused(lambda: list(read_transcript(tmp_path)), DamagedTranscript, rf"3-up.* is damaged \({why}")


def test_folder_without_messages_explains_how_to_keep_them(tmp_path: Path) -> None:
    for odd in (None, 3, b"run", [tmp_path]):
        refused(partial(read_transcript, odd), TypeError, "folder must be a path")  # type: ignore[arg-type]
    refused(lambda: read_transcript(tmp_path / "nowhere"), NoTranscript, "nowhere does not exist")
    refused(lambda: read_transcript(tmp_path), NoTranscript, "transcript holds no messages: .*transcript=True")
    (tmp_path / "file").touch()
    refused(lambda: read_transcript(tmp_path / "file"), NotADirectoryError, "folder must be a folder, but .* is a file")
