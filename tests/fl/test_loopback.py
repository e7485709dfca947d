"""Clients in other processes, reached by bytes only: bitwise equal to threads, also after restarts."""

from __future__ import annotations

import ast
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit.privacy import BudgetExhausted, Event, Ledger, compose
from distillkit.privacy._child_ledger import ChildLedger, child_state, merge_child
from fl import (
    Classification,
    Client,
    Entry,
    FedAvg,
    FedDM,
    Loopback,
    Message,
    Method,
    Real,
    Run,
    Server,
    simulate,
)
from fl._codec import from_parts
from fl.deploy._wire import (
    Job,
    PayloadCache,
    PayloadMissing,
    pack_job,
    pack_result,
    read_result,
    result_parts,
    unpack_job,
    unpack_result,
)
from fl.deploy.loopback import _worker
from fl.engine import _transport
from fl.engine._backends import Backend, RunContext, ServerThread, Threads
from fl.engine._clients import ClientRegistry
from fl.engine._dispatch import Dispatcher
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.engine.store import Store
from fl.methods import FedLGD, FedProto, FedRep, PrivateFedDM, SingleImage, SummedFedDM
from fl.study import outcome_hash
from tests.fl.invariances import assert_same
from tests.fl.test_addon_combinations import NAMES, PICTURE, SHARED, Net, addon, digits, federation, normed, plain
from tests.fl.test_private_runs import SIGMA, NoisySum, client_data
from tests.refused import refused

DM: dict[str, Any] = {"factory": Net, "ipc": 1, "steps": 2, "server_epochs": 1, "server_batch": 4}
DP: dict[str, Any] = {"sigma": 2.0, "public_statistics": True, **DM}

METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": plain,
    "FedRep": lambda: FedRep(factory=Net, head_epochs=1, lr=0.05, momentum=0.0, batch=4),
    "FedLGD": lambda: FedLGD(
        factory=Net, ipc=1, anchors=1, selected=(2,), augment=None, lr=0.05, batch=4, condense_steps=2,
        refine_steps=1, match_steps=2,
    ),
    "SingleImage": lambda: SingleImage(PICTURE, shared={**SHARED, "rate": 1.0}, factory=Net, epochs=1, batch=4),
    "FedDM": lambda: FedDM(**DM),
    "Real": lambda: Real(**DM),
    "PrivateFedDM": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, **DP),
    "PrivateFedDM image": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, mechanism="image_sgd", **DP),
    "SummedFedDM": lambda: SummedFedDM(sizes=[10, 10, 10], noise="shares", **DP),
    "FedProto": lambda: FedProto(factory=Net, lr=0.05, batch=4),
    "FedProto of two": lambda: FedProto(
        factory={"a": Net, "b": normed}, assign={0: "a", 1: "b", 2: "a"}, lr=0.05, batch=4
    ),
}  # fmt: skip


def play(method: Method, **options: Any) -> Run:
    return simulate(
        method, federation(), test=digits()[100:110], seed=3, progress=False,
        server_data={"proxy": digits()[90:96], "test": digits()[100:110]}, **({"secret": 1} if method.private else {}),
        **{"rounds": 2, "evaluate": "all", **options},
    )  # fmt: skip


def rows(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "bytes_resent"} for row in run.rows]


def assert_equal(one: Run, other: Run) -> None:
    assert_same(one, other)
    assert rows(one) == rows(other)
    assert outcome_hash(one) == outcome_hash(other)


@pytest.mark.parametrize("name", NAMES)
def test_addon_is_bitwise_equal_to_threads(name: str) -> None:
    assert_equal(play(plain(addon(name)), backend=Loopback()), play(plain(addon(name))))


@pytest.mark.parametrize("name", METHODS)
def test_method_is_bitwise_equal_to_threads(name: str) -> None:
    assert_equal(play(METHODS[name](), backend=Loopback()), play(METHODS[name]()))


# Restarts.

REMEMBER: dict[str, Callable[[], Method]] = {
    "SCAFFOLD": lambda: plain(addon("SCAFFOLD")),
    "FedLGD": METHODS["FedLGD"],
    "Ditto and MOON": lambda: plain(addon("Ditto"), addon("MOON"), addon("VHL")),
}
"""Methods with memory; the last one sends kept entries, too."""


