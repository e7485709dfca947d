"""Ledger of private runs, tested with a method of three lines: noised pixel sums."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections import UserList
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fl
from distillkit import LabeledImages
from distillkit.normalization import Normalization
from distillkit.privacy import BudgetExhausted, Event, Ledger, PrivacyError, PrivateStatistics, compose
from distillkit.privacy._journal import Journal
from distillkit.privacy.validation._arguments import NEW_LEDGER_REMARK
from distillkit.rng import derive
from fl import CheckpointError, Client, Entry, FedAvg, Filtered, Message, Method, NoUsableReply, Server, simulate
from fl.addons import DPSGD
from fl.aggregation import EntrySpec, Schema
from fl.engine._client_runtime import FAILED_PRIVATELY
from fl.engine._run_options import EXACT_TESTS, OWN_CODE
from fl.filters.filter import Filter
from fl.method import evaluation_spec
from fl.methods import PrivateFedDM
from tests.fl.federations import Tiny, images
from tests.refused import refused

SIGMA = 2.0
DELTA = 1e-5


class NoisySum(Method):
    """The sum of every client's images, noised on the client; `fatal` = (round, client) dies after its charge."""

    total = Entry[Tensor]("sum")
    private = True

    def __init__(self, fatal: tuple[int, int] | None = None) -> None:
        self.fatal = fatal

    def __repr__(self) -> str:
        return "NoisySum()"

    def start(self, server: Server) -> None:
        server.state[self.total] = torch.zeros(server.shape, dtype=torch.float64)

    def send(self, server: Server, client: int) -> Message:
        return Message({self.total: server.state[self.total]})

    def expect(self, server: Server, client: int) -> Schema:
        return {self.total.key: EntrySpec(server.state[self.total])}

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        return self.send(server, client)

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        return self.expect(server, client)

    def local(self, client: Client, message: Message) -> Message:
        client.spend("pixel_sum", SIGMA)
        if self.fatal == (client.round, client.id):
            signal.raise_signal(signal.SIGKILL)
        whole = client.data.images.clamp(-1, 1).double().sum(0)
        return Message({self.total: client.secret.add_noise(whole, SIGMA)})

    def receive(self, server: Server, replies: Any) -> None:
        server.state[self.total] = replies[self.total]


PEAK = float(images(6, seed=2).images.max())


def empty_client() -> LabeledImages:
    return images(1, seed=9)[torch.zeros(0, dtype=torch.int64)]


def client_data() -> list[LabeledImages]:
    return [images(4, seed=1), images(6, seed=2), empty_client()]


def play(rounds: int = 3, method: Method | None = None, **how: Any) -> fl.Run:
    return simulate(method or NoisySum(), client_data(), rounds=rounds, progress=False, **how)


def ledger_of(folder: Path, **how: Any) -> Ledger:
    """Return the ledger of the run in this folder."""
    return Ledger(folder / "ledger.jsonl", delta=DELTA, **how)


def charged_rounds(ledger: Ledger) -> dict[Any, list[int]]:
    """Return the charged rounds of each client."""
    found: dict[Any, list[int]] = {}
    for event in ledger.events:
        found.setdefault(int(event.client), []).append(event.round)
    return {k: sorted(found[k]) for k in sorted(found)}


@pytest.mark.parametrize("charged", [{}, {0: 9, 1: 9}, {0: 9, 1: 9, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 9, 1: 9, 2: 9}])
@pytest.mark.parametrize("verb", ["local", "answer", "first", "last"])
def test_reply_without_a_charge_ends_the_guarantee(charged: dict[int, int], verb: str) -> None:
    """Each client charges in its first rounds only; in another exchange than the training, for each of the two."""

    def spending(function: str) -> Any:
        def work(self: NoisySum, client: Client, message: Message) -> Message:
            if verb != function or client.round <= charged.get(client.id, -1):
                client.spend(function, SIGMA)
            client.notes["exact"] = len(client.data)
            return Message({self.total: message[self.total]})

        return work

    body = {name: spending(name) for name in ("local", "answer", "first", "last")}
    body["exchanges"] = {"first": ("first", "local"), "last": ("local", "last")}.get(verb, ("local",))
    body |= {"has_query": verb == "answer", "expect_answer": NoisySum.expect}
    method = type("Trusted", (NoisySum,), body)()
    last = play(2, method).rows[-1]
    enough = len(charged) == 3 and (verb == "answer" or min(charged.values()) == 9)
    assert (last["epsilon"] is not None) == enough
    assert "noted" not in last
    assert enough or "was not charged (" in last["privacy"]["reason"]


