"""Requests and results: memory of failed rounds, cached payloads, and fields that strangers may send."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from torch import Tensor

import fl
from fl import Classification, Client, ClientData, Entry, EntrySpec, FedAvg, Message, Method, Schema, Server
from fl._codec import from_parts
from fl.deploy._wire import Job, PayloadFolder, PayloadMissing, job_parts, read_job, read_result, result_parts
from fl.engine._client_records import ClientRecord
from fl.engine._clients import ClientRegistry
from fl.engine._exchange import Exchanger
from fl.engine._round_stats import RoundStats
from fl.engine._threads import ServerThread, ThreadTransport
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.engine.store import Restored
from fl.method import evaluation_spec
from fl.task import clients_accuracy
from tests.fl.federations import images
from tests.fl.test_addon_combinations import Net, federation
from tests.refused import refused


class Dealing(FedAvg):
    """Counts in memory how often a client was requested, and replies with the count."""

    times = Entry[float]("first")

    def local(self, client: Client, message: Message) -> Message:
        client.memory[self.times] = client.memory.get(self.times, 0.0) + 1.0
        return Message({self.times: client.memory[self.times]})

    def expect(self, server: Server, client: int) -> Schema:
        return {self.times.key: EntrySpec(1.0)}

    def read_reply(self, server: Server, reply: Message) -> Message:
        return Message()


def test_later_exchange_of_a_round_reads_accepted_memory_of_an_earlier() -> None:
    """Client 1's first reply is rejected; memory of a failed round is never read when the round is repeated."""
    method, clients = Dealing(factory=Net), ClientRegistry(list(federation()))
    server = Server(Classification(3), clients.first.shape, clients.first.normalization, len(clients), seed=3, round=1)
    transport = ThreadTransport(method, clients, 1)
    transport.open(server, None, None)
    with ServerThread() as thread, closing(transport):
        exchanger = Exchanger(method, server, transport, thread)
        thread.run(lambda: method.start(server))

        def ask(*counting: int) -> list[float]:
            found = []
            for reply in exchanger.replies("local", [0, 1, 2], RoundStats()):
                assert reply.reason is None
                found.append(reply.message[Dealing.times])
                if reply.client in counting:
                    exchanger.accept(reply)
            return found

        assert ask(0, 2) == [1, 1, 1]
        assert ask(0, 1, 2) == [2, 1, 2]
        assert ask() == ask() == [3, 2, 3]
        exchanger.rollback()
        assert ask(0, 1) == [1, 1, 1]
        exchanger.commit()
        server.round = 2
        assert ask(0, 1, 2) == [2, 2, 1]
        exchanger.records.commit()  # the word of it never reaches the clients
        server.round = 3
        assert ask() == [3, 3, 2]
        transport._memories._ram.clear()
        for reply in exchanger.replies("local", [0, 1, 2], RoundStats()):
            lost = f"client {reply.client} has lost its memory of version {exchanger.records[reply.client].memory}"
            assert reply.reason == f"raised CheckpointError: {lost}: start the run again"


def test_restored_records_are_those_of_all_rounds() -> None:
    method, transport = Dealing(factory=Net), Mock()
    exchanger = Exchanger(method, Mock(), transport, Mock())
    changes = [{"4": {"memory": "1-a", "cached": {"x": "d"}}}, {"7": {"memory": "2-a", "cached": {}}}]
    exchanger.restore(Restored(2, Message(), {"nodes": "b"}, changes, []))
    assert exchanger.records[4] == ClientRecord("1-a", {"x": "d"})
    transport.restore.assert_called_once_with({"nodes": "b"}, {4: "1-a", 7: "2-a"})
    request = ClientRequest(Message.unchecked({"x": images(2, 0), "y": 1.0}), digests={"x": "d"})
    cached, sent = ({"x:digest": 16, "y": 8}, {"x": 128, "x:labels": 16, "x:digest": 16, "y": 8})
    assert [exchanger.request_sizes(Mock(client=client, request=request)) for client in (4, 7)] == [cached, sent]


