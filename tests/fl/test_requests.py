"""Requests and results: memory of failed rounds, cached payloads, and fields that strangers may send."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl import Classification, Client, Entry, EntrySpec, FedAvg, Message, Schema, Server
from fl._codec import from_parts
from fl.deploy._wire import Job, PayloadFolder, PayloadMissing, job_parts, read_job, read_result, result_parts
from fl.engine._clients import ClientRegistry
from fl.engine._exchange import Exchanger
from fl.engine._round_stats import RoundStats
from fl.engine._threads import ServerThread, ThreadTransport
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
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
        exchanger.rollback()
        assert ask(0, 1) == [1, 1, 1]
        exchanger.commit()
        server.round = 2
        assert ask(0, 1, 2) == [2, 2, 1]
        exchanger.records.commit()  # the word of it never reaches the clients
        server.round = 3
        assert ask() == [3, 3, 2]


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
