from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from distillkit.networks import FixedNetwork, build
from distillkit.privacy import (
    ADD_OR_REMOVE_CLIENT,
    ALL_CLIENTS,
    ASSUMPTIONS,
    REPLACE_RECORD,
    Account,
    BudgetExhausted,
    Event,
    Ledger,
    NotAccountable,
    PublicEmbedders,
    Secret,
    class_sums,
    compose,
    gaussian_epsilon,
    image_sgd,
    private_histogram,
    release,
    train_private,
)
from distillkit.privacy._child_ledger import ChildLedger, child_state
from tests.distillkit.privacy.options import write_chain
from tests.refused import refused

ONE = Event("class_means", 2.0, client=0)


def head_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def test_spends_of_a_client_compose() -> None:
    ledger = Ledger()
    assert ledger.epsilon() == 0.0
    for round in range(3):
        ledger.spend(replace(ONE, round=round, count=2))
    assert ledger.epsilon() == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(6), 1e-5), rel=1e-9)
    assert ledger.guarantee().accountant == "exact"
    assert ledger.guarantee().relation == "add or remove one record"
    assert ledger.epsilon(delta=1e-3) == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(6), 1e-3), rel=1e-9)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 2.0, 5.0]), st.integers(1, 4)), min_size=1))
def test_epsilon_is_the_maximum_over_disjoint_clients(events: list[tuple[int, float, int]]) -> None:
    disjoint, overlapping = Ledger(), Ledger(disjoint=False)
    for client, sigma, count in events:
        for ledger in (disjoint, overlapping):
            ledger.spend(Event("release", sigma, count=count, client=client))
    own = {client: compose([(s, 1.0, n) for c, s, n in events if c == client], 1e-5).epsilon for client, _, _ in events}
    assert disjoint.epsilon() == max(own.values())
    assert {client: disjoint.epsilon(client) for client in own} == own
    assert overlapping.epsilon() == compose([(s, 1.0, n) for _, s, n in events], 1e-5).epsilon
    before = disjoint.epsilon()
    disjoint.spend(Event("release", 100.0, client="newcomer"))
    assert disjoint.epsilon() == before


def test_event_for_all_clients_is_charged_to_each() -> None:
    ledger = Ledger()
    ledger.spend(Event("server", 3.0, client=ALL_CLIENTS))
    ledger.spend(Event("local", 2.0, client=1))
    both = compose([(3.0, 1.0, 1), (2.0, 1.0, 1)], 1e-5).epsilon
    assert ledger.epsilon(1) == both == ledger.epsilon()
    ledger.register([2])
    assert ledger.epsilon(2) == compose([(3.0, 1.0, 1)], 1e-5).epsilon