def wide() -> Message:
    return Message({Data.kept: torch.arange(6.0), Data.other: {"b": torch.ones(2), "a": torch.zeros(1)}})


class Data:
    kept = Entry[torch.Tensor](cached=True)
    other = Entry[dict[str, torch.Tensor]]()
    number = Entry[float]()


def test_request_round_trips_and_cached_payloads_travel_as_digests(tmp_path: Path) -> None:
    header = RequestHeader("local", 3, "a-1", seed=5, secret=None)
    request = ClientRequest(wide(), "2-a-0", {Data.kept.key: "d"})
    store = PayloadFolder(tmp_path)
    job = read_job(*from_parts(*job_parts(Job(header, 4, request))), store)
    assert (job.header, job.client, job.request.memory, job.ledger) == (header, 4, "2-a-0", None)
    assert [verb for verb in ("local", "answer", "evaluate", "keys") if replace(header, verb=verb).keeps] == ["local"]
    assert [k for k, _ in job.request.message.items()] == [Data.kept.key, Data.other.key]
    assert list(job.request.message[Data.other]) == ["b", "a"]
    cached = replace(request, cached=frozenset({Data.kept.key}))
    again = job_parts(Job(header, 4, cached))
    assert not any(torch.equal(tensor, wide()[Data.kept]) for tensor in again[0].values())
    assert torch.equal(read_job(*from_parts(*again), store).request.message[Data.kept], wide()[Data.kept])
    other = job_parts(Job(header, 4, replace(cached, digests={Data.kept.key: "e"})))
    for lost, folder in ((again, tmp_path / "none"), (other, tmp_path)):
        with pytest.raises(PayloadMissing):
            read_job(*from_parts(*lost), PayloadFolder(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": "soon"}, "seconds must be a number in .*, got 'soon'"),
        ({"absent": None}, "absent must be true or false, got None"),
        *(
            ({"seconds": odd}, r"seconds must be a number in \[0, 1e\+09\]")
            for odd in (math.nan, math.inf, -1e-9, -(10**400))
        ),
    ],
    ids=["seconds", "absent", "NaN", "infinite", "negative", "huge"],
)  # fmt: skip
def test_malformed_replies_are_refused_by_field(change: dict[str, Any], said: str) -> None:
    reply, facts = from_parts(*result_parts(ClientResult(4, Message.unchecked({"x": 1.0}), seconds=1.0)))
    assert read_result(4, reply, facts).reply is not None
    other = json.dumps({**json.loads(facts["result"]), **change})
    refused(lambda: read_result(4, reply, {**facts, "result": other}), ValueError, f"its result's {said}")


def test_error_texts_of_clients_are_cut_to_a_line_of_the_history() -> None:
    error = read_result(4, *from_parts(*result_parts(ClientResult(4, error="x" * 2_000_000)))).error
    assert error is not None
    assert len(error) == 500


@pytest.mark.parametrize("reply", [[1], Message.unchecked({"x": float("nan")}), Message.unchecked({"x": None})])
def test_reply_that_cannot_be_sent_is_an_error_of_its_client(reply: Any) -> None:
    answer = read_result(4, *from_parts(*result_parts(ClientResult(4, reply, remembers=True))))
    assert (answer.client, answer.reply, answer.remembers) == (4, None, False)
    assert str(answer.error).startswith("its reply cannot be sent")


# Rounds with every kind of exchange, failure and count.


def broken() -> None:
    raise RuntimeError("broken")