class Unpaid(NoisySum):
    """Method that charges nothing."""

    def local(self, client: Client, message: Message) -> Message:
        return Message({self.total: message[self.total]})


class Failing(Unpaid):
    def receive(self, server: Server, replies: Any) -> None:
        raise NoUsableReply("no update")


class Refusing(Unpaid):
    def read_reply(self, server: Server, reply: Message) -> Message:
        raise ValueError("useless")


class Wavering(Unpaid):
    asked = 0

    @property
    def private(self) -> bool:  # type: ignore[override]
        Wavering.asked += 1
        return Wavering.asked < 12


class ChargesOnce(Unpaid):
    """The server charges all clients once for two exchanges."""

    exchanges = ("first", "local")
    first = Unpaid.local

    def receive(self, server: Server, replies: Any) -> None:
        assert server.ledger is not None
        server.ledger.spend(Event("sum", SIGMA))


class Public(Unpaid):
    private = False


class Peek(Filter):
    """Filter that charges for the training's reply, but not for its own exchange."""

    before, private = ("peek",), True  # type: ignore[assignment]
    seen = Entry[Tensor]("sum")

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        return {self.seen.key: EntrySpec(torch.zeros(()))}

    def peek(self, client: Client, message: Message) -> Message:
        return Message({self.seen: client.data.images.sum()})

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        client.spend("out", SIGMA)
        return reply


@pytest.mark.parametrize(
    "method", [Failing(), Refusing(), Wavering(), ChargesOnce(), Filtered(Public(), Peek())], ids=lambda m: repr(m)[:8]
)
def test_reply_without_a_charge_ends_the_guarantee_however_the_round_ends(method: Method) -> None:
    Wavering.asked, ledger = 0, Ledger(delta=DELTA)
    with suppress(NoUsableReply):
        play(1, method, ledger=ledger)
    assert "was not charged (" in ledger.guarantee().reason


def test_client_that_fails_before_its_reply_is_not_uncharged() -> None:
    class Stops(ChargesOnce):
        first, receive = NoisySum.local, NoisySum.receive

        def local(self, client: Client, message: Message) -> Message:
            if client.id == 1:
                raise RuntimeError("gone")
            return NoisySum.local(self, client, message)

    for row in play(2, Stops()).rows:
        assert (row["failed"], row["epsilon"] is not None) == ({"1": FAILED_PRIVATELY}, True)


def test_exchange_of_a_filter_gets_no_memory_of_a_private_method() -> None:
    class Remembering(NoisySum):
        def local(self, client: Client, message: Message) -> Message:
            client.memory[self.total] = client.data.images.double().sum(0)
            return super().local(client, message)

    class Recalling(Filter):
        after = ("recall",)
        found = Entry[float]("sum")

        def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
            return {self.found.key: EntrySpec(0.0)}

        def recall(self, client: Client, message: Message) -> Message:
            return Message({self.found: float(len(client.memory))})

        def receive_exchange(self, server: Server, verb: str, replies: Any) -> dict[int, str]:
            if verb == "recall":
                server.notes["recalled"] = replies[self.found]
            return {}

    assert play(2, Filtered(Remembering(), Recalling())).rows[-1]["recalled"] == 0


def test_epsilon_is_in_every_row_and_is_the_maximum_over_clients(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    ledger.spend(Event("earlier", SIGMA, count=2, client=1))
    run = play(ledger=ledger, out=tmp_path)
    exact = [compose([(SIGMA, 1.0, n + 2)], DELTA).epsilon for n in (1, 2, 3)]
    assert [row["epsilon"] for row in run.rows] == pytest.approx(exact)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["privacy"]["relation"] for row in rows] == ["add or remove one record"] * 3
    assert rows[-1]["privacy"]["accountant"] == "exact"
    assert charged_rounds(ledger_of(tmp_path)) == {0: [1, 2, 3], 1: [0, 1, 2, 3], 2: [1, 2, 3]}


def test_run_without_privacy_has_no_ledger(tmp_path: Path) -> None:
    run = simulate(FedAvg(factory=Tiny), client_data(), rounds=1, out=tmp_path, progress=False)
    assert run.rows[0]["epsilon"] is None
    assert "privacy" not in run.rows[0]
    assert not list(tmp_path.glob("ledger*"))
    assert run.server.ledger is None


def test_client_without_records_replies_like_all_others() -> None:
    run = play(rounds=1)
    assert run.rows[0]["empty"] == []
    assert run.rows[0]["bytes_by_client"].keys() == {"0", "1", "2"}


