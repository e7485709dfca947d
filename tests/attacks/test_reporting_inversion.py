"""The report inverts one client's update: true findings, no false ones, and reasons for omissions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import report
from attacks.inversion import FedAvgUpdate, Gradient
from attacks.matching import align
from attacks.metrics import psnr
from attacks.reporting import Inversion
from attacks.reporting._evidence import Evidence, ObservedData, Records
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import open_run
from attacks.reporting.inversion import (
    _compare_nearest,
    _compare_own,
    _draw_held_out,
    fedavg_update,
    inversion_section,
    message_pair,
    record_counts,
    replay_obstacle,
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
    assert "of its 3 records above 20 dB" in line
    assert found.verdict == f"This run leaks: {line}."
    assert found.markdown.read_text(encoding="utf-8").count(line) == 1


def told(run: Path, invert: Inversion, outside: LabeledImages | None) -> Section:
    members, others = (Records(one.pixels(), torch.arange(len(one)), one) for one in (TRAIN, outside or TRAIN))
    seen = Evidence(open_run(run), ObservedData([], [], [], {}), members, others if outside else None, FACTORY(10))
    return inversion_section(seen, invert, members)


@pytest.mark.parametrize("labels", ["known", "read with other images", "read with noise"])
def test_the_search_gets_the_options(labels: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its duration is estimated from a search of 5 steps, which evaluates the loss 6 times."""
    asked: list[dict[str, Any]] = []
    clock = [0.0]

    def search(message: Any, shape: Any, count: int, **options: Any) -> Any:
        asked.append({"message": message, "shape": tuple(shape), "count": count, **options})
        clock[0] += 2.0 * (options["steps"] + 1) * options["restarts"]
        return SimpleNamespace(images=TRAIN.pixels()[own])

    monkeypatch.setattr("attacks.reporting.inversion.invert_message", search)
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    own = torch.tensor([40, 3, 12])
    given: dict[str, Any] = {"owners": [OWNERS[0], own.byte()], "steps": 7, "restarts": 3, "total_variation": 0.25}
    given["known_labels"] = labels == "known"
    outside = None if labels == "read with noise" else TEST
    section = told(run, Inversion(**given, max_records=3, seconds=42.0), outside)
    assert [(one["steps"], one["restarts"]) for one in asked] == [(1, 1), (5, 1), (7, 3)]
    message = asked[0]["message"]
    assert isinstance(message, FedAvgUpdate)
    assert message.batch is None  # of all records
    read = message.read_labels(3, TEST.normalization.encode(TEST.pixels()[:64])).tolist()
    wanted = {"known": TRAIN.labels[own].tolist(), "read with other images": read, "read with noise": None}[labels]
    for one in asked:
        assert one["message"] is message
        assert (one["shape"], one["count"], one["total_variation"]) == ((1, 8, 8), 3, 0.25)
        assert one["normalization"] == TRAIN.normalization
        assert (None if one["labels"] is None else one["labels"].tolist()) == wanted
    source = "labels known" if labels == "known" else "labels inferred from the message"
    assert str(section.parts[0]).startswith(
        "The message of client 1 (the fewest records) in round 1, computed from 3 records, inverted as the server "
        f"could do it: by a search for images that would have caused it (7 steps, 3 start(s), 48 s; {source}). "
    )
    assert str(section.parts[0]).endswith(
        "Only one message and one attack were tried, so a failure is no protection. Aligned: after the best change of "
        "brightness and contrast, which norm layers hide."
    )
    cells = next(part.cells for part in section.parts if isinstance(part, Table))
    held = [] if outside is None else ["the same number of held-out images"]
    assert [row[0] for row in cells] == ["the client's records", *held]
    near = told(run, Inversion(steps=7), outside)
    [cells] = [part.cells for part in near.parts if isinstance(part, Table)]
    held = [] if outside is None else [f"the nearest held-out image of {len(TEST)}"]
    assert [row[0] for row in cells] == [f"the nearest private record of {len(TRAIN)}", *held]
    few, more = "covers 3 records; from more than 2", "covers 57 records; from more than 16"
    end, who = "this attack recovers hardly anything, which says nothing of stronger attacks", "the fewest records"
    replay = lambda down, up: message  # noqa: E731
    for changed, why, remedy in (
        ({"seconds": 41.0}, "the search would take about 42 s, more than the 41 s allowed", "seconds=84"),
        ({"max_records": 2, "build_message": replay}, f"the message of client 1 ({who}) {few} {end}", "max_records=3"),
        ({"client": 0}, f"the message of client 0 {more} {end}", "max_records=57"),
    ):  # fmt: skip
        left = told(run, Inversion(**given, **changed), outside)
        assert left.parts == [f"Skipped: {why}."]
        advice = f"give invert=Inversion({remedy}){' to try' * ('records' in remedy)}"
        shown = f"what the update of a single client shows: {why}; {advice}"
        assert (left.missing, left.leaks, left.negatives) == ([shown], [], [])
    own = torch.arange(2)
    [(_, line)] = told(run, Inversion(owners=[own, own], steps=7), outside).leaks or [("", "")]
    assert asked[-1]["message"].observed[0].equal(fedavg_update_of(run, 0).observed[0])  # of equal sizes, the first
    assert outside is None or "update of client 0 (the fewest records) in round 1 recovers 2 of its 2 records" in line