@dataclass(frozen=True)
class Every(Method):
    """Exchanges before, in and after the training, whose messages differ in size.

    Client 2 has no images. Client 1 fails in its test, 3 in the first exchange, 6 in the last one, and 4 in the query.
    The server refuses the trained values of client 4. It rejects client 7 after the first exchange, 5 after the
    training and 1 after the last exchange. Outside the training, clients change their memory in vain.
    """

    has_query, exchanges = True, ("early", "local", "late")  # type: ignore[assignment]
    poster, model = Entry[Tensor]("first", cached=True), Entry[Tensor]("first")
    part, tested = Entry[Tensor](), Entry[dict[str, Tensor]]("sum")

    def start(self, server: Server) -> None:
        server.state[self.poster] = torch.zeros(5)

    def send(self, server: Server, client: int) -> Message:
        return Message({self.poster: server.state[self.poster], self.model: torch.zeros(3, dtype=torch.float64)})

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        return Message({self.model: torch.zeros(2, dtype=torch.float64)} if verb == "early" else {})

    def reply(self, client: Client, message: Message, fails: int, count: int) -> Message:
        client.memory[self.part] = torch.ones(1)
        if client.id == fails:
            broken()
        return Message({self.part: torch.ones(count)})

    answer = partialmethod(reply, fails=4, count=1)  # type: ignore[assignment]
    early, late = partialmethod(reply, fails=3, count=2), partialmethod(reply, fails=6, count=4)

    def local(self, client: Client, message: Message) -> Message:
        client.seconds += 1000  # of helpers
        client.notes |= {"steps": 2**client.id, "kept": len(client.memory), "threads": torch.get_num_threads()}
        return Message({self.part: torch.ones(9 if client.id == 4 else 3)})

    def read_reply(self, server: Server, reply: Message) -> Message:
        return Message({self.part: 7 * reply[self.part]})  # in place of the value sent

    def evaluate(self, client: Client, message: Message) -> Message:
        self.reply(client, message, 1, 0)
        right = {"global": client.id, "personal": 8}
        sums = {name: [8.0, k, 0, k, 0, 0, 0, 0, 0, 8 - k, 0, 0] for name, k in right.items()}
        return Message({self.tested: {name: torch.tensor(one, dtype=torch.float64) for name, one in sums.items()}})

    def expect(self, server: Server, client: int) -> Schema:
        return {self.part.key: EntrySpec(torch.zeros(3))}

    def expect_answer(self, server: Server, client: int) -> Schema:
        return {self.part.key: EntrySpec(torch.zeros(1))}

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        return {self.part.key: EntrySpec(torch.zeros({"early": 2, "late": 4}[verb]))}

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        return {self.tested.key: evaluation_spec(server.task, "global", "personal")}

    def receive_exchange(self, server: Server, verb: str, replies: Any) -> dict[int, str]:
        server.notes[verb] = [server.drawn, server.present, replies.clients]
        return {"early": {7: "is slow"}, "local": {5: "is late"}, "late": {1: "is odd"}}[verb]

    def receive(self, server: Server, replies: Any) -> None:
        server.notes |= {"kept": [server.present, replies.clients, replies[self.part].tolist()], "failed": "mine"}
        server.notes["threads"] = torch.get_num_threads()
        if server.round == 2:
            server.state[self.poster] = torch.ones(5)


def play(method: Method, rounds: int, **options: Any) -> fl.Run:
    held = [ClientData(images(4, k), images(8, k)) for k in range(8)]
    held[2] = ClientData(held[2].train[:0])
    return fl.simulate(method, held, rounds=rounds, progress=False, **options)


WHY = f"raised RuntimeError: broken (line {broken.__code__.co_firstlineno + 1} of test_requests.py, in broken)"
FAILED = {"3": f"early: {WHY}", "7": "early: is slow", "4": "Every.part has shape [9], want [3]"}