def test_private_clients_are_evaluated_only_on_request() -> None:
    class Tested(NoisySum):
        def evaluate(self, client: Client, message: Message) -> Message:
            return Message({self.tested: {"global": torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]).double()}})

        def expect_evaluation(self, server: Server, client: int) -> Schema:
            return {self.tested.key: evaluation_spec(server.task, "global")}

        tested = Entry[Any]("sum")

    held = [fl.ClientData(h, images(3, seed=7)) for h in client_data()]
    rows = [simulate(Tested(), held, rounds=1, progress=False, evaluate=who).rows[0] for who in (None, "drawn", [1])]
    assert ["accuracy_clients" in row for row in rows] == [False, True, True]
    assert [EXACT_TESTS in row["privacy"].get("remarks", ()) for row in rows] == [False, True, True]


def test_budget_stops_the_run_before_the_round_that_exceeds_it(tmp_path: Path) -> None:
    budget = compose([(SIGMA, 1.0, 2)], DELTA).epsilon
    rows: list[Any] = []
    with pytest.raises(BudgetExhausted, match="round 3 was not finished; the state after round 2 is kept") as caught:
        play(rounds=9, ledger=ledger_of(tmp_path, budget=budget), out=tmp_path, on_round=rows.append)
    assert caught.value.remaining == 0
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["epsilon"] == pytest.approx(budget)
    for options, error, why in (
        ({}, BudgetExhausted, "over the budget"),
        ({"budget": 9.0}, PrivacyError, "budget must be"),
    ):
        with pytest.raises(error, match=why):  # the file keeps its budget
            play(rounds=3, ledger=ledger_of(tmp_path, **options), out=tmp_path, resume=True)


def test_run_with_an_incomplete_ledger_is_not_resumed(tmp_path: Path) -> None:
    play(rounds=2, out=tmp_path)
    path, beside = tmp_path / "ledger.jsonl", tmp_path / "ledger.jsonl.head"
    lines = path.read_bytes().splitlines()
    path.unlink()
    refused(lambda: play(rounds=3, out=tmp_path, resume=True), ValueError, "lost or changed")
    beside.unlink()
    with pytest.raises(CheckpointError, match="has epsilon 0, but the run had spent 2.943"):
        play(rounds=3, out=tmp_path, resume=True)
    for file in tmp_path.glob("ledger.jsonl*"):
        file.unlink()
    other = Ledger(path, delta=DELTA)  # as much epsilon, but not the charges of this run
    other.spend(*(Event(**{**json.loads(text)["event"], "mechanism": "other"}) for text in lines if b'"event"' in text))
    with pytest.raises(CheckpointError, match=f"had {len(lines)} lines .* it was cut, edited or replaced"):
        play(rounds=3, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="ledger must be in a file"):
        play(rounds=3, out=tmp_path / "other", ledger=Ledger(delta=DELTA))


CHILD = """
import sys; sys.path.insert(0, {root!r})
from tests.fl.test_private_runs import NoisySum, play
play(rounds=4, method=NoisySum(fatal=(3, 1)), out={out!r})
"""