def fedavg_update_of(run: Path, client: int) -> FedAvgUpdate:
    folder = open_run(run)
    return fedavg_update(folder, FACTORY(10), *message_pair(folder, client, None), 2)


def test_records_are_counted_for_the_asked_round(run: Path, tmp_path: Path) -> None:
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    for number, client, samples in ((2, 0, 40), (2, 1, 5), (2, 2, 5), (4, 1, 9), (4, 3, 0)):
        model = {"0.weight": torch.full((1,), 10.0 * number + client)}
        store.record(number, client, "down", Message.unchecked({"FedAvg.model": model}))
        sent = {"FedAvg.update": model, "FedAvg.samples": float(samples)}
        store.record(number, client, "up", Message.unchecked(sent))
    store.record(3, 5, "down", Message.unchecked({"FedAvg.model": model}))  # and no reply
    folder = open_run(store.out)
    assert record_counts(folder, Inversion()) == {0: 57, 1: 3, 2: 5}  # of the first replies, as the message
    assert record_counts(folder, Inversion(round=2)) == {0: 40, 1: 5, 2: 5}
    with pytest.raises(ValueError, match=r"round must be one in which a client answered, \[1, 2, 4\], got 3"):
        record_counts(folder, Inversion(round=3))
    owners = [torch.arange(n) for n in (4, 0, 2, 1, 1, 1)]
    assert record_counts(folder, Inversion(owners=owners)) == {0: 4, 2: 2, 3: 1}
    assert record_counts(open_run(altered(store.out, tmp_path / "even", weights="uniform")), Inversion()) == {}
    for client, number, wanted in ((2, None, 22.0), (1, 4, 41.0), (1, 2, 21.0)):
        for message, key in zip(message_pair(folder, client, number), ("FedAvg.model", "FedAvg.update")):
            assert message.values[key]["0.weight"].tolist() == [wanted]  # type: ignore[index]
    assert [m.round for m in message_pair(folder, 1, None)] == [1, 1]


DECAYED = {"momentum": 0.5, "weight_decay": 0.25}
REPLAYS: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    ({}, 1, 57, {"batch": 32}),
    ({}, 1, 3, {}),
    ({}, 3, 32, {}),
    ({"optimizer": DECAYED | {"lr_decay": 0.5}}, 3, 3, {"lr": 0.025, **DECAYED}),
    ({"phases": {"epochs": 2, "steps": None}}, 1, 40, {"batch": 32, "epochs": 2}),
    ({"phases": {"epochs": 1, "steps": 5}}, 1, 70, {"order": [(0, 32), (32, 64), (64, 70), (0, 32), (32, 64)]}),
    ({"phases": {"epochs": 1, "steps": 2}}, 1, 65, {"order": [(0, 32), (32, 65)], "norm": "batch"}),
    ({"phases": {"epochs": 1, "steps": 1}}, 1, 70, {"order": [(0, 32)]}),
]