@pytest.mark.parametrize("name", REMEMBER)
def test_restarts_of_either_side_change_nothing(name: str, tmp_path: Path) -> None:
    """The run is interrupted after round 3 and goes on; the process of the clients is killed after round 4."""

    def kill(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            process = process_of_the_loopback()
            process.kill()
            process.join()

    for rounds in (3, 6):
        run = play(REMEMBER[name](), rounds=rounds, backend=Loopback(), out=tmp_path, resume=True, on_round=kill)
    wanted = play(REMEMBER[name](), rounds=6)
    assert_same(run, wanted)
    assert rows(run) == rows(wanted)


def process_of_the_loopback() -> BaseProcess:
    [child] = [p for p in multiprocessing.active_children() if p.name == "loopback"]
    return child


def test_threads_and_loopback_resume_each_others_folders(tmp_path: Path) -> None:
    method = REMEMBER["Ditto and MOON"]
    for rounds, backend in ((2, "threads"), (4, Loopback()), (6, "threads")):
        run = play(method(), rounds=rounds, backend=backend, out=tmp_path, resume=True)
    assert_equal(run, play(method(), rounds=6))
    assert not any("bytes_resent" in row for row in run.rows[4:])


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="backend must be 'threads' or a backend such as fl.Loopback.*got 'cloud'"):
        play(plain(), backend="cloud")
    for wrong in (3, Loopback):
        with pytest.raises(
            TypeError, match="backend must be 'threads' or a backend such as fl.Loopback.*got (int|type)"
        ):
            play(plain(), backend=wrong)


# Private runs: what clients charge reaches the run's ledger before anything of theirs counts.


def test_clients_are_charged_as_in_threads() -> None:
    books = [Ledger(delta=1e-5) for _ in range(2)]
    for book, how in zip(books, (Loopback(), "threads")):
        simulate(NoisySum(), client_data(), rounds=3, backend=how, ledger=book, secret=1, progress=False)
    charged = [sorted((e.client, e.round, e.mechanism, e.sigma, e.seeded) for e in book.events) for book in books]
    assert len(charged[0]) == 9
    assert charged[0] == charged[1]


def test_budget_ends_a_loopback_run_like_one_in_threads(tmp_path: Path) -> None:
    """Client 1 has earlier charges; in round 3 it may not release, and its process receives these charges."""
    said, states = [], []
    for name, backend in {"threads": "threads", "loopback": Loopback()}.items():
        book = Ledger(tmp_path / name / "ledger.jsonl", delta=1e-5, budget=compose([(SIGMA, 1.0, 4)], 1e-5).epsilon)
        book.spend(Event("earlier", SIGMA, count=2, client=1))
        rows: list[Any] = []
        with pytest.raises(BudgetExhausted) as caught:
            simulate(
                NoisySum(), client_data(), rounds=9, backend=backend, ledger=book, secret=1, out=tmp_path / name,
                on_round=rows.append, progress=False,
            )  # fmt: skip
        said.append((str(caught.value), caught.value.remaining, [row["round"] for row in rows]))
        states.append(Store(tmp_path / name).state()[NoisySum.total])
        assert sum(e.count for e in book.events if e.client == "1") == 4
    assert said[0] == said[1]
    assert said[0][2] == [1, 2]
    assert torch.equal(*states)


def test_child_ledger_refuses_like_the_ledger_and_lists_its_charges(tmp_path: Path) -> None:
    event = Event("x", 2.0, client=1)
    trunk = Ledger(tmp_path / "l.jsonl", delta=1e-5, budget=compose([(2.0, 1.0, 3)], 1e-5).epsilon)
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
    merge_child(trunk, branch.charged)
    again = Ledger(tmp_path / "l.jsonl", delta=1e-5)
    for one in (trunk, again):
        assert one.guarantee(1).nominal == branch.guarantee(1).nominal
        assert one.guarantee(1).reason == "tested"
        assert one.guarantee(1).remarks == branch.guarantee(1).remarks == ("known", "new")
    assert trunk.guarantee(2).reason == ""
    merge_child(trunk, [{"event": asdict(event)}] * 5)  # over the budget: it was spent
    assert trunk.remaining(event) == 0


# Processes that die, are interrupted, or cannot be given the method.


