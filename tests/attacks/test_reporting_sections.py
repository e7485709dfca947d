"""Sections of a report on folders with missing or rare content: each states what it can and cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attacks import report
from attacks.reporting._evidence import Evidence, ObservedData, Records, with_weights
from attacks.reporting._page import Findings, Section
from attacks.reporting._rates import evaluate_scores, format_percent
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting._section_images import _add_groups, membership_section, nearest_section
from attacks.reporting._section_messages import adversary_section, class_section
from attacks.reporting.privacy_claim import Audit, _add_claim, claim_section
from attacks.reporting.similarity import random_baseline, record_scores
from attacks.statistics import Rate, at_threshold
from attacks.transcript import TranscriptMessage
from distillkit import LabeledImages
from distillkit._utils.pages import image_grid
from distillkit._utils.tables import Table
from distillkit.networks import ConvNet
from distillkit.normalization import Normalization
from distillkit.privacy import Event, Ledger, gaussian_delta, gaussian_sigma
from distillkit.rng import derive
from fl.engine.store import Store
from fl.message import Message


def images(seed: int, n: int = 24, **info: Any) -> LabeledImages:
    pixels = torch.rand(n, 1, 8, 8, generator=derive(seed))
    return LabeledImages(pixels, torch.arange(n) % 2, num_classes=2, info=info)


def folder(**parts: Any) -> RecordedRun:
    none: dict[str, Any] = {"config": {}, "history": [], "published_set": None, "models": {}}
    return RecordedRun(**{"path": Path("run"), "transcript": False, **none, **parts})


def seen(
    run: RecordedRun | None = None, replies: Sequence[int] = (),
    updates: Sequence[tuple[int, torch.Tensor, int | None]] = (),
) -> Evidence:  # fmt: skip
    observed = ObservedData([], [], list(updates), dict(enumerate(replies)))
    return Evidence(folder(config=PLAIN, transcript=True) if run is None else run, observed)


def words(section: Section) -> str:
    return "\n".join(part for part in section.parts if isinstance(part, str))


def rows(section: Section) -> list[Sequence[str]]:
    return [row for part in section.parts if isinstance(part, Table) for row in part.cells]


# What was charged.


def test_published_set_states_its_claim_and_lacks_a_ledger() -> None:
    made = images(0, epsilon=2.5, delta=1e-5, relation="add or remove one record", ipc=3)
    section = claim_section(seen(folder(published_set=made)), None)
    assert "Claimed: epsilon 2.5 at delta 1e-05 (add or remove one record), as the run recorded it." in words(section)
    assert section.missing[0] == "the charges: the ledger is not in the folder"
    assert "The claim was not audited." in words(section)
    assert "No epsilon is claimed" in words(claim_section(seen(folder(published_set=images(0, ipc=3))), None))


@pytest.mark.parametrize(
    ("claim", "said", "unsaid"),
    [
        ({"epsilon": None, "reason": "the seed is known"}, ["No guarantee holds: the seed is known."], "would be"),
        ({"epsilon": None}, ["No guarantee holds: the run records no reason."], "would be"),
        (
            {"epsilon": None, "reason": "seeded", "nominal_epsilon": 3.25, "remarks": ["one"]},
            ["With secret noise it would be epsilon 3.25.", "Remark: one"],
            "Claimed",
        ),
    ],
    ids=["reason", "bare", "nominal"],
)
def test_void_claim_is_not_shown_as_a_claim(
    claim: dict[str, Any], said: list[str], unsaid: str, tmp_path: Path
) -> None:
    Ledger(tmp_path / "ledger.jsonl").void("a key is known")
    text = words(claim_section(seen(folder(path=tmp_path, history=[{"privacy": claim}])), None))
    assert "a key is known" in text
    for line in said:
        assert line in text
    assert unsaid not in text


def test_charges_without_replies_are_listed_and_none_is_missing(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl").spend(Event("gaussian", sigma=2.0, rate=0.5, count=3))
    run = folder(path=tmp_path)
    section = claim_section(seen(run), None)
    assert rows(section) == [("gaussian", "2", "0.5", "add or remove one record", "3", "1")]
    assert "clients was charged" not in words(section)
    assert not section.leaks
    owing = words(claim_section(seen(run, replies=[3, 4]), None))
    assert "client 1 sent 4 replies and was charged for 3 releases (1 clients in total have such replies)" in owing


def test_audit_is_shown_without_a_claim() -> None:
    sigma = gaussian_sigma(4.0, 1e-5)
    noise = torch.randn(2, 500, generator=derive(0), dtype=torch.float64) * sigma / 2
    audit = Audit(1 + noise[0], noise[1], [(e, gaussian_delta(sigma, e)) for e in (0.0, 1.0, 4.0)])
    section = claim_section(seen(folder()), audit)
    assert "No epsilon is claimed" in words(section)
    assert "Audited with 500 runs" in words(section)
    assert "epsilon of this run" not in words(section)
    assert len(section.leaks) == 1


# Which classes clients hold.

OPTIONS = {"lr": 0.1, "optimizer": "sgd", "phases": [{"object": "fl:Phase", "with": {"epochs": 1, "train": "*"}}]}
LABELS = {"object": "fl:Classification", "with": {"num_classes": 2}}
PLAIN = {"method": {"object": "fl:FedAvg", "args": [], "with": OPTIONS}, "labels": LABELS}
RISE = torch.tensor([-0.5, 0.5])


def test_updates_without_bounds_are_counted_and_others_shown() -> None:
    noisy = torch.tensor([0.5, 0.25])  # no softmax's: its sum is not 0
    section = class_section(seen(updates=[(0, RISE, 4), (1, noisy, 4)]))
    assert rows(section) == [("0", "1", "none", "1")]
    assert "1 updates allow no certain conclusion: bias_change must sum to 0" in words(section)
    [(kind, said)] = section.leaks
    assert (kind, "in 50 % of all cases" in said) == ("classes", True)


@pytest.mark.parametrize(
    ("updates", "shown"),
    [
        ([(0, RISE, None), (0, -RISE, None)], [("0", "0, 1", "none", "0")]),  # all messages of a client count
        ([(3, torch.zeros(2), 4)], [("3", "none", "none", "2")]),  # no information is no finding
        ([(0, torch.tensor([1.0, 0, -1]), 4)], []),  # of another length
    ],
)
def test_classes_follow_from_the_updates(updates: Any, shown: list[tuple[str, ...]]) -> None:
    section = class_section(seen(updates=updates))
    assert rows(section) == shown
    assert bool(section.leaks) == (len(updates) == 2)
    unknown = "No certain conclusion (messages other than sets and plain updates)" in words(section)
    assert unknown == (not shown)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": {"object": "fl:ClientOptimizer", "with": {"name": "sgd", "weight_decay": 0.1}}},
        {"optimizer": "adam"},
        {"objective": "MOON"},
        {"phases": [*OPTIONS["phases"], *OPTIONS["phases"]]},  # type: ignore[misc]
    ],
    ids=str,
)
def test_bias_after_other_training_than_plain_sgd_is_not_read(options: dict[str, Any]) -> None:
    method = {"object": "fl:FedAvg", "args": [], "with": {**OPTIONS, **options}}
    run = folder(config={**PLAIN, "method": method}, transcript=True)
    assert not rows(class_section(seen(run, updates=[(0, torch.zeros(2), 4)])))


@pytest.mark.parametrize(
    ("weights", "samples", "size"),
    [
        ("samples", 5.0, 5),
        ("samples", 2.5, None),
        ("samples", 0.0, None),
        ("samples", math.inf, None),
        ("uniform", 1.0, None),
    ],
)
def test_weights_are_numbers_of_records_only_if_the_run_says_so(
    weights: str, samples: float, size: Any, monkeypatch: Any
) -> None:
    """A reply of any size has the weight 1 with uniform weights, of which no missing class follows."""
    update = {"0.bias": torch.zeros(4), "1.weight": torch.zeros(2, 4), "1.bias": RISE, "2.bias": torch.zeros(1, 2)}
    values: dict[str, Any] = {"FedAvg.update": update, "FedAvg.samples": samples}
    sent = [TranscriptMessage(1, 3, "up", values), TranscriptMessage(1, 3, "down", values)]
    sent += [TranscriptMessage(1, 3, "up", {}, exchange="answer")]
    monkeypatch.setattr(RecordedRun, "messages", lambda self: iter(sent))
    method = {**PLAIN["method"], "with": {**OPTIONS, "weights": weights}}
    found = ObservedData.from_run(folder(config={**PLAIN, "method": method}, transcript=True))
    assert found.replies == {3: 1}
    [(client, bias, count)] = found.updates
    assert (client, bias.tolist(), count) == (3, RISE.tolist(), size)


def test_only_the_first_twenty_clients_are_listed() -> None:
    section = class_section(seen(updates=[(client, RISE, None) for client in range(23)]))
    assert "in 50 % of all cases" in section.leaks[0][1]
    assert [row[0] for row in rows(section)] == [str(client) for client in range(20)]
    assert "3 more clients are not shown" in words(section)


def test_folder_with_a_whitened_space_is_not_shown_in_pixels() -> None:
    parts = {"mean": {"tuple": [0.5]}, "std": {"tuple": [0.25]}}
    said = [["shape", {"tuple": [1, 8, 8]}], ["normalization", {"object": "distillkit:Normalization", "with": parts}]]
    assert folder(config={"images": {"dict": said}}).normalization == Normalization((0.5,), (0.25,))
    said[1] = ["normalization", {**said[1][1], "with": {**parts, "zca": "whitening.safetensors"}}]
    assert folder(config={"images": {"dict": said}}).normalization is None
    assert rows(adversary_section(folder()))[0][2] == "not in the folder"


def test_a_claim_is_told_with_its_conditions() -> None:
    def told(claim: dict[str, Any]) -> list[str]:
        section = Section("")
        _add_claim(section, claim)
        return words(section).splitlines()

    more = {"remarks": ["r"], "assumed_public": {"DPSGD": ["size", "clip"]}}
    ends = ["Remark: r", "Assumed public by DPSGD: size, clip."]
    held = {"epsilon": 2.0, "delta": 1e-5, "relation": "one", "valid_if": "planned"}
    start = "Claimed: epsilon 2 at delta 1e-05 (one), as the run recorded it."
    assert told(held | more) == [start, "It holds if planned.", *ends]
    lost = {"epsilon": None, "reason": "seeded", "nominal_epsilon": 3.0, "valid_if": "planned"}
    hoped = "With secret noise it would be epsilon 3."
    assert told(lost | more) == ["No guarantee holds: seeded.", hoped, *ends]
    assert told({"epsilon": None}) == ["No guarantee holds: the run records no reason."]


def test_attacks_without_a_finding_are_in_the_order_of_their_strength() -> None:
    kinds = ("claim", "classes", "images", "inversion", "model", "shadows")
    section = Section("", negatives=[(kind, kind) for kind in kinds], leaks=[(kind, kind) for kind in kinds])
    found = Findings([section], False)
    assert found.not_found == ("images", "shadows", "inversion", "model", "classes", "claim")
    assert found.leaks == ("claim", "inversion", "images", "shadows", "model", "classes")
    assert found.other_leaks == found.leaks[1:]


def test_baselines_of_rounds_differ() -> None:
    one, other = random_baseline([torch.zeros(9, 1, 4, 4)] * 2, images(1).images)
    assert one.shape == other.shape == (9, 1, 8, 8)
    assert not torch.equal(one, other)


def test_started_records_are_rated_apart_from_the_rest() -> None:
    members = Records(torch.zeros(9, 1, 4, 4), torch.tensor([1, 3, 5, 7]), None)
    points = {"a": at_threshold(torch.tensor([0.0, 1.0]), torch.tensor([False, True]), 0.5)}
    for started, shown in (([1, 2, 3], ["2/2", "1/2"]), ([1, 3, 5, 7], ["3/4", None]), ([0], [None, "3/4"])):
        section = Section("")
        _add_groups(section, members, {"a": torch.tensor([0.6, 0.5, 0.4, 0.9])}, points, torch.tensor(started))
        rates = [Rate.of(*map(int, one.split("/"))) if one else "none attacked" for one in shown]
        assert rows(section) == [("a", *map(str, rates))]
        assert f"images started from {len({1, 3, 5, 7} & {*started})} of 4 members" in words(section)


def test_weights_of_another_architecture_are_not_loaded() -> None:
    plain, network = nn.Linear(2, 3, bias=False), nn.Linear(2, 3)
    for one, other in ((plain, network), (network, plain), (network, nn.Linear(3, 2))):
        assert with_weights(one, other.state_dict()) is None
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    loaded = with_weights(network, given := nn.Linear(2, 3).state_dict())
    assert loaded is not None
    for model, wanted in ((loaded, given), (network, before)):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


# Images that were sent.


def test_rounds_of_one_image_have_a_distance_but_no_attack() -> None:
    """With one image, or copies of it, no image is nearer than another, so the attack does not apply."""
    one, two, candidates = images(1).images[:1], images(2).images[:2], images(3).images[:5]
    assert list(record_scores([one, one.repeat(3, 1, 1, 1)], candidates)) == ["distance"]
    both = record_scores([one, two], candidates)
    assert list(both) == ["distance", "nearest"]
    assert torch.equal(both["nearest"], record_scores([two], candidates)["nearest"])


def test_sent_images_are_above_the_nearest_records() -> None:
    sent, whole = images(1).images, torch.arange(24)
    members, others = (Records(x, whole, None) for x in (sent.flip(0), sent.roll(1, 0)))  # each record is sent
    order = torch.randperm(24, generator=derive(0, "shown"))[:10]
    for given in ((None, None), (members, None), (members, others)):
        found = nearest_section(Evidence(folder(), ObservedData([sent], [], [], {}), *given))
        assert found.parts[0].png == image_grid([sent[order]] * (3 - given.count(None)), "").png


def test_the_largest_upper_end_of_all_attacks_is_stated() -> None:
    whole = torch.arange(24)
    for seed in range(5):
        made, others = (Records(images(seed + step).images, whole, None) for step in (10, 20))
        rounds = [images(seed).images]
        section = membership_section(Evidence(folder(), ObservedData(rounds, [], [], {})), made, others, None)
        scores = [record_scores(rounds, records.pixels) for records in (made, others)]
        highs = [evaluate_scores(scores[0][name], scores[1][name], 2)[1].tpr.high for name in scores[0]]
        assert f"at most {format_percent(max(highs))} of" in section.negatives[0][1]


def test_images_without_outsiders_are_shown_and_not_scored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "distillkit.run/2"}', encoding="utf-8")
    made, network = images(1), ConvNet((1, 8, 8), 2, width=2, depth=1)
    made[:6].save(tmp_path / "set.safetensors")
    found = report(tmp_path, members=made, network=network)
    text = found.markdown.read_text(encoding="utf-8")
    assert "and below each the nearest private record. PSNR to the record: equal" in text
    assert "held-out" not in text.split("Sent images")[1].split("\n")[0]
    assert counted(text) == ["private records", "baseline: random real images"]
    assert any("whether similarity is a leak: give non_members=" in line for line in found.missing)
    assert not found.leaks
    assert str(found) == f"{found.verdict} ({found.html})"
    judged = report(tmp_path, members=made, non_members=images(4), network=network)
    assert any("the folder has no checkpoint/model.safetensors" in line for line in judged.missing)


def counted(text: str) -> list[str]:
    """Return the rows of the table of recovered records."""
    table = text.split("| group ")[1].split("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ").strip() for line in table.splitlines()[2:]]


def test_empty_sent_set_shows_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for client, data in ((0, images(1)[:0]), (1, images(1)[:4])):
        store.record(1, client, "up", Message.unchecked({"set": data}))
    found = ObservedData.from_run(folder(path=tmp_path, transcript=True))
    assert [client for client, _ in found.sets] == [1]
    assert [len(one) for one in found.rounds] == [4]
    assert found.replies == {0: 1, 1: 1}