@pytest.mark.parametrize(("settings", "round", "count", "wanted"), REPLAYS, ids=range(8))
def test_replay_uses_the_options_of_the_folder(
    settings: Any, round: int, count: int, wanted: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    """Batches of 32 in the order of the records; a network with batch norm merges a last batch of one."""
    options: dict[str, Any] = {}
    for name, own in settings.items():
        more = {"name": "sgd"} if name == "optimizer" else {"train": "*"}
        made = {"object": f"fl:{name}", "with": more | own}
        options[name] = made if name == "optimizer" else [made]
    folder = open_run(altered(run, tmp_path / "run", **options))
    down, up = message_pair(folder, 1, None)
    network = FACTORY(10) if "norm" not in wanted else ConvNet((1, 8, 8), 10, width=8, depth=1, norm="batch")
    if "norm" in wanted:
        state = build(lambda: network, 1).state_dict()
        down = replace(down, values={"FedAvg.model": state})
        change = [(name, torch.full_like(tensor, len(name))) for name, tensor in state.items()]
        up = replace(up, values={"FedAvg.update": dict(reversed(change))})
    found = fedavg_update(folder, network, down, replace(up, round=round), count)
    model, update = down.values["FedAvg.model"], up.values["FedAvg.update"]
    for (name, weight), sent in zip(found.network.named_parameters(), found.observed, strict=True):
        assert torch.equal(weight, model[name])  # type: ignore[index]
        assert torch.equal(sent, update[name])  # type: ignore[index]
    assert found.network.training
    plain = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "batch": None, "epochs": 1, "order": None}
    order = found.order and [(int(rows[0]), int(rows[-1]) + 1) for rows in found.order]
    seen = {name: getattr(found, name) for name in plain} | {"order": order}
    assert seen == plain | {name: value for name, value in wanted.items() if name != "norm"}