class Mortal(FedAvg):
    """The process of client 1 dies in round 2."""

    def local(self, client: Client, message: Message) -> Message:
        if (client.round, client.id) == (2, 1):
            os._exit(3)
        return super().local(client, message)


def test_dead_process_is_an_error_of_its_clients() -> None:
    run = play(Mortal(factory=Net), rounds=3, backend=Loopback(), evaluate="none")
    assert [sorted(row["failed"]) for row in run.rows] == [[], ["1", "2"], []]
    assert set(run.rows[1]["failed"].values()) == {"lost: the process in which it ran died (exit code 3)"}


class Slow(FedAvg):
    """Method whose clients never finish and check for a stop request."""

    def local(self, client: Client, message: Message) -> Message:
        while client.round == 2:
            client.check_running()
            time.sleep(0.01)
        return super().local(client, message)


def test_interrupt_stops_the_process_and_the_next_run_uses_it(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    play(plain(), backend=Loopback())
    before = process_of_the_loopback()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(Slow(factory=Net), rounds=3, backend=Loopback(), out=tmp_path, on_round=interrupt, evaluate="none")
    finally:
        signal.signal(signal.SIGINT, usual)
    assert process_of_the_loopback() is before
    assert_equal(play(plain(), backend=Loopback()), play(plain()))
    assert process_of_the_loopback() is before


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: plain(factory=lambda k: Net(k)), r"<lambda>, line \d+ of .*test_loopback\.py cannot be sent"),
        (lambda: plain(augment=lambda x, g: x), r"the method holds it as FedAvg\..*augment"),
        (lambda: FedDM(**{**DM, "factory": partial(lambda k, width: Net(k, width), width=4)}), "holds it as FedDM"),
    ],
)
def test_objects_that_cannot_be_pickled_are_named_with_the_remedy(make: Callable[[], Method], why: str) -> None:
    with pytest.raises(TypeError, match=rf"{why}(.|\n)*at the top level of a file, with functools\.partial"):
        play(make(), backend=Loopback())


class Shy:
    """Can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return (fail, ())


def fail() -> None:
    if multiprocessing.parent_process() is not None:
        raise ValueError("not here")


def test_method_that_cannot_be_unpickled_is_refused_before_round_1() -> None:
    class_ = plain()
    class_.shy = Shy()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"cannot be built in another process \(ValueError: not here\)"):
        play(class_, backend=Loopback())
    assert_equal(play(plain(), backend=Loopback()), play(plain()))


def test_process_watches_its_parent_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(Exception):
        pass

    def watch() -> None:
        raise Watching

    monkeypatch.setattr(_worker, "exit_with_parent", watch)
    with pytest.raises(Watching):
        _worker.serve(None)  # type: ignore[arg-type]


# The transport interface.


def test_server_side_never_accesses_a_client() -> None:
    """The modules between validation and transport do not import the client's classes."""
    folder = Path(_transport.__file__).parent
    for name in ("_rounds", "_dispatch", "_evaluation", "_replies", "_transport"):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
        }
        assert not words & {
            "Client",
            "ClientData",
            "MemoryStore",
            "ClientRuntime",
            "respond",
            "ThreadTransport",
            "ProcessTransport",
            "Ledger",
        }, name


class Dealing(FedAvg):
    """Has an exchange of its own: counts in memory how often it was requested, and replies with the count."""

    times = Entry[float]("first")
    exchanges = ("deal", "local")

    def deal(self, client: Client, message: Message) -> Message:
        client.memory[self.times] = client.memory.get(self.times, 0.0) + 1.0
        return Message({self.times: client.memory[self.times]})


@pytest.mark.parametrize("backend", [Threads(), Loopback()])
def test_later_exchange_of_a_round_reads_accepted_memory_of_an_earlier(backend: Backend) -> None:
    """Client 1's first reply is rejected; memory of a failed round is never read when the round is repeated."""
    method, clients = Dealing(factory=Net), ClientRegistry(list(federation()))
    server = Server(Classification(3), clients.first.shape, clients.first.normalization, len(clients), seed=3, round=1)
    context = RunContext(server.task, torch.device("cpu"), None, threading.Event(), None)
    with ServerThread() as thread, backend.open(method, clients, 1, context) as transport:
        dispatcher = Dispatcher(method, server, transport, thread)
        thread.run(lambda: method.start(server))

        def ask(*counting: int) -> list[float]:
            found = []
            for answer, request, memory in dispatcher.exchange("deal", [0, 1, 2], store_memory=True):
                assert answer.reply is not None, answer.error
                found.append(answer.reply[Dealing.times])
                if answer.client in counting:
                    dispatcher.cache_index.update(answer.client, request, memory)
            return found

        assert ask(0, 2) == [1, 1, 1]
        assert ask(0, 1, 2) == [2, 1, 2]
        dispatcher.rollback()
        assert ask(0, 1) == [1, 1, 1]
        dispatcher.commit()
        server.round = 2
        assert ask(0, 1, 2) == [2, 2, 1]
        dispatcher.cache_index.commit()  # the word of it never reaches the clients
        server.round = 3
        assert ask() == [3, 3, 2]


