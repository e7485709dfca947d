"""The report inverts one client's update: true findings, no false ones, and reasons for omissions."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import report
from attacks.inversion import FedAvgUpdate, Gradient
from attacks.matching import align
from attacks.metrics import psnr
from attacks.reporting import DamagedRun, IncompatibleImages, Inversion
from attacks.reporting._evidence import Records
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import open_run
from attacks.reporting.inversion import (
    _compare_nearest,
    _compare_own,
    _draw_held_out,
    fedavg_update,
    message_pair,
    record_counts,
)
from attacks.transcript import TranscriptMessage
from distillkit import LabeledImages
from distillkit._utils.pages import image_grid
from distillkit._utils.tables import Table
from distillkit.data import clients, load
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from fl import FedAvg, RunFolder, simulate
from fl.engine.store import Store
from fl.message import Message
from tests.refused import refused

DIGITS = load("digits", size=8)
TRAIN, TEST = DIGITS.train[:60], DIGITS.test[:150]
OWNERS = [torch.arange(3, 60), torch.arange(3)]
FACTORY = partial(ConvNet, (1, 8, 8), width=8, depth=1, norm="none", activation="tanh")
KEPT = {"optimizer": {"object": "fl:ClientOptimizer", "with": {"name": "sgd", "state": "client"}}}
THREE = {"phases": [{"object": "fl:Phase", "with": {"epochs": 1, "steps": 3, "train": "*"}}]}
DECAYING = {"optimizer": {"object": "fl:ClientOptimizer", "with": {"name": "sgd", "lr_decay": 0.5}}}
GIVEN: dict[str, Any] = {"members": TRAIN, "non_members": TEST, "network": FACTORY(10)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    method = FedAvg(factory=FACTORY, lr=0.1, batch=32)
    simulate(method, clients(TRAIN, OWNERS), rounds=1, seed=0, out=RunFolder(out, transcript=True), progress=False)
    return out


def altered(run: Path, to: Path, **settings: Any) -> Path:
    copy = Path(shutil.copytree(run, to))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["method"]["with"] |= settings
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def test_records_of_an_update_are_reconstructed(run: Path, tmp_path: Path) -> None:
    found = report(run, **GIVEN, invert=Inversion(owners=OWNERS, steps=100), out=tmp_path)
    [line] = [line for line in found.leaks if line.startswith("inverting the update")]
    assert line.startswith("inverting the update of client 1 (the fewest records) in round 1 recovers ")
    assert "of its 3 records above 20 dB" in line
    assert found.verdict == f"This run leaks: {line}."
    text = found.markdown.read_text(encoding="utf-8")
    assert "and were as close 0 times" in text
    assert "| the client's records " in text
    assert "labels inferred from the message" in text


def test_non_members_as_records_are_not_found(run: Path, tmp_path: Path) -> None:
    """Equal images, but the owners name three other members of those classes, so nothing may be found."""
    wanted = TRAIN.labels[OWNERS[1]].tolist()
    others = torch.tensor([int((TRAIN.labels[10:] == k).nonzero()[0]) + 10 for k in wanted])
    found = report(run, **GIVEN, invert=Inversion(owners=[OWNERS[0], others], steps=100), out=tmp_path)
    assert not [line for line in found.leaks if "inverting" in line]
    assert any(line.startswith("inverting the update of client 1") for line in found.not_found)


def test_without_owners_images_are_shown_and_not_scored(run: Path, tmp_path: Path) -> None:
    found = report(run, **GIVEN, invert=Inversion(steps=5), out=tmp_path)
    assert not [line for line in [*found.leaks, *found.not_found] if "inverting" in line]
    assert any("give invert=Inversion(owners=...)" in line for line in found.missing)
    text = found.markdown.read_text(encoding="utf-8")
    assert "| the nearest private record of 60 " in text
    assert "| the nearest held-out image of 150 " in text


@pytest.mark.parametrize(
    ("invert", "said", "remedy"),
    [
        (Inversion(owners=OWNERS, client=0), "covers 57 records; from more than 16", "Inversion(max_records=57)"),
        (Inversion(owners=OWNERS, steps=10**7, restarts=10**6), "more than the 60 s allowed", "Inversion(seconds="),
    ],
    ids=["large", "long"],
)
def test_too_many_records_are_left_out_with_a_note(
    invert: Inversion, said: str, remedy: str, run: Path, tmp_path: Path
) -> None:
    found = report(run, **GIVEN, invert=invert, out=tmp_path)
    text = found.markdown.read_text(encoding="utf-8")
    assert said in text
    assert invert.restarts == 1 or re.search(r"about \d{9,} s", text)
    assert any(said in line and remedy in line for line in found.missing)
    assert not any("inverting" in line for line in [*found.leaks, *found.not_found])


def test_messages_that_cannot_be_replayed_are_noted(run: Path, tmp_path: Path) -> None:
    for number, (settings, said) in enumerate(
        [
            ({"optimizer": "adam"}, "run's optimizer cannot be"),
            (KEPT, "run's optimizer cannot be"),
            ({"weights": "uniform"}, "number of records"),
        ]
    ):
        other = altered(run, tmp_path / str(number), **settings)
        assert any(said in line for line in report(other, **GIVEN).missing)
    assert any("give network=" in line for line in report(run, members=TRAIN, out=tmp_path).missing)
    assert any("give members=" in line and "update" in line for line in report(run, out=tmp_path).missing)
    assert any("not None" in line for line in report(run, **GIVEN, invert=None, out=tmp_path).missing)


def test_replay_from_the_folder_equals_the_clients_training(run: Path, tmp_path: Path) -> None:
    """The folder's options reproduce the sent update from the client's own images."""
    for number, (said, epochs, lr) in enumerate([({}, 1, 0.1), (THREE, 3, 0.1), (DECAYING, 1, 0.05)]):
        folder = open_run(altered(run, tmp_path / str(number), **said))
        down, up = message_pair(folder, 1, None)
        later = replace(up, round=2) if said is DECAYING else up
        observed_message = fedavg_update(folder, FACTORY(10), down, later, 3)
        own = TRAIN[OWNERS[1]]
        expected = FedAvgUpdate.of(observed_message.network, own.images, own.labels, lr=lr, epochs=epochs)
        for one, other in zip(observed_message.replay(own.images, own.labels), expected.observed, strict=True):
            torch.testing.assert_close(one, other)
        if not number:
            for one, other in zip(observed_message.observed, expected.observed, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ordered", [False, True])
def test_user_defined_message_is_inverted(run: Path, tmp_path: Path, ordered: bool) -> None:
    """Outsiders' images help to read the labels, unless the order of the labels is tried."""
    asked: list[tuple[str, str]] = []
    looked: list[Tensor] = []

    class Sent(Gradient):
        def read_labels(self, count: int, noise: Tensor) -> Tensor:
            looked.append(noise)
            return super().read_labels(count, noise)

    def observed_message(down: TranscriptMessage, up: TranscriptMessage) -> Gradient:
        asked.append((down.direction, up.direction))
        own = TRAIN[OWNERS[1]]
        network = build(lambda: FACTORY(10), 0)
        sent = Sent(network, Gradient.of(network, own.images, own.labels).observed)
        sent.ordered = ordered
        return sent

    given = Inversion(owners=OWNERS, build_message=observed_message, steps=20 if ordered else 100)
    found = report(run, **GIVEN, invert=given, out=tmp_path)
    assert asked == [("down", "up")]
    assert ordered or any("inverting" in line for line in found.leaks)
    near = [torch.cdist(x.flatten(1), TEST.images.flatten(1)).amin(1) < 0.1 for x in looked]
    assert {bool(x.all()) for x in near} == {bool(x.any()) for x in near} == {not ordered}


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    lost = Inversion(owners=OWNERS, build_message=lambda down, up: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="the result of build_message must be an ObservedMessage"):
        report(run, **GIVEN, invert=lost, out=tmp_path)
    with pytest.raises(IncompatibleImages, match="members and non_members must not share records"):
        report(run, **{**GIVEN, "non_members": GIVEN["members"]}, out=tmp_path)
    place = Path(shutil.copytree(run, tmp_path / "run"))
    (place / "history.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DamagedRun, match=r"history\.jsonl holds 0 rounds, but the checkpoint is of round"):
        report(place)


def test_training_of_several_exchanges_is_inverted(run: Path, tmp_path: Path) -> None:
    """Names of other exchanges may sort before that of the training."""
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    asked = Message.unchecked({"Keys.public": torch.ones(4)})
    for client, direction in ((0, "down"), (0, "up"), (1, "down"), (1, "up"), (2, "down"), (2, "up")):
        store.record(1, client, direction, asked, "announce")
    folder = open_run(store.out)
    for down, up in (message_pair(folder, 1, None), message_pair(folder, 1, 1)):
        assert [(seen.exchange, list(seen.values)[-1]) for seen in (down, up)] == [
            ("local", "FedAvg.model"), ("local", "FedAvg.update")
        ]  # fmt: skip
    owners = [*OWNERS, torch.arange(1)]  # the third never came to the training
    assert record_counts(folder, Inversion(owners=owners)) == {0: 57, 1: 3}


def test_known_labels_without_non_members_find_nothing(run: Path, tmp_path: Path) -> None:
    """Without non_members there is no reference similarity, so nothing is found at any similarity."""
    known = Inversion(owners=OWNERS, known_labels=True, steps=5)
    found = report(run, members=TRAIN, network=FACTORY(10), invert=known, out=tmp_path)
    text = found.markdown.read_text(encoding="utf-8")
    assert "labels known" in text
    assert "| the client's records " in text
    assert "held-out images " not in text.split("## Inversion")[1].split("## ")[0]
    assert "whether the inverted images are more than similar to the records: give non_members=" in found.missing
    alone = report(run, members=TRAIN, network=FACTORY(10), invert=Inversion(steps=5), out=tmp_path)
    text = alone.markdown.read_text(encoding="utf-8")
    assert "and below each the nearest private record." in text
    assert "the nearest held-out image" not in text
    for one in (found, alone):
        assert not [line for line in [*one.leaks, *one.not_found] if "inverting" in line]


def test_run_without_messages_is_left_out(run: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(bare / "transcript")
    invert = Inversion(build_message=lambda down, up: pytest.fail("nothing was sent"))
    found = report(bare, **GIVEN, invert=invert)
    [line] = [line for line in found.missing if "update of a single client" in line]
    assert "the run kept no transcript; run again with simulate(..., out=RunFolder(path, transcript=True))" in line


def records(labels: list[int], data: bool = True) -> Records:
    pixels = torch.rand(len(labels), 1, 2, 2, generator=derive(len(labels)))
    made = LabeledImages(pixels, labels, num_classes=4) if data else None
    return Records(pixels, torch.arange(len(labels)), made)


def test_non_members_have_the_records_classes_if_possible() -> None:
    inside, own = records([0, 1, 1, 2]), torch.tensor([0, 1, 2])
    ours = [0, 1, 1]
    for labels, kept in (([1, 0, 3, 1, 0], True), ([0, 1, 3, 3, 3], False)):
        drawn = _draw_held_out(inside, own, records(labels))
        classes = [sorted(torch.tensor(labels)[index].tolist()) for index in drawn]
        assert all(len(index.unique()) == 3 for index in drawn)
        assert all(one == ours for one in classes) == kept
    unknown = _draw_held_out(inside, own, records([0, 1, 3, 3, 3], data=False))
    assert {int(i) for index in unknown for i in index} == set(range(5))
    with pytest.raises(ValueError, match="non_members must be at least 3, the inverted records, got 2"):
        _draw_held_out(inside, own, records([1, 1]))


def test_similar_reconstructions_are_found_below_the_threshold() -> None:
    """Noise over the records: none is reconstructed, but no other image is as close. Noise over grey: none is."""
    inside, outside = (Records(one.pixels(), torch.arange(len(one)), one) for one in (TRAIN, TEST))
    own, truth = OWNERS[1], TRAIN.pixels()[OWNERS[1]]
    noise = 0.2 * torch.randn(truth.shape, generator=derive(0))
    hidden, nothing = Section("hidden"), Section("nothing")
    _compare_own(hidden, (truth + noise).clamp(0, 1), own, inside, outside, "client 1")
    _compare_own(nothing, (0.5 + noise).clamp(0, 1), own, inside, outside, "client 1")
    [(_, line)] = hidden.leaks
    aligned = [row[2].split()[0] for part in hidden.parts if isinstance(part, Table) for row in part.cells]
    assert re.findall(r"[\d.]+", line.partition("(")[2]) == aligned
    assert line.startswith("inverting the update of client 1 recovers images closer to its records than to others (")
    [(_, line)] = nothing.negatives
    assert line.startswith("inverting the update of client 1 recovers images no closer to its records than to others (")
    assert not [*hidden.negatives, *nothing.leaks]


def test_pictures_show_recovered_images_above_records() -> None:
    inside, own = Records(TRAIN.pixels(), torch.arange(60), TRAIN), OWNERS[1]
    truth = inside.pixels[own]
    for outside, more in ((None, []), (Records(truth.flip(0), torch.arange(3), None), [truth])):
        _compare_nearest(shown := Section("nearest"), truth, inside, outside)
        assert shown.parts[0].png == image_grid([truth, truth, *more], "").png
    noisy = (0.5 * truth + 0.2 + 0.1 * torch.randn(truth.shape, generator=derive(0))).clamp(0, 1)
    order = psnr(fitted := align(noisy, truth), truth).argsort(descending=True)
    _compare_own(shown := Section("own"), noisy.flip(0), own, inside, None, "client 1")
    assert shown.parts[0].png == image_grid([noisy[order], fitted[order], truth[order]], "").png


def test_client_without_a_reply_has_no_message_pair(run: Path, tmp_path: Path) -> None:
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    store.record(
        2, 0, "up", Message.unchecked({"FedAvg.update": {"w": torch.ones(1)}})
    )  # a reply without a stored request
    folder = open_run(store.out)
    assert message_pair(folder, 0, None)[0].round == 1
    for client, number in ((0, 2), (5, 1)):
        with pytest.raises(ValueError, match=f"round must be one that client {client} answered, got {number}"):
            message_pair(folder, client, number)


def test_refusals(run: Path, tmp_path: Path) -> None:
    def build(down: TranscriptMessage, up: TranscriptMessage) -> Gradient:
        return Gradient.of(FACTORY(10), TRAIN.images[:3], TRAIN.labels[:3])

    beyond = [OWNERS[0], torch.arange(58, 61)]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"invert": True}, "invert must be of attacks.reporting.Inversion, got bool"),
        ({"invert": Inversion(client=7)}, r"client must be one that holds records and answered, \[0, 1\], got 7"),
        ({"invert": Inversion(client=1, round=4)}, r"round must be one in which a client answered, \[1\], got 4"),
        ({"invert": Inversion(owners=beyond)}, "owners must be .* of members, 0 to 59, got 58 to 60: give members="),
        ({"network": ConvNet((1, 8, 8), 10, width=4, depth=1)}, "network must have the run's architecture"),
        (
            {"members": TRAIN.pixels(), "network": None,
             "invert": Inversion(owners=OWNERS, known_labels=True, build_message=build)},
            "members must be LabeledImages if known_labels is set",
        ),
    ]  # fmt: skip
    for changed, said in cases:
        given = {**GIVEN, "non_members": None, "invert": Inversion(owners=OWNERS), **changed}
        refused(lambda given=given: report(run, **given, out=tmp_path), (TypeError, ValueError), said)
    refused(
        lambda: Inversion(known_labels=True), ValueError, "known_labels needs the client's records: give owners too"
    )
    for wrong in (torch.rand(3), torch.ones(3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.long), [1]):
        for owners in ([wrong, OWNERS[1]], [OWNERS[0], wrong]):
            refused(lambda owners=owners: Inversion(owners=owners), TypeError, "owners must be int tensors")
    for name, value in (
        ("max_records", 0),
        ("steps", 0),
        ("restarts", 0),
        ("seconds", -1.0),
        ("total_variation", -1.0),
    ):
        refused(lambda name=name, value=value: Inversion(**{name: value}), ValueError, f"{name} must be")
    assert not list(tmp_path.iterdir())