def test_file_contains_the_event_when_spend_returns(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.spend(replace(ONE, client="a", round=4, seeded=True))
    first, charge = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first["relation"] == "add or remove one record"
    line = charge["event"]
    assert line == {
        "mechanism": "class_means",
        "sigma": 2.0,
        "rate": 1.0,
        "count": 1,
        "client": "a",
        "round": 4,
        "sampling": "everything",
        "relation": "add or remove one record",
        "seeded": True,
    }
    assert Ledger(path).events == ledger.events


def test_repeated_round_is_charged_again(tmp_path: Path) -> None:
    Ledger(tmp_path / "l").spend(ONE)
    again = Ledger(tmp_path / "l")
    again.spend(ONE)
    assert again.epsilon() == gaussian_epsilon(2.0 / math.sqrt(2), 1e-5)


def test_append_that_was_cut_at_any_byte_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    ledger.spend(replace(ONE, client=1), replace(ONE, client=2, sigma=9.0))
    kept, before, head = path.read_bytes(), ledger.events, head_of(path).read_bytes()
    ledger.spend(replace(ONE, client=2, sigma=3.0, count=2), ONE)
    whole, everything, later = path.read_bytes(), ledger.events, head_of(path).read_bytes()
    for cut in range(len(kept), len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        head_of(path).write_bytes(later)
        assert Ledger(path).events == everything
        assert path.read_bytes() == whole
        if cut > len(kept):  # lines are never older than their head
            head_of(path).write_bytes(head)
            refused(lambda: Ledger(path), ValueError, "are not those of its head|lost or changed")
            path.write_bytes(whole[:cut] + b"\0\0")
            head_of(path).write_bytes(later)
            refused(lambda: Ledger(path), ValueError, "are not those of its head|damaged")
    path.write_bytes(kept)
    head_of(path).write_bytes(head)
    assert Ledger(path).events == before


@pytest.mark.parametrize("head", [b"", b"{", b"[]", b'{"lines": 0, "hash": "", "next": [3]}', b'{"lines": "0"}', None])
def test_missing_or_damaged_head_is_refused(head: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "l"
    Ledger(path).spend(ONE)
    head_of(path).unlink() if head is None else head_of(path).write_bytes(head)
    for _ in range(2):
        refused(lambda: Ledger(path), ValueError, "l.head is (missing|damaged).*restore the file")


@pytest.mark.parametrize("call", range(14))
def test_kill_at_any_call_loses_no_charge_that_was_acknowledged(call: int, tmp_path: Path) -> None:
    """The process dies before its n-th call to write, sync or rename; two charges make 13 such calls."""
    path, told = tmp_path / "l", tmp_path / "acknowledged"
    if (child := os.fork()) == 0:
        count = itertools.count()

        def or_die(function: Any) -> Any:
            return lambda *a, **k: os._exit(9) if next(count) == call else function(*a, **k)

        for name in ("write", "fsync", "replace"):
            setattr(os, name, or_die(getattr(os, name)))
        ledger = Ledger(path)
        for _ in range(2):
            ledger.spend(ONE)
            with open(told, "a", encoding="utf-8") as file:
                file.write("1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if call < 13 else 0)
    acknowledged = len(told.read_text(encoding="utf-8")) if told.exists() else 0
    assert len(Ledger(path).events) in (acknowledged, acknowledged + 1)
    Ledger(path).spend(ONE)
    assert len(Ledger(path).events) > acknowledged


def test_damaged_and_missing_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    ledger.spend(ONE)
    ledger.spend(ONE)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"sigma": 2.0', '"sigma: 2.0', 1), encoding="utf-8")
    refused(lambda: Ledger(path), ValueError, "line 2 of .* is damaged")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    refused(lambda: ledger.epsilon(), ValueError, "lost lines")
    path.unlink()
    refused(lambda: ledger.spend(ONE), ValueError, "lost lines")
    head_of(path).unlink()
    path.write_text('{"accuracy": 1}\n', encoding="utf-8")
    refused(lambda: Ledger(path), ValueError, "line 1 of .* was edited, or is no ledger")


@pytest.mark.parametrize(
    "odd",
    [
        {"accuracy": 1}, {"event": {}}, {"event": {**asdict(ONE), "sigma": -1.0}}, {"remark": "x", "from": 5},
        {"assumed": ["x"]}, {"assumed": 3, "by": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_refused_line_stays_refused_and_later_lines_are_not_skipped(odd: dict[str, Any], tmp_path: Path) -> None:
    event = {"event": asdict(ONE)}
    write_chain(tmp_path / "l", event)
    ledger = Ledger(tmp_path / "l")
    write_chain(tmp_path / "l", event, odd, event)
    for use in (ledger.epsilon, ledger.epsilon, lambda: ledger.spend(ONE), lambda: Ledger(tmp_path / "l")):
        refused(use, ValueError, "line 2 of .* is not a line of a ledger: .* give the path of a ledger")
    assert len((tmp_path / "l").read_text(encoding="utf-8").splitlines()) == 3


def test_interrupted_reading_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while reading another process's lines; the next read counts all of them."""
    ledger, other = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    other.spend(ONE, replace(ONE, client=2), ONE)
    take, taken = Ledger._read_line, []

    def interrupted(self: Ledger, number: int, line: dict[str, Any]) -> None:
        taken.append(number)
        if len(taken) == 2:
            raise KeyboardInterrupt
        take(self, number, line)

    monkeypatch.setattr(Ledger, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.epsilon()
    assert ledger.events == other.events
    assert ledger.epsilon() == other.epsilon()
    assert taken == [1, 2, 2, 3, 4]


def test_no_acknowledged_event_is_lost_after_a_kill(tmp_path: Path) -> None:
    path, (reading, writing) = tmp_path / "l", os.pipe()
    child = os.fork()
    if not child:
        ledger = Ledger(path)
        for round in range(10**6):
            ledger.spend(replace(ONE, round=round))
            os.write(writing, b"x")
        os._exit(0)
    while path.stat().st_size < 2000 if path.exists() else True:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    acknowledged = len(os.read(reading, 10**6))
    assert acknowledged > 0
    resumed = Ledger(path)
    assert len(resumed.events) >= acknowledged
    assert resumed.epsilon() >= compose([(2.0, 1.0, acknowledged)], 1e-5).epsilon
    resumed.spend(replace(ONE, round=0))
    assert resumed.epsilon() > compose([(2.0, 1.0, acknowledged)], 1e-5).epsilon


def test_two_ledgers_and_many_threads_share_one_file(tmp_path: Path) -> None:
    first, second = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    with ThreadPoolExecutor(4) as pool:
        for ledger in (first, second):
            for client in range(4):
                pool.submit(ledger.spend, replace(ONE, client=client))
    assert len(first.events) == len(second.events) == 8
    assert first.epsilon() == second.epsilon() == compose([(2.0, 1.0, 2)], 1e-5).epsilon


def test_budget_stops_before_the_release(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", budget=gaussian_epsilon(1.0, 1e-5))
    ledger.spend(replace(ONE, count=3))
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(BudgetExhausted, match="1 of 5 releases of class_means fit; or raise sigma") as caught:
        ledger.spend(replace(ONE, count=5))
    assert caught.value.remaining == 1 == ledger.remaining(replace(ONE, count=5))
    assert (tmp_path / "l").read_bytes() == before
    with pytest.raises(BudgetExhausted):
        ledger.check(ONE, ONE)
    ledger.check(ONE)
    ledger.spend(ONE)
    refused(lambda: Ledger(tmp_path / "l", budget=ledger.budget).spend(ONE), BudgetExhausted, "0 of 1")
    ledger.spend(replace(ONE, client="other"))
    with pytest.raises(BudgetExhausted):
        ledger.spend(Event("server", 50.0, client=ALL_CLIENTS))
    assert Ledger().remaining(replace(ONE, count=7)) == 7


def test_several_events_are_charged_together_or_not_at_all() -> None:
    ledger = Ledger(budget=gaussian_epsilon(1.0, 1e-5))
    with pytest.raises(BudgetExhausted, match="histogram and class_means"):
        ledger.spend(Event("histogram", 2.0), replace(ONE, count=4))
    assert ledger.events == ()
    ledger.spend(Event("histogram", 2.0), replace(ONE, count=3))
    assert len(ledger.events) == 2


def test_seeded_or_absent_noise_carries_no_guarantee() -> None:
    ledger = Ledger()
    ledger.spend(replace(ONE, client=1), replace(ONE, client=2, seeded=True))
    assert ledger.epsilon(1) == gaussian_epsilon(2.0, 1e-5)
    assert ledger.epsilon(2) is None is ledger.epsilon()
    guarantee = ledger.guarantee()
    assert guarantee.nominal == gaussian_epsilon(2.0, 1e-5)
    assert "seeded" in guarantee.reason
    assert str(guarantee).startswith("no guarantee: the noise of class_means was seeded")
    assert guarantee.info()["nominal_epsilon"] == guarantee.nominal
    ledger.spend(Event("raw", 0.0, client=3))
    bare = ledger.guarantee(3)
    assert bare.epsilon is None
    assert "without noise" in bare.reason
    assert bare.info()["nominal_epsilon"] is None
    for client, first in ((2, "seeded"), (3, "without noise")):  # what broke the guarantee first is its reason
        ledger.spend(Event("raw", 0.0, client=client), replace(ONE, client=client, seeded=True))
        ledger.void("a file was lost", client=client)
        assert first in ledger.guarantee(client).reason


def test_void_and_remarks_are_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.spend(replace(ONE, client=1), replace(ONE, client=2))
    ledger.void("raw images were sent", client=2)
    ledger.add_remark("the clip was tuned on private data")
    for opened in (ledger, Ledger(tmp_path / "l")):
        assert opened.epsilon(1) == gaussian_epsilon(2.0, 1e-5)
        assert opened.guarantee().reason == "raw images were sent"
        assert "the clip was tuned" in str(opened.guarantee(1))
        assert opened.guarantee(1).info()["remarks"] == ["the clip was tuned on private data"]
    ledger.void("w was trained on everything")
    assert Ledger(tmp_path / "l").epsilon(1) is None


@pytest.mark.parametrize("sampling", ["shuffled", "without replacement", "everything"])
def test_unknown_sampling_is_refused(sampling: str) -> None:
    refused(lambda: Event("dp_sgd", 1.0, 0.1, sampling=sampling), NotAccountable, "sampling='poisson'")
    with pytest.raises(NotAccountable, match="Poisson amplification is proved for"):
        Event("dp_sgd", 1.0, 0.1, relation=REPLACE_RECORD)
    refused(lambda: Event("dp_sgd", 1.0, relation="label change"), NotAccountable, "relation must be one of")
    assert Event("dp_sgd", 1.0, 0.1).sampling == "poisson"


def test_mixed_relations_are_refused() -> None:
    ledger = Ledger()
    ledger.spend(ONE)
    for relation in (ADD_OR_REMOVE_CLIENT, REPLACE_RECORD):
        with pytest.raises(NotAccountable, match="keep two ledgers"):
            ledger.spend(replace(ONE, relation=relation))
    with pytest.raises(NotAccountable, match="keep two ledgers"):
        Ledger().spend(ONE, replace(ONE, relation=ADD_OR_REMOVE_CLIENT))


def test_invalid_events_and_ledgers_are_refused() -> None:
    refused(lambda: Event("x", 1.0, 0.0), ValueError, "rate")
    refused(lambda: Event("x", 1.0, count=0), ValueError, "count")
    refused(lambda: Event("x", -1.0), ValueError, "sigma")
    refused(lambda: Ledger(delta=0.0), NotAccountable, "delta")
    refused(lambda: Ledger(budget=0.0), ValueError, "budget")
    for order in (0.0, 1.0):
        refused(lambda order=order: Ledger(renyi_order=order), ValueError, "renyi_order must be greater than 1")
    refused(lambda: Account("ledger.jsonl"), TypeError, "ledger must be a Ledger, got str")  # type: ignore[arg-type]


def test_spending_is_cheap() -> None:
    ledger = Ledger()
    start = time.perf_counter()
    for round in range(500):
        ledger.spend(Event("dp_sgd", 1.0, 0.05, 10, client=round % 20, round=round))
    assert time.perf_counter() - start < 5
    assert ledger.epsilon(0) == compose([(1.0, 0.05, 250)], 1e-5).epsilon


def test_joint_charge_of_overlapping_clients_is_checked_as_a_whole() -> None:
    """Two releases of epsilon 1.99 from possibly equal records cost 2.94 together, above the budget of 2."""
    pair = Event("class_means", 2.0, client="A"), Event("class_means", 2.0, client="B")
    ledger = Ledger(budget=2.0, disjoint=False)
    refused(lambda: ledger.spend(*pair), BudgetExhausted, r"client 'A' and client 'B' would bring epsilon to 2\.9")
    assert ledger.events == ()
    Ledger(budget=2.0).spend(*pair)


@given(
    st.lists(st.tuples(st.sampled_from(["A", "B", ALL_CLIENTS]), st.floats(1.0, 9.0)), min_size=1, max_size=4),
    st.data(),
)
def test_check_predicts_the_epsilon_after_the_charge(events: list[tuple[str, float]], data: st.DataObject) -> None:
    disjoint = data.draw(st.booleans())
    held, asked = Ledger(disjoint=disjoint), [Event("x", sigma, client=client) for client, sigma in events]
    first = data.draw(st.integers(0, len(asked) - 1))
    held.spend(*asked[:first])
    after = Ledger(disjoint=disjoint)
    after.spend(*asked)
    assert held._epsilon_after(asked[first:]) <= after.guarantee().nominal * (1 + 1e-9)
    if first == 0:
        assert held._epsilon_after(asked) == pytest.approx(after.guarantee().nominal, rel=1e-9)


@pytest.mark.parametrize("disjoint", [True, False])
@pytest.mark.parametrize("budget", [2.5, 3.5])
def test_child_ledger_refuses_what_the_runs_ledger_refuses(disjoint: bool, budget: float) -> None:
    """Sigma 2 costs 1.99 once, 2.94 twice and 3.71 three times; clients B and all others were charged before."""
    trunk = Ledger(budget=budget, disjoint=disjoint)
    trunk.spend(Event("class_means", 2.0, client="B"))
    child, charge = ChildLedger(child_state(trunk, "A")), Event("class_means", 2.0, client="A")
    refused = []
    for ledger in (trunk, child):
        charged = 0
        with contextlib.suppress(BudgetExhausted):
            while charged < 5:
                ledger.spend(charge)
                charged += 1
        refused.append(charged)
    assert refused[0] == refused[1] == {2.5: 1, 3.5: 2}[budget] - (not disjoint)


def test_client_number_and_name_denote_the_same_client(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    for client in (1, "1", torch.tensor(1).item()):
        ledger.spend(Event("class_means", 2.0, client=client))
    for one in (ledger, Ledger(tmp_path / "l")):
        assert one.epsilon(1) == one.epsilon("1") == one.epsilon() == compose([(2.0, 1.0, 3)], 1e-5).epsilon
        assert {e.client for e in one.events} == {"1"}
    ledger.void("shown", client=1)
    assert ledger.epsilon("1") is None
    for wrong in (True, 1.0, None):
        with pytest.raises(TypeError, match="client must be an integer or a string"):
            Event("class_means", 2.0, client=wrong)  # type: ignore[arg-type]


def test_event_without_a_client_is_charged_to_all() -> None:
    ledger = Ledger()
    ledger.spend(Event("class_means", 2.0, client="A"))
    ledger.spend(Event("class_means", 2.0))
    assert ledger.events[1].client == ALL_CLIENTS
    assert (
        ledger.epsilon("A") == ledger.epsilon(ALL_CLIENTS) == ledger.epsilon() == compose([(2.0, 1.0, 2)], 1e-5).epsilon
    )
    ledger.register(["B"])
    assert ledger.epsilon("B") == compose([(2.0, 1.0, 1)], 1e-5).epsilon


def test_remarks_and_assumptions_are_written_once_and_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    for _ in range(2):
        ledger.add_remark("the clip was tuned on private data")
        ledger.assume("private_histogram")
        ledger.assume("mine", ["classes"])
    assert len((tmp_path / "l").read_text(encoding="utf-8").splitlines()) == 4
    for one in (ledger, Ledger(tmp_path / "l")):
        assert one.guarantee().remarks == ("the clip was tuned on private data",)
        assert one.guarantee().info()["assumed_public"] == {
            "private_histogram": list(ASSUMPTIONS["private_histogram"]),
            "mine": ["classes"],
        }


def test_charge_is_synced_under_the_lock_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "ledger.jsonl", []
    sync = os.fsync

    def observed(handle: int) -> None:
        with pytest.raises(Timeout):  # another process could not read or append meanwhile
            FileLock(tmp_path / "ledger.jsonl.lock").acquire(timeout=0)
        seen.append(path.read_bytes().count(b"\n") if path.exists() else 0)
        sync(handle)

    monkeypatch.setattr(os, "fsync", observed)
    ledger = Ledger(path)
    ledger.spend(ONE)
    assert seen == [0, 0, 2, 2]  # the head and its name, the lines, and the new file's name in its folder
    for change in (lambda: ledger.spend(ONE, ONE), lambda: ledger.void("sent"), lambda: ledger.add_remark("tuned")):
        seen.clear()
        before = path.read_bytes().count(b"\n")
        change()
        assert seen == [before, before, path.read_bytes().count(b"\n")]


def neighbours(relation: str, data: LabeledImages) -> tuple[LabeledImages, LabeledImages]:
    """Return the set, and one that differs by its last record as the relation says."""
    if relation == "add or remove one record":
        return data, data[:-1]
    last = data[-1:]
    other = last.replace(images=-3 * last.images, labels=(last.labels + 1) % data.num_classes)
    return data, LabeledImages.concatenate([data[:-1], other])


@pytest.mark.parametrize("mechanism", ["histogram", "class_means", "dp_sgd", "image_sgd"])
def test_noise_covers_the_distance_of_neighbours_of_the_stated_relation(mechanism: str) -> None:
    """The noise's standard deviation over the stated sigma is the sensitivity, for the relation of the charge."""
    sharp = 1e-4
    data = images_of(12)

    def released(data: LabeledImages, secret: Secret, sigma: float) -> tuple[torch.Tensor, Event]:
        ledger = Ledger()
        account = Account(ledger, secret=secret)
        if mechanism == "histogram":
            found = private_histogram(data.labels, num_classes=3, sigma=sigma, ledger=account)
        elif mechanism == "class_means":
            embedders = PublicEmbedders(FixedNetwork(tiny_network()), 1, like=images_of(12), clip=0.7)
            sums = class_sums(data.images, data.labels, embedders, num_classes=3)
            found = release(sums, sigma=sigma, sensitivity=embedders.sensitivity, ledger=account)
        elif mechanism == "dp_sgd":
            net = tiny_network()
            start = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
            how = {"size": 20, "rate": 1.0, "steps": 1, "lr": 1.0, "clip": 0.1, "progress": False}
            train_private(net, data, sigma=sigma, ledger=account, **how)
            found = 20 * (torch.nn.utils.parameters_to_vector(net.parameters()).detach() - start)
        else:
            steps: list[torch.Tensor] = []
            image_sgd(
                data, size=30, sigma=sigma, clip=0.1, rate=1.0, steps=1, ipc=1, networks=FixedNetwork(tiny_network()),
                ledger=account, callback=lambda _, gradient: steps.append(gradient), progress=False,
            )  # fmt: skip
            found = steps[0] * 30 / 3
        return found.double(), ledger.events[-1]

    secret = Secret(0)
    event = released(data, secret, 2.0)[1]
    (std,) = secret.drawn
    one, other = (released(side, Secret(0), sharp)[0] for side in neighbours(event.relation, data))
    distance = float((one - other).norm())
    assert distance <= std / event.sigma * (1 + 1e-6)
    assert distance > 0.5 * std / event.sigma or mechanism == "class_means"


def images_of(count: int) -> LabeledImages:
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return LabeledImages(images, torch.arange(count) % 3, num_classes=3, normalization=Normalization((0.5,), (0.25,)))


def tiny_network() -> torch.nn.Module:
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return build(flat.double, 0)


def test_child_ledger_refuses_like_the_ledger_and_lists_its_charges() -> None:
    event = Event("x", 2.0, client=1)
    trunk = Ledger(delta=1e-5, budget=compose([(2.0, 1.0, 3)], 1e-5).epsilon)
    trunk.spend(event, Event("x", 2.0, client=2), event)
    trunk.add_remark("known")
    branch = ChildLedger(json.loads(json.dumps(child_state(trunk, 1))))
    assert branch.epsilon(1) == trunk.epsilon(1)
    assert branch.charged == []
    branch.spend(event)
    branch.add_remark("known")
    branch.add_remark("new")
    branch.void("tested", client=1)
    with pytest.raises(BudgetExhausted):
        branch.spend(event)
    assert [next(iter(line)) for line in branch.charged] == ["event", "remark", "void"]
