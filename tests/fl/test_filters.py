"""The chain of filters: client side in order, server side reversed, everything else unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fl
from distillkit.privacy import PrivacyError
from fl import Client, ClientData, ClientDP, Entry, FedAvg, Filter, Filtered, Message, Method, Run, Server, simulate
from fl.addons import MOON, SCAFFOLD, FedAvgM, FineTune
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging.addon import AddOn
from fl.message import Tensors
from tests.fl.federations import federation, images
from tests.fl.invariances import assert_same, network
from tests.refused import refused

TRACE: list[str] = []


def mapped(message: Message, change: Any) -> Message:
    """Return the reply with a changed update."""
    other = message.copy()
    other[FedAvg.update] = {n: change(t) for n, t in message[FedAvg.update].items()}
    return other


@dataclass(frozen=True)
class Scale(Filter):
    """Multiply on the client and divide on the server; the server's factor doubles every round."""

    factor: float = 2.0
    now = Entry[float]("first")
    count = Entry[float]("sum")

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        server.state[self.now] = self.factor

    def send(self, server: Server, client: int, message: Message) -> None:
        message[self.now] = server.state[self.now]

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        schema[self.count.key] = EntrySpec(1.0)

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        TRACE.append("scale out")
        other = mapped(reply, lambda t: t * message[self.now])
        other[self.count] = 1.0
        return other

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        TRACE.append("scale back")
        assert replies[self.count] == len(replies.clients)
        now = server.state[self.now]
        server.state[self.now] = 2 * now
        return replies.replace(FedAvg.update, {n: t / now for n, t in replies[FedAvg.update].items()})


@dataclass(frozen=True)
class Shift(Filter):
    """Add on the client and subtract on the server."""

    by: float = 0.5

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        TRACE.append("shift out")
        return mapped(reply, lambda t: t + self.by)

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        TRACE.append("shift back")
        return replies.replace(FedAvg.update, {n: t - self.by for n, t in replies[FedAvg.update].items()})


@dataclass(frozen=True)
class Choose(Filter):
    """Draw by parity: the odd clients in odd rounds, no client in round 2, the even ones in round 4."""

    def draw(self, server: Server) -> list[int]:
        return [] if server.round == 2 else [k for k in range(server.clients) if (k + server.round) % 2 == 0]


class Tolerant(FedAvg):
    """Method for which an empty round changes nothing."""

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        server.notes["answers"] = len(replies.clients)
        if self.update in replies:
            super().receive(server, replies)


class Everything(AddOn):
    """Method that queries clients, reads replies and writes notes."""

    total = Entry[float]("sum")
    length = Entry[float]("sum")
    seen = Entry[float]("first")

    def answer(self, local: Any, reply: Message) -> None:
        reply[self.total] = float(len(local.client.data))

    def expect_answer(self, server: Server, client: int, schema: Schema) -> None:
        schema[self.total.key] = EntrySpec(1.0)

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        server.state[self.seen] = replies[self.total]

    def read_reply(self, server: Server, reply: Message, out: Message) -> None:
        out[self.length] = float(sum(t.square().sum() for t in reply[FedAvg.update].values()))

    def receive(self, server: Server, replies: AggregatedReplies, old: Tensors) -> None:
        server.state[self.seen] = server.state[self.seen] + replies[self.length]
        server.notes["seen"] = server.state[self.seen]


def method(*addons: AddOn, **options: Any) -> FedAvg:
    return FedAvg(*addons, **{"factory": network, "lr": 0.05, "momentum": 0.9, "batch": 6, **options})


def play(what: Method, rounds: int = 3, **how: Any) -> Run:
    held = [ClientData(c, images(6, seed=60 + k)) for k, c in enumerate(federation())]
    return simulate(what, held, **{"rounds": rounds, "seed": 5, "progress": False, "test": images(20, 9), **how})


def test_idle_filter_changes_no_bit() -> None:
    addons = (Everything(), SCAFFOLD(), FedAvgM(0.5), MOON(), FineTune())
    base, wrapped = play(method(*addons)), play(Filtered(method(*addons), Filter()))
    assert_same(base, wrapped)
    untimed = [
        [{k: v for k, v in row.items() if "seconds" not in k} for row in run.rows] for run in (base, wrapped)
    ]  # fmt: skip
    assert untimed[0] == untimed[1]
    assert "setup" in untimed[0][0]
    assert "accuracy_personal" in untimed[0][0]


def test_client_side_runs_in_order_and_server_side_in_reverse() -> None:
    """(2 u + 1/2 - 1/2) / 2: with one side in the other order the model would differ."""
    base = play(method(FedAvgM(0.5)))
    TRACE.clear()
    run = play(Filtered(method(FedAvgM(0.5)), Scale(), Shift()))
    assert TRACE == 3 * (5 * ["scale out", "shift out"] + ["shift back", "scale back"])
    for name, value in base.server.state[FedAvg.model].items():
        assert torch.allclose(run.server.state[FedAvg.model][name], value, atol=1e-5), name
    assert run.server.state[Scale.now] == 16.0