def test_row_has_every_count_of_a_round(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fl.engine._runner.bar", bar := MagicMock())
    rows = play(Every(), 3, server_threads=2, out=fl.RunFolder(tmp_path, transcript=True)).rows
    everyone, cached = [*range(8)], {"Every.model": 232, "Every.poster:digest": 80}
    by_client = {"0": [36, 76], "1": [36, 76], "3": [0, 16], "4": [8, 76], "5": [20, 76], "6": [20, 76], "7": [8, 16]}
    setup: dict[str, Any] = {"bytes_up": 24, "up": {"Every.part": 24}, "bytes_down": 420, "failed": {"4": WHY}}
    setup["down"] = {"Every.poster": 140, "Every.poster:digest": 112, "Every.model": 168}
    first = {
        "round": 1,
        "accuracy": 1.0,
        "loss": None,
        "epsilon": None,
        "drawn": everyone,
        "empty": [2],
        "setup": setup,
    }
    first |= {"failed": FAILED, "failed_after": {"local": {"5": "is late"}, "late": {"6": WHY, "1": "is odd"}}}
    first |= {"noted": {"steps": 99, "kept": 0, "threads": 4}, "threads": 2, "note_failed": "mine"}
    first |= {"early": [everyone, [0, 1, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7]], "kept": [[0], [0, 1, 5, 6], [7.0] * 3]}
    first |= {"local": [everyone, [0, 1, 5, 6], [0, 1, 5, 6]], "late": [everyone, [0, 1], [0, 1]]}
    first |= {"bytes_up": 128, "up": {"Every.part": 128}, "bytes_down": 412, "down": {**cached, "Every.poster": 100}}
    first |= {"bytes_by_client": by_client, "bytes_down_evaluation": 3 * (40 + 60), "bytes_up_evaluation": 6 * 2 * 96}
    first |= {"accuracy_personal": clients_accuracy([1.0] * 6), "failed_evaluation": {"1": WHY}}
    first |= {"accuracy_clients": clients_accuracy([0, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8])}
    seconds = {name: rows[0].pop(name) for name in ("seconds", "client_seconds", "server_seconds")}
    assert min(seconds.values()) > 0
    assert [round(spent / 1000) for spent in seconds.values()] == [0, 5, 0]
    assert rows[0] == first
    assert [row["down"] for row in rows[1:]] == [cached, {**cached, "Every.poster": 20}]  # it changes before the tests
    assert rows[1].keys() == rows[2].keys() == (first.keys() | seconds.keys()) - {"setup"}
    assert [(row["noted"], row["failed"], row["empty"]) for row in rows[1:]] == [(first["noted"], FAILED, [2])] * 2
    always = [f"client {k} failed in every round in which it was drawn: {reason}" for k, reason in FAILED.items()]
    assert [str(warning.message) for warning in recwarn] == always
    shown = bar.return_value.__enter__.return_value.set_postfix_str.call_args_list
    assert shown[:8] == [call(f"client {k} of 8, early") for k in range(1, 9)]
    kinds = {"answer-down": 7, "answer-up": 6, "early-down": 7, "early-up": 6, "late-down": 3, "late-up": 2}
    saved = Counter(path.stem.split("-", 1)[1] for path in (tmp_path / "transcript").glob("[01]/*"))
    assert saved == kinds | {"down": 5, "up": 4}


def test_error_after_an_exchange_names_every_failure_and_restores_the_server() -> None:
    servers: list[Server] = []

    class Ends(Every):
        def receive_exchange(self, server: Server, verb: str, replies: Any) -> dict[int, str]:
            if verb == "late" and server.round == 2:
                server.state[self.poster] = torch.ones(9)
                servers.append(server)
                raise fl.NoUsableReply("too few are left")
            return super().receive_exchange(server, verb, replies)

    with pytest.raises(fl.NoUsableReply) as caught:
        play(Ends(), 3)
    reasons = [f"client {k} {why}" for k, why in {**FAILED, "5": "is late", "6": WHY}.items()]
    said = f"round 2: too few are left ({'; '.join(reasons)}); the state after round 1 is kept"
    assert str(caught.value) == said
    assert (servers[0].round, servers[0].state[Every.poster].tolist()) == (1, [0.0] * 5)
