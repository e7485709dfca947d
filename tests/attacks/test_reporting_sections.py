"""Sections of a report on folders with missing or rare content: each states what it can and cannot show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attacks import report
from attacks.audit import audit_claim, audit_noise, epsilon_lower_bound, max_lower_bound
from attacks.reporting._evidence import Evidence, ObservedData, Records, with_weights
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting._section_images import _add_groups
from attacks.reporting._section_messages import adversary_section, class_section
from attacks.reporting.privacy_claim import Audit, _add_claim, claim_section
from attacks.statistics import Rate, at_threshold
from attacks.transcript import TranscriptMessage
from distillkit import LabeledImages
from distillkit._utils.tables import Table
from distillkit.networks import ConvNet
from distillkit.privacy import Event, Ledger, gaussian_delta, gaussian_sigma
from distillkit.rng import derive
from tests.attacks.test_reporting_evidence import folder, rows


def images(seed: int, n: int = 24, **info: Any) -> LabeledImages:
    pixels = torch.rand(n, 1, 8, 8, generator=derive(seed))
    return LabeledImages(pixels, torch.arange(n) % 2, num_classes=2, info=info)


def seen(
    run: RecordedRun | None = None, replies: Sequence[int] = (),
    updates: Sequence[tuple[int, torch.Tensor, int | None]] = (),
) -> Evidence:  # fmt: skip
    observed = ObservedData([], [], list(updates), dict(enumerate(replies)))
    return Evidence(folder(config=PLAIN, transcript=True) if run is None else run, observed)


def words(section: Section) -> str:
    return "\n".join(part for part in section.parts if isinstance(part, str))


# What was charged.


def test_published_set_states_its_claim_and_lacks_a_ledger() -> None:
    made = images(0, epsilon=2.5, delta=1e-5, relation="add or remove one record", ipc=3)
    section = claim_section(seen(folder(published_set=made)), None)
    assert "Claimed: epsilon 2.5 at delta 1e-05 (add or remove one record), as the run recorded it." in words(section)
    assert [line.split(":")[0] for line in section.missing] == ["the charges", "whether the claimed epsilon holds"]
    own = folder(published_set=made, history=[{"privacy": {"epsilon": 9.0}}])
    assert "Claimed: epsilon 9 at" in words(claim_section(seen(own), None))
    assert "No epsilon is claimed" in words(claim_section(seen(folder(published_set=images(0, ipc=3))), None))
    lost = folder(published_set=images(0, epsilon=None, reason="seeded"))
    assert "No guarantee holds: seeded." in words(claim_section(seen(lost), None))


def test_each_client_is_charged_for_all_of_its_replies(tmp_path: Path) -> None:
    """Charges are summed over kinds of noise, and with those of every client; one kind is one row of the table."""
    events = [Event("a", sigma=2.0, rate=0.5, count=3, client=0), Event("a", sigma=2.0, rate=0.5, count=2, client=1)]
    events += [Event("b", sigma=1.234, client=c) for c in (1, "*")] + [Event("a", sigma=2.0, rate=0.5043, client=1)]
    Ledger(tmp_path / "ledger.jsonl").spend(*events)
    run = folder(path=tmp_path)
    charges = [("a", "2", "0.5", "5", "2"), ("b", "1.234", "1", "2", "2"), ("a", "2", "0.5043", "1", "1")]
    charges = [(*row[:3], "add or remove one record", *row[3:]) for row in charges]
    for replies, least in (([3, 5, 1, 1], 0), ([2], 2)):
        paid = claim_section(seen(run, replies), None)
        assert Table(("mechanism", "sigma", "rate", "neighbours", "releases", "clients"), charges, left=1) in paid.parts
        assert not paid.leaks
        first, covered, last = words(paid).splitlines()
        assert first == f"Computed again from the ledger: {Ledger(tmp_path / 'ledger.jsonl').guarantee()}."
        start = f"Each of {len(replies)} clients was charged for at least as many releases as it sent replies"
        assert covered.startswith(f"{start} (the smallest surplus is {least}). ")
        assert last == (
            "The claim was not audited. It may be false without any trace in this folder: noise that is charged but "
            "not drawn or too small, a clip that has no effect, a record that is counted twice."
        )
        assert [line.split("Audit(")[0] for line in paid.missing] == ["whether the claimed epsilon holds: give audit="]
    owing = claim_section(seen(run, replies=[5, 9, 1]), None)
    said = "client 1 sent 9 replies and was charged for 5 releases"
    assert f"Replies without a charge: {said} (2 clients in total have such replies)." in words(owing)
    assert owing.leaks == [("claim", f"its ledger is incomplete: {said}, so epsilon does not cover all that was sent")]


def test_the_noise_of_a_method_is_compared_with_its_charges(tmp_path: Path) -> None:
    """The largest sigma charged is at most the largest of the method; a method with a rate may also sample all."""
    for number, (sigmas, rates, told) in enumerate([
        ([2.0, 1.0], [], ""), ([2.5, 1.0], [], "releases of sigma 2.5, but the sigma of its method is 2 (config.json)"),
        ([1.0], [0.25], ""), ([1.0], [1.0], ""),
        ([1.0], [1.0, 0.125], "releases of rate 0.125, but the rate of its method is 0.25 (config.json)"),
    ]):  # fmt: skip
        out = tmp_path / str(number)
        out.mkdir()
        charged = zip([*sigmas, *[sigmas[-1]] * len(rates)], [*[1.0] * len(sigmas), *rates])
        Ledger(out / "ledger.jsonl").spend(*(Event("a", sigma=s, rate=r) for s, r in charged))
        options = {"sigma": 1.0, "sigma_count": 2, "rate": 0.25}
        method = {"object": "fl:Any", "with": {"inner": {"object": "fl:DP", "with": options}}}
        section = claim_section(seen(folder(path=out, config={"method": method})), None)
        assert [line for _, line in section.leaks] == ([f"it charged {told}"] if told else [])


@pytest.mark.parametrize("change", [1.0, 1.0009, 0.9985, 0.9995, 0.0])
def test_a_claim_is_computed_again_at_its_own_delta(change: float, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=1e-4)
    ledger.spend(Event("a", sigma=0.5))
    again = ledger.guarantee(delta=1e-3)
    assert again.epsilon is not None
    other = 1e-2 if change == 1 else 1e-4
    history = [{"privacy": {"epsilon": 9.0}}, {"privacy": {"epsilon": change * again.epsilon, "delta": 1e-3}}]
    run = folder(path=tmp_path, history=history, config={"privacy": {"delta": other}})
    section = claim_section(seen(run), None)
    assert f"Claimed: epsilon {change * again.epsilon:.4g} at delta 0.001 ()" in words(section)
    assert f"Computed again from the ledger: {again}." in words(section)
    wrong = (
        f"it claims epsilon {change * again.epsilon:.4g}, but the charges in its ledger compose to {again.epsilon:.4g}"
    )
    deltas = f"its claim, config.json and ledger state different values of delta, {sorted({1e-4, 1e-3, other})}"
    assert [line for _, line in section.leaks] == [wrong] * (change < 0.999) + [deltas]


def test_a_claim_needs_secret_noise(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl").spend(Event("a", sigma=2.0, seeded=True))
    for epsilon in (2, 0):
        run = folder(path=tmp_path, history=[{"privacy": {"epsilon": epsilon}}], config={"privacy": {"secret": 0}})
        section = claim_section(seen(run), None)
        first, second = [line for _, line in section.leaks]
        assert first.startswith(f"it claims epsilon {epsilon}, but by its ledger there is no guarantee: the noise of")
        assert second == "its noise was drawn from the seed in config.json, so it is known"
        assert [f"Contradiction: {line}." for line in (first, second)] == words(section).splitlines()[-3:-1]
    assert not claim_section(seen(folder(path=tmp_path, config=run.config)), None).leaks  # claims nothing


@pytest.mark.parametrize("noise", [None, "lacking", "uncharged"])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_an_audit_is_told_with_its_numbers(factor: float, noise: str | None) -> None:
    sigma = gaussian_sigma(4.0, 1e-5)
    draws = torch.randn(2, 100, generator=derive(0), dtype=torch.float64) * sigma * factor
    claim = [(e, max(0.01, gaussian_delta(sigma, e))) for e in (0.5, 4.0, 1.0)]
    claim.insert(1, (9.0, 0.01))  # which no scores refute
    drawn = None if noise is None else audit_noise({1.0: 8 if noise == "lacking" else 10}, [(1.0, 9)])
    audit = Audit(1 + draws[0], draws[1, :80], claim, drawn, "one round", 0.9)
    tested = audit_claim(1 + draws[0], draws[1, :80], claim, confidence=0.9)
    bound = epsilon_lower_bound(1 + draws[0], draws[1, :80], claim[1][1], confidence=0.9)
    runs = "100 runs of one round with a record and 80 without"
    for own in (None, 4.001, 0.5, 3.99):
        history = [] if own is None else [{"privacy": {"epsilon": own}}]
        section = claim_section(seen(folder(history=history)), audit)
        odd = [f"The epsilon of this run, {own:.4g}, is not among the audited claims."] if own == 3.99 else []
        wrong = [] if drawn is None else [f"Noise of one round, drawn compared with charged: {drawn}."]
        assert words(section).splitlines()[-2 - len(odd + wrong) :] == [
            *wrong, f"Audited with {runs}: the claim is {tested}.",
            f"These runs show epsilon at least {bound:.3g} at delta {claim[1][1]:g}; claimed is at most 9. The largest "
            f"bound that so many runs can show is {max_lower_bound(80, confidence=0.9):.3g}.", *odd,
        ]  # fmt: skip
        told = f"the claimed epsilon {tested.epsilon:.3g} (delta {tested.delta:.2g}) of one round is {tested}"
        assert tested.refuted == (factor < 1)
        leaks = [("claim", f"the noise of one round differs from what was charged: {drawn}")] * (drawn is not None)
        assert section.leaks == [*leaks, *[("claim", told)] * tested.refuted]
        assert section.negatives == [("claim", f"{told} ({runs})")] * (not tested.refuted)
        assert any("own epsilon" in line for line in section.missing) == bool(odd)
    if drawn is not None:
        section = claim_section(seen(folder()), Audit(noise=drawn, mechanism="one round"))
        assert (words(section).splitlines()[-1:], section.leaks) == (wrong, leaks)
        assert section.missing == ["whether the drawn noise hides a record: give outcomes to Audit too"]


def test_what_epsilon_does_not_cover_is_listed() -> None:
    """Reasons of failures count unless they cannot depend on records."""
    history: list[dict[str, Any]] = [
        {"failed": {"0": "did not answer before its deadline of 3 s", "1": "z: pixel 3"}, "noted": {"images": 6}},
        {"failed": {"0": "lost", "2": "a: " + 90 * "x"}, "noted": {"a": 1}, "accuracy_personal": 1, "empty": []},
        {"failed": {"2": "z: pixel 3"}, "accuracy_clients_min": 0.5, "empty": [3], "privacy": {"epsilon": 1.0}},
    ]
    found = [
        f"the reasons of 2 failures, such as {'a: ' + 77 * 'x'!r}",
        "results on the clients' own test images (accuracy_clients_min, accuracy_personal)",
        "sums of exact counts (a, images)", "which clients have no images (empty)",
    ]  # fmt: skip
    section = claim_section(seen(folder(history=history)), None)
    assert section.leaks == [("claim", f"its history holds what epsilon does not cover: {'; '.join(found)}")]
    lines = [line for line in words(section).splitlines() if line.startswith("Not covered")]
    assert lines == [f"Not covered by epsilon, but in the history: {one}." for one in found]
    constant = {"0": "lost", "1": "failed; the reason is in its own log"}
    nothing = {"failed": constant, "noted": {}, "empty": [], "accuracy": 0.5, "privacy": {"epsilon": 1.0}}
    assert not claim_section(seen(folder(history=[nothing])), None).leaks


# Which classes clients hold.

PHASE = {"object": "fl:Phase", "with": {"epochs": 1, "train": "*"}}
OPTIONS: dict[str, Any] = {"lr": 0.1, "optimizer": "sgd", "phases": [PHASE]}
LABELS = {"object": "fl:Classification", "with": {"num_classes": 2}}
PLAIN: dict[str, Any] = {"method": {"object": "fl:FedAvg", "args": [], "with": OPTIONS}, "labels": LABELS}
RISE = torch.tensor([-0.5, 0.5])


def test_updates_without_bounds_are_counted_and_others_shown() -> None:
    noisy = torch.tensor([0.5, 0.25])  # no softmax's: its sum is not 0
    others = [(3, torch.zeros(n), 4) for n in (1, 3)]  # not of the output layer
    section = class_section(seen(updates=[(0, RISE, 4), (1, noisy, 4), (2, noisy / 0, 4), *others]))
    assert rows(section) == [("0", "1", "none", "1")]
    assert "2 updates allow no certain conclusion: bias_change must sum to 0" in words(section)
    [(kind, said)] = section.leaks
    assert (kind, "in 50 % of all cases" in said) == ("classes", True)


def test_classes_follow_from_the_updates() -> None:
    """All messages of a client count; no information is no finding; a change of another length is not read."""
    both, nothing = [("0", "0, 1", "none", "0")], [("3", "none", "none", "2")]
    other: Any = [(0, torch.tensor([1.0, 0, -1]), 4)]
    for updates, shown in (([(0, RISE, None), (0, -RISE, None)], both), ([(3, 0 * RISE, 4)], nothing), (other, [])):
        section = class_section(seen(updates=updates))
        assert (rows(section), bool(section.leaks)) == (shown, shown == both)
        unknown = "No certain conclusion (messages other than sets and plain updates)" in words(section)
        assert unknown == (not shown)


def test_bias_after_other_training_than_plain_sgd_is_not_read() -> None:
    decay = {"object": "fl:ClientOptimizer", "with": {"name": "sgd", "weight_decay": 0.1}}
    odd = [{"optimizer": decay}, {"optimizer": "adam"}, {"objective": "MOON"}, {"phases": [PHASE, PHASE]}]
    for options in ({}, *odd):
        method = {**PLAIN["method"], "with": {**OPTIONS, **options}}
        run = folder(config={**PLAIN, "method": method}, transcript=True)
        assert bool(rows(class_section(seen(run, updates=[(0, torch.zeros(2), 4)])))) == (not options)


@pytest.mark.parametrize(
    ("samples", "changed", "size"),
    [
        *((samples, {}, 5 if samples == 5 else None) for samples in (5.0, 2.5, 0.0, math.inf, torch.tensor(7.0))),
        (1, {"with": {**OPTIONS, "weights": "uniform"}}, None),
        (1.0, {"args": [{"object": "fl:Scaffold"}]}, None),
    ],
)
def test_weights_are_numbers_of_records_only_if_the_run_says_so(
    samples: Any, changed: dict[str, Any], size: int | None, monkeypatch: Any
) -> None:
    """A reply of any size has the weight 1 with uniform weights and some add-ons, of which no missing class follows."""
    update = {"0.bias": torch.zeros(4), "1.weight": torch.zeros(2, 4), "1.bias": RISE, "2.bias": torch.zeros(1, 2)}
    update["3.bias_scale"] = torch.zeros(2)
    values: dict[str, Any] = {"a.update": RISE, "FedAvg.update": update, "Any.samples": samples, "FedAvg.model": update}
    sent = [TranscriptMessage(1, 3, "up", values), TranscriptMessage(1, 3, "down", values)]
    sent += [TranscriptMessage(1, 3, "up", {}, exchange="answer"), TranscriptMessage(2, 4, "up", values)]
    monkeypatch.setattr(RecordedRun, "messages", lambda self: iter(sent))
    method = {**PLAIN["method"], "with": {**OPTIONS, "weights": "samples"}, **changed}
    found = ObservedData.from_run(folder(config={**PLAIN, "method": method}, transcript=True))
    assert found.replies == {3: 1, 4: 1}
    assert [(c, bias.tolist(), count) for c, bias, count in found.updates] == [(c, RISE.tolist(), size) for c in (3, 4)]


@pytest.mark.parametrize("count", [20, 23])
@pytest.mark.parametrize("refused", [0, 2])
def test_only_the_first_twenty_clients_are_listed(count: int, refused: int) -> None:
    updates = [(client, RISE, None) for client in reversed(range(count))]
    section = class_section(seen(updates=[*updates, *[(0, torch.ones(2), 4)] * refused]))
    assert "in 50 % of all cases" in section.leaks[0][1]
    assert [row[0] for row in rows(section)] == [str(client) for client in range(20)]
    more = ["3 more clients are not shown; the share above includes them."] * (count > 20)
    lines = words(section).splitlines()
    left = ["2 updates allow no certain conclusion: bias_change must sum to 0"] * (refused > 0)
    assert [line.split(" over ")[0] for line in lines[1:]] == [*more, *left]


def test_classes_are_collected_from_all_messages_of_a_client() -> None:
    """What one message shows to be present is not absent, even if another round lacked it."""
    labels = {"object": "fl:Classification", "with": {"num_classes": 4}}
    made = [LabeledImages(torch.rand(2, 1, 4, 4), kinds, num_classes=4) for kinds in ([0, 2], [1, 2])]
    updates = [(1, torch.tensor([1.0, -0.5, -0.5, 0]), None), (0, torch.tensor([1.0, -1, 0, 0]), 1)]
    made.append(LabeledImages(torch.rand(2, 1, 4, 4), torch.eye(4)[:2]))  # whose labels are no classes
    found = ObservedData([], [(4 + number // 2, one) for number, one in enumerate(made)], [*updates, (2, RISE, 1)], {})

    def section(**changes: Any) -> Section:
        return class_section(Evidence(folder(config={**PLAIN, "labels": labels, **changes}, transcript=True), found))

    cells = [("0", "0", "1, 2, 3", "0"), ("1", "0", "none", "3"), ("4", "0, 1, 2", "3", "0")]
    assert rows(section()) == cells
    said = "its messages reveal with certainty whether a client holds a class in 75 % of all cases"
    assert section().leaks == [("classes", said)]
    assert words(section()) == (
        "Inferred from the messages without looking at any image, assuming: a set made for the present classes only; "
        "the bias change by plain SGD on cross-entropy with hard labels only."
    )
    assert rows(section(privacy={})) == cells[:2]
    assert rows(section(method={"object": "fl:FedDM"})) == cells[2:]
    nothing = section(privacy={}, method={"object": "fl:FedDM"})
    assert nothing.missing == ["which classes each client holds: private messages; see attacks.inversion.class_bounds"]
    assert rows(section(labels=None)) == cells[2:]  # of the sets alone
    assert not rows(section(labels=LABELS))  # of another number of classes than the sets
    nothing = class_section(seen(folder()))
    assert "holds: no transcript; see" in nothing.missing[0]
    assert words(nothing).startswith("No certain conclusion (no transcript).")


def test_adversaries_are_listed_with_what_the_folder_has() -> None:
    sums = ("an observer of sums only (secure aggregation)", "the sum of a round's replies", "not attacked separately")
    first = "the server", "every message of every client"
    last = "recipients of the models", "the global model, the last or all"
    bare = adversary_section(folder())
    assert rows(bare) == [(*first, "not in the folder"), sums, (*last, "not in the folder")]
    assert not words(bare)
    assert rows(adversary_section(folder(published_set=images(0), history=[{}]))) == rows(bare)
    assert bare.missing == [f"what was sent: the run kept no transcript; {folder().transcript_hint}"]
    config: dict[str, Any] = {name: name[0] for name in ("seed", "odd", "rounds", "clients", "task", "method")}
    config["transcript"] = {"adversary": "a", "sees": "b"}
    models = {name: Path(f"checkpoint/model{name}.safetensors") for name in ("", "-a")}
    full = folder(models=models, transcript=True, history=[{}], published_set=images(0), config=config)
    both = "model.safetensors, model-a.safetensors"
    assert rows(adversary_section(full)) == [(*first, "the transcript"), sums, (*last, both)]
    facts = "method: m; task: t; clients: c; rounds: 1; seed: s"
    assert words(adversary_section(full)) == f'{facts}\nThe transcript holds what the adversary "a" sees: b.'
    private = words(adversary_section(folder(config={"privacy": {}}, transcript=True)))
    assert private == (
        "This is a private run. If the server adds the noise (client-level privacy), the messages show more than the "
        "models do, and the claimed epsilon does not cover them."
    )
    config["privacy"] = {}
    made = adversary_section(folder(published_set=images(0), config={k: config[k] for k in ("privacy", "transcript")}))
    assert rows(made) == [("recipients of the published set", "its images and labels", "set.safetensors")]
    assert (words(made), made.missing) == ("", [])


def test_a_claim_is_told_with_its_conditions(tmp_path: Path) -> None:
    def told(claim: dict[str, Any]) -> list[str]:
        section = Section("")
        _add_claim(section, claim)
        return words(section).splitlines()

    more = {"remarks": ["r", "s"], "assumed_public": {"DPSGD": ["size", "clip"], "b": [1]}}
    ends = ["Remark: r", "Remark: s", "Assumed public by DPSGD: size, clip.", "Assumed public by b: 1."]
    Ledger(tmp_path / "ledger.jsonl").void("a key is known")
    config = {"method": {"object": "fl:Any", "with": {"sigma": 1.0}}}  # and no charge
    assert "a key is known" in words(claim_section(seen(folder(path=tmp_path, config=config)), None))
    held = {"epsilon": 2.34567, "delta": 1.25e-5, "relation": "one", "valid_if": "planned"}
    start = "Claimed: epsilon 2.346 at delta 1.25e-05 (one), as the run recorded it."
    for epsilon in (2.34567, 0):
        first = start.replace("2.346", f"{epsilon:.4g}")
        assert told(held | more | {"epsilon": epsilon}) == [first, "It holds if planned.", *ends]
        hoped = f"With secret noise it would be epsilon {epsilon:.4g}."
        for reason in ("seeded", "shown"):
            lost = {"epsilon": None, "reason": reason, "nominal_epsilon": epsilon, "valid_if": "planned"}
            assert told(lost | more) == [f"No guarantee holds: {reason}.", hoped, *ends]
    assert told({"epsilon": None}) == ["No guarantee holds: the run records no reason."]


def test_started_records_are_rated_apart_from_the_rest() -> None:
    members = Records(torch.zeros(9, 1, 4, 4), torch.tensor([1, 3, 5, 7]), None)
    points = {"a": at_threshold(torch.tensor([0.0, 1.0]), torch.tensor([False, True]), 0.5)}
    for started, *shown in (([1, 2, 3], "2/2", "1/2"), ([1], "1/1", "2/3"), ([*range(9)], "3/4", ""), ([0], "", "3/4")):
        section = Section("")
        _add_groups(section, members, {"a": torch.tensor([0.6, 0.5, 0.4, 0.9])}, points, torch.tensor(started))
        rates = [Rate.of(*map(int, one.split("/"))) if one else "none attacked" for one in shown]
        header = ("attack", "records that images started from", "the rest")
        assert section.parts[1] == Table(header, [("a", *map(str, rates))], left=1)
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


def test_images_without_outsiders_are_shown_and_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"format": "distillkit.run/2"}', encoding="utf-8")
    made, network = images(1), ConvNet((1, 8, 8), 2, width=2, depth=1)
    made[:6].save(tmp_path / "set.safetensors")
    monkeypatch.chdir(tmp_path)
    found = report(".", members=made, network=network)
    text = found.markdown.read_text(encoding="utf-8")
    assert text.startswith(f"# Privacy report of the run {tmp_path.name}\n")
    assert "and below each the nearest private record. PSNR to the record: equal" in text
    table = text.split("| group ")[1].split("\n\n")[0]
    assert re.findall(r"\n\| ([^|-]+?) +\|", table) == ["private records", "baseline: random real images"]
    assert "Not attacked: see the last section." in text
    assert not found.leaks
    assert str(found) == f"{found.verdict} ({found.html})"
    options: Any = {"network": network, "max_records": 20, "started_from": torch.tensor([23])}
    judged = report(tmp_path, members=made, non_members=images(4), **options)
    assert any("(20 members and 20 non-members)" in line for line in judged.leaks + judged.not_found)
    assert any("the folder has no checkpoint/model.safetensors" in line for line in judged.missing)