def test_full_disk_under_the_ledger_blames_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(rounds=1, out=tmp_path)

    def full(journal: Journal, text: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", full)
        with pytest.raises(
            OSError, match=r"cannot write the ledger .*ledger\.jsonl: No space left on device; nothing was"
        ):
            play(rounds=3, out=tmp_path, resume=True)
    run = play(rounds=3, out=tmp_path, resume=True)
    assert [row["failed"] for row in run.rows] == [{}] * 3
    assert charged_rounds(Ledger(tmp_path / "ledger.jsonl"))[0] == [1, 2, 3]


def test_killed_round_is_charged_again_and_no_charge_is_lost(tmp_path: Path) -> None:
    code = CHILD.format(root=str(Path(__file__).parents[2]), out=str(tmp_path))
    child = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert child.returncode == -signal.SIGKILL
    before = charged_rounds(Ledger(tmp_path / "ledger.jsonl"))
    assert before[0] == before[1] == [1, 2, 3]
    run = play(rounds=4, out=tmp_path, resume=True)
    after = charged_rounds(Ledger(tmp_path / "ledger.jsonl"))
    assert after[0] == after[1] == [1, 2, 3, 3, 4]
    assert run.rows[-1]["epsilon"] == pytest.approx(compose([(SIGMA, 1.0, 5)], DELTA).epsilon)


@pytest.mark.parametrize("unsent", [None, 2])
@pytest.mark.parametrize("error", [ValueError, OSError])
def test_words_of_a_private_failure_stay_on_the_client(
    error: type[Exception], unsent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Type and message of an error may tell a record. The failed reply is charged."""

    class Telling(NoisySum):
        def send(self, server: Server, client: int) -> Message:
            return Message({self.total: [1]}) if client == unsent else super().send(server, client)

        def local(self, client: Client, message: Message) -> Message:
            reply = super().local(client, message)
            if client.id == 1:
                raise error(f"pixel out of range: {float(client.data.images.max())}")
            return reply

    logged: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("fl.engine._client_runtime"), "warning", lambda *a: logged.append(a[0] % a[1:])
    )
    ledger = Ledger(delta=DELTA)
    run = play(rounds=1, method=Telling(), ledger=ledger)
    failed, sent = (
        run.rows[0]["failed"],
        "got no request, because the server's send raised TypeError: NoisySum.total must",
    )
    assert unsent is None or failed.pop("2")[: len(sent)] == sent
    assert failed == {"1": FAILED_PRIVATELY}
    assert charged_rounds(ledger)[1] == [1]
    assert [line.split(" (line")[0] for line in logged] == [f"raised {error.__name__}: pixel out of range: {PEAK}"]


def test_noise_is_from_the_system_unless_seeded_without_guarantee(tmp_path: Path) -> None:
    first, second = (play(rounds=1).server.state[NoisySum.total] for _ in range(2))
    assert not torch.equal(first, second)
    runs = [play(rounds=2, secret=5, workers=w) for w in (1, 3)]
    assert torch.equal(*(r.server.state[NoisySum.total] for r in runs))
    assert runs[0].rows[-1]["epsilon"] is None
    assert "seeded" in runs[0].rows[-1]["privacy"]["reason"]
    assert runs[0].rows[-1]["privacy"]["nominal_epsilon"] > 0
    assert not torch.equal(runs[0].server.state[NoisySum.total], play(secret=6).server.state[NoisySum.total])


def test_seeded_noise_differs_between_server_clients_and_rounds() -> None:
    class Pure(NoisySum):
        each = Entry[Tensor]("union")

        def local(self, client: Client, message: Message) -> Message:
            return Message({self.each: client.secret.add_noise(torch.zeros(1, 4), 1.0)})

        def expect(self, server: Server, client: int) -> Schema:
            return {self.each.key: EntrySpec(torch.zeros(1, 4, dtype=torch.float64))}

        def receive(self, server: Server, replies: Any) -> None:
            own = server.secret.add_noise(torch.zeros(1, 4), 1.0)
            earlier = server.state.get(self.each, torch.zeros(0, 4))
            server.state[self.each] = torch.cat([earlier, own, replies[self.each]])

    rows = play(rounds=3, method=Pure(), secret=5).server.state[Pure.each]
    assert len(rows.unique(dim=0)) == 12


def test_run_is_not_resumed_with_another_source_of_noise_or_delta(tmp_path: Path) -> None:
    play(rounds=1, out=tmp_path, secret=1)
    refused(lambda: play(rounds=2, out=tmp_path, resume=True), CheckpointError, "privacy")
    with pytest.raises(CheckpointError, match="privacy"):
        play(rounds=2, out=tmp_path, resume=True, secret=1, ledger=Ledger(tmp_path / "other.jsonl", delta=1e-6))


def test_method_not_declared_private_cannot_charge() -> None:
    class Silent(NoisySum):
        private = False

    with pytest.raises(NoUsableReply, match="the method must have `private = True`"):
        simulate(Silent(), client_data()[:2], rounds=1, progress=False)
    client = Client(0, empty_client(), None, None, 1, 0)  # type: ignore[arg-type]
    refused(lambda: client.spend("x", 1.0), PrivacyError, "the run has no ledger to charge")


class Chosen(NoisySum):
    """Draws its own clients, and none in round 2."""

    def draw(self, server: Server) -> list[int]:
        return [] if server.round == 2 else [0, 2]

    def receive(self, server: Server, replies: Any) -> None:
        server.notes["replies"] = len(replies.clients)


def test_secret_draw_is_not_in_the_history_and_may_be_empty() -> None:
    run = play(method=Chosen())
    assert [row["replies"] for row in run.rows] == [2, 0, 2]
    assert [(row["drawn"], row["bytes_by_client"]) for row in run.rows] == [(None, None)] * 3


class Lazy:
    """Clients created on access."""

    def __init__(self, held: list[LabeledImages]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> LabeledImages:
        if number >= len(self.held):
            raise IndexError
        return self.held[number]


def test_class_count_measured_on_labels_is_refused_before_any_charge() -> None:
    told = client_data()
    derived = LabeledImages(told[1].images, told[1].labels)
    ledger = Ledger(delta=DELTA)
    for held in (
        [derived, derived[:5]],
        (fl.ClientData(derived),),
        *(kind([derived, told[0]]) for kind in (Lazy, UserList)),
    ):
        with pytest.raises(PrivacyError, match=r"num_classes must be given.*data\.replace\(num_classes=K\)"):
            simulate(NoisySum(), held, rounds=1, progress=False, ledger=ledger)  # type: ignore[arg-type]
    made = told[1].replace(info={"derived": "herding"})
    with pytest.raises(
        PrivacyError, match=r"clients\[1\] must be records, but they were made from other .*\(herding\)"
    ):
        simulate(NoisySum(), [told[0], made], rounds=1, progress=False, ledger=ledger)
    assert ledger.events == ()
    late = Lazy([told[0], made])
    with pytest.warns(UserWarning, match="client 1 failed in every round"):
        simulate(NoisySum(), late, rounds=1, progress=False, ledger=ledger)  # type: ignore[arg-type]
    assert {event.client for event in ledger.events} == {"0"}
    simulate(FedAvg(factory=Tiny), [derived, derived[:5]], rounds=1, progress=False)
    simulate(NoisySum(), [derived, derived[:5]], rounds=1, progress=False, task=fl.Classification(3))


RECORDS = FedAvg(DPSGD(sigma=1.0, rate=0.5, size=4), factory=Tiny, weights="uniform", steps=1)
WHOLE = Filtered(FedAvg(factory=Tiny, weights="uniform"), fl.ClientDP(1.0, 0.5, clip=0.1))


SETS = PrivateFedDM(
    factory=Tiny, sigma=1.0, sizes=[2.0] * 3, ipc=1, steps=1, server_epochs=1, num_networks=1, least=0.0
)


@pytest.mark.parametrize("method", [RECORDS, WHOLE, SETS], ids=["DPSGD", "ClientDP", "PrivateFedDM"])
def test_measured_statistics_are_refused_before_round_1(method: Method) -> None:
    pixels = torch.rand(6, 1, 4, 4, generator=derive(3))
    ledger = Ledger(delta=DELTA)
    for public in (False, True):
        normalization = Normalization.of(pixels, public=public)
        held = [LabeledImages.from_pixels(pixels, torch.arange(6) % 3, num_classes=3, normalization=normalization)]
        if public:
            simulate(method, held, rounds=1, progress=False, ledger=ledger)
        else:
            said = f"mean and std were measured on images, and every release of {type(method.inner).__name__} shows"
            with pytest.raises(PrivateStatistics, match=said):
                simulate(method, held, rounds=1, progress=False, ledger=ledger)
            assert ledger.events == ()


@pytest.mark.filterwarnings("error")
def test_shared_images_of_two_clients_are_warned_of() -> None:
    told = client_data()
    twice = [*told, told[1].replace(images=told[1].images.clone())]
    with pytest.warns(UserWarning, match="clients 1 and 3 have the same images.*disjoint=False"):
        simulate(NoisySum(), twice, rounds=1, progress=False)
    overlapping = simulate(NoisySum(), twice, rounds=1, progress=False, ledger=Ledger(disjoint=False))
    simulate(NoisySum(), [*told, empty_client()], rounds=1, progress=False)
    assert overlapping.rows[0]["epsilon"] == pytest.approx(compose([(SIGMA, 1.0, 4)], DELTA).epsilon)


def test_run_with_a_given_ledger_records_it(tmp_path: Path) -> None:
    for run in (play(rounds=1), play(rounds=1, out=tmp_path), play(rounds=2, out=tmp_path, resume=True)):
        assert run.rows[-1]["privacy"]["remarks"] == [NEW_LEDGER_REMARK, OWN_CODE.format("NoisySum")]
    used = Ledger(delta=DELTA)
    assert "remarks" not in play(1, RECORDS, ledger=used).rows[0]["privacy"]
    row = play(1, type("Other", (NoisySum,), {"__module__": "flora.methods"})(), ledger=used).rows[0]
    assert row["privacy"]["remarks"] == [OWN_CODE.format("Other")]
    wrapped = type("Wrapped", (Filtered,), {"__module__": "flora.filters"})(WHOLE.method, *WHOLE.filters)
    assert play(1, wrapped, ledger=Ledger(delta=DELTA)).rows[0]["privacy"]["remarks"] == [OWN_CODE.format("Wrapped")]