def test_replay_from_the_folder_gives_the_sent_update(run: Path) -> None:
    found, own = fedavg_update_of(run, 1), TRAIN[OWNERS[1]]
    for one, other in zip(found.observed, found.replay(own.images, own.labels), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_messages_that_cannot_be_replayed_are_noted(run: Path, tmp_path: Path) -> None:
    odd = {name: ({name: ["a", "b"]}, name) for name in ("architectures", "augment", "objective", "personal", "phases")}
    odd |= {"adam": ({"optimizer": "adam", "augment": ["a"]}, "augment, optimizer"), "kept": (KEPT, "optimizer")}
    for name, (settings, said) in odd.items():
        [line, *_] = report(altered(run, tmp_path / name, **settings), **GIVEN).missing
        why = f"the run's {said} cannot be replayed from the folder"
        assert f"shows: {why}; give invert=Inversion(build_message=...)" in line
    assert "does not record how its messages are replayed" in replay_obstacle(SimpleNamespace(plain_fedavg=None))  # type: ignore[arg-type]
    [line, *_] = report(altered(run, tmp_path / "even", weights="uniform"), **GIVEN).missing
    assert "shows: the messages do not state their number of records; give invert=Inversion(owners=...)" in line
    last = ["network=, members= and non_members=", "pipeline=; without them a model may look safer than it is"]
    for given, asked in (
        ({}, ["members=", *last]), ({"invert": None}, ["members=", *last]),
        ({"members": TRAIN}, ["network=, of the run's architecture", *last]),
        ({**GIVEN, "invert": None}, ["invert=Inversion(...), not None", last[1]]),
    ):  # fmt: skip
        assert [line.split("give ")[1] for line in report(run, **given, out=tmp_path).missing] == asked


@pytest.mark.parametrize("ordered", [False, True])
def test_user_defined_message_is_inverted(run: Path, tmp_path: Path, ordered: bool) -> None:
    """Outsiders' images help to read the labels, unless the order of the labels is tried."""
    asked: list[Any] = []
    looked: list[Tensor] = []

    class Sent(Gradient):
        def read_labels(self, count: int, noise: Tensor) -> Tensor:
            looked.append(noise)
            return super().read_labels(count, noise)

    def observed_message(down: TranscriptMessage, up: TranscriptMessage) -> Gradient:
        asked.append((down.direction, down.round, up.direction, up.round))
        own = TRAIN[OWNERS[1]]
        network = build(lambda: FACTORY(10), 0)
        sent = Sent(network, Gradient.of(network, own.images, own.labels).observed)
        sent.ordered = ordered
        return sent

    number = 2 if ordered else 1
    options = {"round": 2, "steps": 20} if ordered else {"steps": 100}
    given = Inversion(owners=OWNERS, build_message=observed_message, **options)
    folder = altered(run, tmp_path / "run", augment=["a"])  # which cannot be replayed from the folder
    for direction in ("down", "up"):
        Store(folder).record(2, 1, direction, Message.unchecked({"a": torch.ones(1)}))
    found = report(folder, **{**GIVEN, "network": None}, invert=given)
    assert asked == [("down", number, "up", number)]
    assert f"records) in round {number}, computed from 3 records" in found.markdown.read_text(encoding="utf-8")
    assert ordered or any("inverting" in line for line in found.leaks)
    near = [torch.cdist(x.flatten(1), TEST.images.flatten(1)).amin(1) < 0.1 for x in looked]
    assert {len(x) for x in looked} == {64}
    assert {bool(x.all()) for x in near} == {bool(x.any()) for x in near} == {not ordered}


def test_training_of_several_exchanges_is_inverted(run: Path, tmp_path: Path) -> None:
    """Names of other exchanges may sort before that of the training."""
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    asked = Message.unchecked({"Keys.public": torch.ones(4)})
    for client, direction in product(range(3), ("down", "up")):
        store.record(1, client, direction, asked, "announce")
    history = store.out / "history.jsonl"
    text = history.read_text(encoding="utf-8").replace('_client": {', '_client": {"2": [5, 0], ')  # only announced
    history.write_text(text, encoding="utf-8")
    folder = open_run(store.out)
    for down, up in (message_pair(folder, 1, None), message_pair(folder, 1, 1)):
        assert [list(seen.values)[-1] for seen in (down, up)] == ["FedAvg.model", "FedAvg.update"]
    owners = [*OWNERS, torch.arange(1)]  # the third never came to the training
    assert record_counts(folder, Inversion(owners=owners)) == {0: 57, 1: 3}


def test_run_without_messages_is_left_out(run: Path, tmp_path: Path) -> None:
    shutil.rmtree((bare := altered(run, tmp_path / "run")) / "transcript")
    invert = Inversion(build_message=lambda down, up: pytest.fail("nothing was sent"))
    found = report(bare, **GIVEN, invert=invert)
    [line] = [line for line in found.missing if "update of a single client" in line]
    assert "the run kept no transcript; run again with simulate(..., out=RunFolder(path, transcript=True))" in line


def records(labels: list[int], data: bool = True) -> Records:
    pixels = torch.rand(len(labels), 1, 2, 2, generator=derive(len(labels)))
    made = LabeledImages(pixels, labels, num_classes=4) if data else None
    return Records(pixels, torch.arange(len(labels)), made)


def test_non_members_have_the_records_classes_if_possible() -> None:
    inside, own = replace(records([2, 0, 1, 1]), index=torch.tensor([2, 3])), torch.tensor([1, 2, 3])
    ours = [0, 1, 1]
    for labels, kept in (([1, 0, 3, 1, 0], True), ([0, 1, 3, 3, 3], False)):
        drawn = _draw_held_out(inside, own, records(labels))
        classes = [sorted(torch.tensor(labels)[index].tolist()) for index in drawn]
        assert all(len(index.unique()) == 3 for index in drawn)
        assert all(one == ours for one in classes) == kept
    soft = replace(inside, data=inside.data.replace(labels=torch.eye(4)))  # type: ignore[union-attr]
    odd = records([0, 1, 1, 0])
    odd = replace(odd, data=odd.data.replace(labels=torch.eye(4)))  # type: ignore[union-attr]
    none = records([0, 1, 3, 3, 3], data=False)
    for one, others in ((inside, none), (soft, records([0] * 9 + [1] * 3)), (inside, odd), (soft, odd)):
        unknown = _draw_held_out(one, own, others)
        assert {int(i) for index in unknown for i in index} == set(range(len(others.index)))
        assert {len(index) for index in unknown} == {3}
        assert len({tuple(index.tolist()) for index in unknown}) > 20
    others = replace(records([0] * 4 + [1, 0, 3, 1, 1]), index=torch.arange(4, 9))  # only these are attacked
    for index in _draw_held_out(inside, own, others):
        assert sorted(others.data.labels[others.index][index].tolist()) == ours  # type: ignore[union-attr]
    pairs = {tuple(index.tolist()) for index in _draw_held_out(inside, own[:2], records([0, 0, 0, 1, 1, 1]))}
    assert pairs == set(product(range(3), range(3, 6)))  # each class is drawn on its own
    assert all(index.sort().values.equal(torch.arange(3)) for index in _draw_held_out(inside, own, records([3, 3, 3])))
    with pytest.raises(ValueError, match="non_members must be at least 3, the inverted records, got 2"):
        _draw_held_out(inside, own, records([1, 1]))


HEADER = ("images compared with", "PSNR in dB", "aligned")


def best(images: Tensor, candidates: Tensor) -> Tensor:
    """Return the order of the images in which they are nearest to the candidates, of all orders."""
    orders = [list(order) for order in permutations(range(len(images)))]
    return torch.tensor(min(orders, key=lambda order: float((images[order] - candidates).square().sum())))


def level(images: Tensor, truth: Tensor) -> str:
    decibels = psnr(images, truth)
    return f"{float(decibels.mean()):.1f} (best {float(decibels.max()):.1f})"


@pytest.mark.parametrize("kind", ["recovered", "similar", "nothing", "alone"])
def test_recovered_images_are_compared_with_the_clients_records(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 20 dB none is reconstructed, but if no other image is as close, the update still leaks. One is enough."""
    monkeypatch.setattr("attacks.reporting.inversion._SHOWN", 3)
    inside, outside = (Records(one.pixels(), torch.arange(1, len(one), 2), one) for one in (TRAIN, TEST))
    own = torch.tensor([41, 2, 17, 30])
    truth, noise = TRAIN.pixels()[own], torch.randn(4, 1, 8, 8, generator=derive(0))
    scale = torch.tensor([0.2, 0.06, 0.08, 0.2]).view(-1, 1, 1, 1)
    made = {"similar": truth + 0.2 * noise, "nothing": 0.4 + 0.2 * truth + 0.12 * noise}
    images = made.get(kind, 0.6 * truth + 0.3 + scale * noise).clamp(0, 1)[[2, 0, 3, 1]]
    section = Section("")
    _compare_own(section, images, own, inside, None if kind == "alone" else outside, "client 1")
    paired = images[best(images, truth)]
    fitted = align(paired, truth)
    aligned = psnr(fitted, truth)
    order = aligned.argsort(descending=True)[:3]
    levels = ", ".join(f"{v:.0f}" for v in aligned[order].tolist())
    caption = "Recovered images, the same aligned, and the client's records, the closest first. PSNR aligned:"
    rows = [paired[order], fitted[order], truth[order]]
    assert section.parts[0] == image_grid(rows, f"{caption} {levels} dB.")
    cells = [("the client's records", level(paired, truth), level(fitted, truth))]
    [shown] = [part for part in section.parts if isinstance(part, Table)]
    if kind == "alone":
        assert shown == Table(HEADER, cells, left=1)
        why = "whether the inverted images are more than similar to the records"
        assert section.missing == [f"{why}: give non_members="]
        return
    means = []
    for index in _draw_held_out(inside, own, outside):
        drawn = outside.selected[index]
        nearest = images[best(images, drawn)]
        means.append([float(psnr(one, drawn).mean()) for one in (nearest, align(nearest, drawn))])
    plain, others = torch.tensor(means).T
    held = tuple(f"{float(one.mean()):.1f} (best {float(one.max()):.1f})" for one in (plain, others))
    assert shown == Table(HEADER, [*cells, ("the same number of held-out images", *held)], left=1)
    beaten, near = int((others >= aligned.mean()).sum()), int((aligned >= 20).sum())
    assert section.parts[2] == (
        "Means over 4 images, each paired with one record. Held-out images of the same classes were drawn 99 times, "
        f"and were as close {beaten} times."
    )
    dB = f"{float(aligned.mean()):.1f} dB aligned, held-out images of its classes {float(others.mean()):.1f}"
    start = "inverting the update of client 1 recovers"
    said = f"{near} of its 4 records above 20 dB (mean {dB})"
    if kind != "recovered":
        said = f"images {'closer' if kind == 'similar' else 'no closer'} to its records than to others ({dB})"
    found = [("inversion", f"{start} {said}")]
    assert (section.leaks, section.negatives) == (([], found) if "no closer" in said else (found, []))
    assert (beaten > 0, near > 0) == (kind == "nothing", kind == "recovered")


@pytest.mark.parametrize("held", [False, True])
def test_without_owners_the_nearest_records_are_shown(held: bool) -> None:
    """Nearest after the best change of brightness and contrast; only the attacked records are candidates."""
    index = torch.arange(0, 40, 2)
    inside, outside = Records(TRAIN.pixels(), index, TRAIN), Records(TEST.pixels(), torch.arange(25), None)
    noise = 0.1 * torch.randn(10, 1, 8, 8, generator=derive(0))
    images = (0.4 * TRAIN.pixels()[20:30] + 0.4 + noise).clamp(0, 1)
    _compare_nearest(section := Section(""), images, inside, outside if held else None)
    groups = {"private record": inside.pixels[index], **({"held-out image": TEST.pixels()[:25]} if held else {})}
    cells, rows = [], [images]
    for name, candidates in groups.items():
        near = [max(candidates, key=lambda c, x=x: float(psnr(align(x[None], c[None]), c[None]))) for x in images]  # type: ignore[misc]
        rows.append(torch.stack(near))
        levels = [level(one, rows[-1]) for one in (images, align(images, rows[-1]))]
        cells.append((f"the nearest {name} of {len(candidates)}", *levels))
    caption = f"Recovered images, and below each the nearest {' and '.join(groups)}."
    assert section.parts[0] == image_grid([row[:8] for row in rows], caption)
    assert [part for part in section.parts if isinstance(part, Table)] == [Table(HEADER, cells, left=1)]
    assert section.missing == ["whether inverted images show the client's records: give invert=Inversion(owners=...)"]
    assert not [*section.leaks, *section.negatives]


def test_client_without_a_reply_has_no_message_pair(run: Path, tmp_path: Path) -> None:
    store = Store(Path(shutil.copytree(run, tmp_path / "run")))
    sent = Message.unchecked({"FedAvg.model": {"w": torch.ones(1)}})
    for number, client, direction in ((2, 0, "up"), (1, 6, "down"), (2, 6, "up")):  # replies without a stored request
        store.record(number, client, direction, sent)
    folder = open_run(store.out)
    assert message_pair(folder, 0, None)[0].round == 1
    for client, number in ((0, 2), (5, 1), (6, None)):
        with pytest.raises(ValueError, match=f"round must be one that client {client} answered, got {number}"):
            message_pair(folder, client, number)


def test_refusals(run: Path, tmp_path: Path) -> None:
    def build(down: TranscriptMessage, up: TranscriptMessage) -> Gradient:
        return Gradient.of(FACTORY(10), TRAIN.images[:3], TRAIN.labels[:3])

    beyond = [OWNERS[0], torch.tensor([59, 60, 58])]
    lost = Inversion(owners=OWNERS, build_message=lambda down, up: None)  # type: ignore[arg-type,return-value]
    known = Inversion(owners=OWNERS, known_labels=True, build_message=build)
    pixels = {"members": TRAIN.pixels(), "network": None, "non_members": TEST}
    sent = "network must have the run's architecture: .* those sent to client 0 in round 1; build it as the run did"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"invert": False}, "invert must be of attacks.reporting.Inversion, got bool"),
        ({"invert": Inversion(client=7)}, r"client must be one that holds records and answered, \[0, 1\], got 7"),
        ({"invert": Inversion(client=0, owners=[OWNERS[1][:0], OWNERS[1]])}, r"holds .* answered, \[1\], got 0"),
        ({"invert": Inversion(client=1, round=4)}, r"round must be one in which a client answered, \[1\], got 4"),
        ({"invert": Inversion(owners=beyond), "max_records": 30}, "owners must be .*, 0 to 59, got 58 to 60: give"),
        ({"invert": Inversion(owners=[OWNERS[0], -OWNERS[1]])}, "owners must be .*, got -2 to 0: give members="),
        ({"network": ConvNet((1, 8, 8), 10, width=4, depth=1), "invert": Inversion(client=0, max_records=57)}, sent),
        ({"invert": lost}, "the result of build_message must be an ObservedMessage"),
        ({**pixels, "invert": known}, "members must be LabeledImages if known_labels is set"),
    ]
    for changed, said in cases:
        given = {**GIVEN, "non_members": None, "invert": Inversion(owners=OWNERS), **changed}
        refused(lambda given=given: report(run, **given, out=tmp_path), (TypeError, ValueError), said)
    for more in ({}, {"build_message": build, "client": 0}):
        refused(lambda more=more: Inversion(known_labels=True, **more), ValueError, "known_labels .* give owners too")
    words = r"called as build_message\(down, up\); give a function of both messages that returns an ObservedMessage"
    refused(lambda: Inversion(build_message=len), TypeError, words)
    assert len(Inversion(owners=torch.arange(6).view(2, 3)).owners) == 2  # type: ignore[arg-type]
    for odd in (torch.rand(3), torch.ones(3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.long), [1]):
        for owners in ([odd, OWNERS[1]], [OWNERS[0], odd]):
            refused(lambda owners=owners: Inversion(owners=owners), TypeError, "owners must be int tensors")
    wrong = {"max_records": 0, "steps": 0, "restarts": 0, "seconds": -1.0, "total_variation": -1.0}
    for name, value in wrong.items():
        refused(lambda name=name, value=value: Inversion(**{name: value}), ValueError, f"{name} must be")
    assert not list(tmp_path.iterdir())