def wide() -> Message:
    return Message({Data.kept: torch.arange(6.0), Data.other: {"b": torch.ones(2), "a": torch.zeros(1)}})


class Data:
    kept = Entry[torch.Tensor](cached=True)
    other = Entry[dict[str, torch.Tensor]]()
    number = Entry[float]()


def test_request_round_trips_and_cached_payloads_travel_as_digests() -> None:
    header = RequestHeader("local", 3, "a-1", seed=5, secret=None)
    request = ClientRequest(wide(), "2-a-0", {Data.kept.key: "d"})
    cache = PayloadCache()
    first = pack_job(Job(header, 4, request))
    job = unpack_job(first, cache)
    assert (job.header, job.client, job.request.memory, job.ledger) == (header, 4, "2-a-0", None)
    assert [k for k, _ in job.request.message.items()] == [Data.kept.key, Data.other.key]
    assert list(job.request.message[Data.other]) == ["b", "a"]
    again = pack_job(Job(header, 4, replace(request, cached=frozenset({Data.kept.key}))))
    assert len(again) < len(first)
    assert unpack_job(again, cache).request.message[Data.kept] is job.request.message[Data.kept]
    for stranger in (PayloadCache(), cache):
        with pytest.raises(PayloadMissing):
            unpack_job(pack_job(Job(header, 5, replace(request, cached=frozenset({Data.kept.key})))), stranger)
    cache.keep(4, Data.kept.key, "new", torch.zeros(1))
    with pytest.raises(PayloadMissing):
        unpack_job(again, cache)
    assert list(cache._values) == ["new"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": "soon"}, "seconds must be a number in .*, got 'soon'"),
        ({"client": True}, "client must be an integer in .*, got True"),
        ({"absent": None}, "absent must be true or false, got None"),
        ({"charged": [{}, 3]}, "charged must be a list .*, each a mapping"),
        *(
            ({"seconds": odd}, r"seconds must be a number in \[0, 1e\+09\]")
            for odd in (math.nan, math.inf, -1e-9, -(10**400))
        ),
    ],
    ids=["seconds", "client", "absent", "charged", "NaN", "infinite", "negative", "huge"],
)  # fmt: skip
def test_malformed_replies_are_refused_by_field(change: dict[str, Any], said: str) -> None:
    reply, facts = from_parts(*result_parts("3-a", ClientResult(4, Message.unchecked({"x": 1.0}), seconds=1.0)))
    assert read_result(reply, facts)[1].client == 4
    other = json.dumps({**json.loads(facts["answer"]), **change})
    refused(lambda: read_result(reply, {**facts, "answer": other}), ValueError, f"not a result: its answer's {said}")


def test_error_texts_of_clients_are_cut_to_a_line_of_the_history() -> None:
    reply, facts = from_parts(*result_parts("3-a", ClientResult(4, error="x" * 2_000_000)))
    error = read_result(reply, facts)[1].error
    assert error is not None
    assert len(error) == 500


@pytest.mark.parametrize("reply", [[1], Message.unchecked({"x": float("nan")}), Message.unchecked({"x": None})])
def test_reply_that_cannot_be_pickled_is_an_error_of_its_client(reply: Any) -> None:
    version, answer, charged = unpack_result(
        pack_result("3-a", ClientResult(4, reply, remembers=True), [{"void": "x"}])
    )
    assert (version, answer.client, answer.reply, answer.remembers, charged) == ("3-a", 4, None, False, [{"void": "x"}])
    assert answer.error is not None
    assert answer.error.startswith("its reply cannot be sent")