def test_filters_get_the_schema_of_their_place_and_reject_replies_together() -> None:
    given: dict[Any, Any] = {}

    def book(name: str, number: int) -> Filter:
        def start(self: Filter, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
            given[name, "start"], given[name, "entries"] = set(expected), set(entries)
            expected.clear()  # type: ignore[attr-defined]

        def reject(self: Filter, server: Server, verb: str, replies: AggregatedReplies) -> dict[int, str]:
            return {number: f"{verb} of {name}"}

        def back(self: Filter, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
            given[name, "back"] = set(expected)
            return replies

        def after(self: Filter, server: Server, before: Server, method: Method) -> None:
            given[name, "after"] = [one.state[FedAvg.model]["classifier.bias"] for one in (before, server)], method

        hooks = {"start": start, "receive_exchange": reject, "back": back, "after_receive": after}
        return type(name, (Filter,), hooks)()  # type: ignore[no-any-return]

    own = method()
    chain = Filtered(own, book("Early", 1), Scale(), book("Late", 3))
    run = play(chain, rounds=1)
    replied = {f"FedAvg.{name}" for name in ("samples", "update", "buffers", "counters")}
    for name, keys in (("Early", replied), ("Late", replied | {"Scale.count"})):
        assert given[name, "start"] == given[name, "back"] == keys
        assert given[name, "entries"] == {e.key for e in chain.entries()}
        (old, new), inner = given[name, "after"]
        assert torch.equal(old, own.networks.first("", 3, 5)["classifier.bias"])
        assert (inner, torch.equal(new, run.server.state[FedAvg.model]["classifier.bias"])) == (own, True)
    rejected = chain.receive_exchange(run.server, "local", AggregatedReplies(Message(), {}, {}, []))
    assert rejected == {1: "local of Early", 3: "local of Late"}


def test_sent_entries_are_counted_and_expected_entries_checked() -> None:
    row = play(Filtered(method(), Scale())).rows[0]
    assert (row["down"]["Scale.now"], row["up"]["Scale.count"]) == (5 * 8, 5 * 8)

    class Silent(Scale):
        def out(self, client: Client, message: Message, reply: Message) -> Message:
            return reply if client.id == 1 else super().out(client, message, reply)

    assert play(Filtered(method(), Silent())).rows[0]["failed"] == {"1": "Scale.count is missing"}


def test_run_with_another_filter_is_another_run(tmp_path: Path) -> None:
    play(Filtered(method(), Scale(2.0)), rounds=1, out=tmp_path)
    for other in (Filtered(method(), Scale(3.0)), Filtered(method(), Scale(2.0), Shift()), method()):
        refused(partial(play, other, rounds=2, out=tmp_path, resume=True), fl.CheckpointError, "method")


def test_draw_of_a_filter_is_used_and_stays_secret() -> None:
    class Lost(AddOn):
        def before_training(self, local: Any) -> None:
            if local.client.id in (0, 2):
                raise RuntimeError(f"{'abc'[local.client.id]} lost")

    held = Filtered(Tolerant(Lost(), factory=network), Choose())
    rows = play(held, rounds=4, evaluate="drawn").rows
    assert [row["answers"] for row in rows] == [2, 0, 2, 1]
    assert [list(row["failed"]) for row in rows] == [[], [], [], ["#1", "#2"]]
    assert [why.split(" (line")[0] for why in rows[3]["failed"].values()] == [
        "raised RuntimeError: a lost", "raised RuntimeError: c lost"
    ]  # fmt: skip
    assert all(row["drawn"] is row["bytes_by_client"] is None for row in rows)
    assert rows[0]["accuracy_clients"]["clients"] == 2


@pytest.mark.parametrize("how", [{"participation": 0.5}, {"participation": 1}, {"min_replies": 2}])
def test_draw_of_a_filter_excludes_participation(how: dict[str, Any]) -> None:
    refused(lambda: play(Filtered(method(), Choose()), **how), ValueError, "the method draws its clients itself")


def test_invalid_chains_are_refused() -> None:
    class Other(Choose):
        pass

    refused(lambda: Filtered(method()), TypeError, "a method and then one or more filters, got FedAvg$")
    refused(lambda: Filtered(method(), SCAFFOLD()), TypeError, "got FedAvg, SCAFFOLD")
    refused(lambda: Filtered(method(), Scale), TypeError, r"one or more filters, got the class Scale: Scale\(...\)")
    refused(lambda: Filtered(Scale()), TypeError, r"Scale is a part of a method, not a method: pass Filtered\(FedAvg")
    refused(lambda: Filtered(method(), Scale(), Shift(), Scale(3.0)), ValueError, "Scale is given twice")
    with pytest.raises(ValueError, match="Choose and Other cannot be combined: both draw the clients"):
        Filtered(method(), Choose(), Other())
    sealed = type("Sealed", (Filter,), {"sealed": True})()
    said = "^Choose draws its clients in secret, and may draw none; the clients of Sealed know each other: use only one"
    refused(lambda: Filtered(method(), Choose(), sealed), PrivacyError, said)
    said = "^Sealed hides single replies, so Scale after it could not read them: pass Sealed last$"
    refused(lambda: Filtered(method(), sealed, Scale()), PrivacyError, said)
    for one in (method(), Filter()):
        refused(partial(one.draw, None), LookupError, "leaves the draw to the engine")  # type: ignore[arg-type]


def test_filter_may_refuse_a_method_when_built() -> None:
    class Picky(Filter):
        def check(self, method: Method) -> None:
            unions = [e.key for e in method.entries() if e.rule == "sum"]
            if "SCAFFOLD.drift" in unions:
                raise ValueError("SCAFFOLD.drift: leave it out")

    refused(lambda: Filtered(method(SCAFFOLD()), Picky()), ValueError, r"SCAFFOLD\.drift: leave it out")
    assert Filtered(method(), Picky()).filters
    picky = type("Picky", (Filter,), {"check": Mock(side_effect=ValueError("SCAFFOLD.drift: leave it out"))})()
    inner = method(SCAFFOLD())
    refused(lambda: Filtered(Filtered(inner, Scale()), picky), ValueError, r"SCAFFOLD\.drift: leave it out")
    picky.check.assert_called_once_with(inner)


def test_chains_are_flat_and_have_a_readable_repr() -> None:
    inner = method()
    chain = Filtered(Filtered(inner, Scale()), Shift())
    assert (chain.method, chain.inner, chain.filters) == (inner, inner, (Scale(), Shift()))
    assert repr(chain) == f"Filtered({inner!r}, Scale(factor=2.0), Shift(by=0.5))"
    chain = Filtered(Filtered(inner, Shift()), Scale())
    assert (chain.method, chain.inner, chain.filters) == (inner, inner, (Shift(), Scale()))
    assert repr(chain) == f"Filtered({inner!r}, Shift(by=0.5), Scale(factor=2.0))"
    asks = type("Asks", (Filter,), {"before": ("early",), "after": ("late",)})
    assert Filtered(inner, asks(), Census()).exchanges == ("early", "census", "local", "late")
    assert {e.key for e in chain.entries()} == {e.key for e in inner.entries()} | {"Scale.now", "Scale.count"}
    assert not chain.private
    assert not chain.draws_clients
    assert Filtered(inner, Choose()).draws_clients


class Census(Filter):
    """Asks every client for a number before the training, and does nothing else."""

    before = ("census",)


class Watch(Filter):
    """Reads the replies of all clients together."""

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        return {}


class Notes(AddOn):
    """Reports an exact number of the client."""

    def before_training(self, local: Any) -> None:
        local.client.notes["mean"] = float(local.client.data.images.mean())


class TwoSteps(FedAvg):
    exchanges = ("census", "local")


def test_filters_of_a_private_method_see_no_records() -> None:
    """An exchange of their own shows them no memory either, in which the method may keep records."""
    seen: list[Any] = []

    def look(self: Filter, client: Client, message: Message, reply: Message | None = None) -> Message:
        seen.append((len(client.data), client.test, len(client.memory)))
        return reply or Message()

    asks = type("Asks", (Filter,), {"before": ("early",), "early": look, "out": look})()
    asked, data = Mock(side_effect=lambda local: local.client.data), images(12, seed=1)
    noisy = type("Noisy", (AddOn,), {"private": True, "dataset": lambda self, local: asked(local)})()
    for addons, wanted in (((noisy,), [(0, None, 0), (0, None, 1)]), ((), [(12, data, 1)] * 2)):
        memory = Message({FedAvg.samples: 1.0})
        client = Client(0, data, data, fl.Classification(3), 1, 0, memory=memory)
        for verb in ("early", "local"):
            chain = Filtered(method(*addons, weights="uniform"), asks)
            chain.run_on_client(verb, client, Message({FedAvg.model: network(3).state_dict()}))
        assert seen[-2:] == wanted
        asked.assert_called_once()


def test_no_filter_or_exchange_sees_replies_without_noise_beside_a_private_filter() -> None:
    dp = ClientDP(1.0, 1.0, clip=0.1)
    options: dict[str, Any] = {"weights": "uniform", "buffers": "drop"}
    base = method(**options)
    for other, seen in (
        (Scale(), "out, back"),
        (Shift(), "out, back"),
        (Census(), "before"),
        (Watch(), "receive_exch"),
    ):
        said = (
            f"^{other.name} cannot be combined with ClientDP: {seen}.* would see or change replies without noise. Make "
        )
        for chain in ((dp, other), (other, dp)):
            refused(partial(Filtered, base, *chain), PrivacyError, said)
        refused(partial(Filtered, Filtered(base, other), dp), PrivacyError, said)
    with pytest.raises(PrivacyError, match="TwoSteps has the exchanges census, local"):
        Filtered(TwoSteps(factory=network, weights="uniform"), dp)
    assert "mean" in play(method(Notes(), **options), rounds=1).rows[0]["noted"]
    assert "noted" not in play(Filtered(method(Notes(), **options), dp), rounds=1).rows[0]
    Filtered(base, dp, Filter())
