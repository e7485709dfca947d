"""Evaluation with the next round's message: the rows of an immediate evaluation, with one message less per round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl import Client, ClientData, FedAvg, Message, Method, NoUsableReply, Run, simulate
from fl.addons import SCAFFOLD, VHL, Anchors, FineTune
from fl.engine._runner import execute
from fl.engine.store import Store
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import (
    FAST,
    METHODS,
    OPTIONS,
    assert_equal,
    client_data,
    federation,
    grid,
    images,
    rows,
    run_in_threads,
    run_on_grid,
)
from tests.fl.test_private_runs import NoisySum

ROUNDS = 3
METHODS = {
    **METHODS,
    "Anchors": lambda: FedAvg(Anchors(ipc=1, selected=(2,), steps=1, init="statistics"), **FAST),
    "FineTune": lambda: FedAvg(FineTune(epochs=1), **FAST),
    "VHL": lambda: FedAvg(VHL(source="gaussian", classes=3, per_class=2, augment=None), **FAST),
}
"""Anchors sends other tensors in the evaluation than in the next training; VHL sends a payload once."""


@pytest.fixture(autouse=True, scope="module")
def flower() -> Iterator[None]:
    with fake_flower.installed():
        yield


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run in threads with deferred evaluation."""

    def run(method: Method, **options: Any) -> Run:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["fl.engine.simulate"], "execute", partial(execute, defer_tests=True))
            return run_in_threads(method, **options)

    return run


CASES: list[tuple[str, Any]] = [
    ("SCAFFOLD", "drawn"), ("Anchors", "all"), ("FineTune", [3, 0]), ("VHL", "all"), ("FedDM", "drawn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "panel"), CASES, ids=[name for name, _ in CASES])
def test_deferred_rows_equal_immediate_rows(
    name: str, panel: Any, deferred: Callable[..., Run], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"evaluate": panel, "rounds": ROUNDS}
    wanted = run_in_threads(METHODS[name](), **how)
    assert all(row.get("accuracy_clients") or row.get("accuracy_personal") for row in wanted.rows)
    assert_equal(deferred(METHODS[name](), **how), wanted)
    assert_equal(run_on_grid(grid(METHODS[name](), tmp_path), METHODS[name](), **how), wanted)


class Odd(FedAvg):
    """Client 1 fails in every evaluation, client 2 in every training; client 3 returns no evaluation."""

    def evaluate(self, client: Client, message: Message) -> Message:
        if client.id == 1:
            raise RuntimeError("no test today")
        return Message() if client.id == 3 else super().evaluate(client, message)

    def local(self, client: Client, message: Message) -> Message:
        if client.id == 2:
            raise RuntimeError("no training today")
        return super().local(client, message)


def odd(number: int) -> ClientData:
    """Return data in which client 4 has no images and client 0 no test images."""
    train = federation()[number]
    return ClientData(train[:0] if number == 4 else train, None if number == 0 else images(6, seed=20 + number))


def test_evaluation_and_training_fail_independently(deferred: Callable[..., Run], tmp_path: Path) -> None:
    how: dict[str, Any] = {"participation": 1.0, "rounds": 3, "test": images(10, seed=9), "seed": 3, "evaluate": "all"}
    wanted = simulate(Odd(**FAST), [odd(k) for k in range(5)], progress=False, **how)
    assert [row["failed_evaluation"].keys() for row in wanted.rows] == [{"1"}] * 3
    assert [row["failed"].keys() for row in wanted.rows] == [{"2"}] * 3
    assert_equal(run_on_grid(grid(Odd(**FAST), tmp_path, load_client=odd), Odd(**FAST), **how), wanted)


# What travels.


class Weighed(fake_flower.Grid):
    """Grid that counts the messages of jobs and their tensor bytes."""

    messages = size = 0

    def push_messages(self, given: Iterable[Any]) -> Iterable[str]:
        given = list(given)
        for message in given:
            if message.metadata.message_type != "query.hello":
                self.messages += 1
                self.size += sum(len(array.data) for array in message.content["tensors"].values())
        return super().push_messages(given)


def weighed(name: str, folder: Path, **options: Any) -> tuple[Weighed, Run]:
    made = grid(METHODS[name](), folder)
    there = Weighed(made.app, made.nodes)
    return there, run_on_grid(there, METHODS[name](), **options)


def test_a_round_sends_one_message_per_client_and_its_model_once(tmp_path: Path) -> None:
    how: dict[str, Any] = {"participation": 1.0, "evaluate": "drawn", "rounds": ROUNDS}
    once, run = weighed("FedAvg", tmp_path / "once", **how)
    twice, other = weighed("FedAvg", tmp_path / "twice", defer_evaluation=False, **how)
    assert (once.messages, twice.messages) == (5 * (ROUNDS + 1), 5 * 2 * ROUNDS)  # the last tests go alone
    assert rows(run) == rows(other)
    assert not any("bytes_spared" in row for row in other.rows)
    told = sum(row["bytes_down"] + row["bytes_down_evaluation"] for row in run.rows)
    assert [row.get("bytes_spared") for row in run.rows] == [row["bytes_down"] for row in run.rows[:-1]] + [None]
    assert once.size == told - sum(row.get("bytes_spared", 0) for row in run.rows)
    assert twice.size == told


@pytest.mark.parametrize("name", ["VHL", "Anchors"])
def test_bytes_spared_are_the_bytes_not_sent(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"participation": 3, "evaluate": "all", "rounds": ROUNDS}
    once, run = weighed(name, tmp_path / "once", **how)
    twice, _ = weighed(name, tmp_path / "twice", defer_evaluation=False, **how)
    spared = sum(row.get("bytes_spared", 0) for row in run.rows)
    assert twice.size - once.size == spared > 0
    assert twice.messages - once.messages == 3 * (ROUNDS - 1)


def test_lost_payload_and_memory_affect_evaluation_and_training(tmp_path: Path) -> None:
    method = lambda: FedAvg(SCAFFOLD(), *METHODS["VHL"]().addons, **FAST)  # noqa: E731

    def lose(row: dict[str, Any]) -> None:
        for path in [*tmp_path.rglob("bodies/*/*"), *tmp_path.rglob("memory/1/*")]:
            path.unlink()

    how: dict[str, Any] = {"participation": 1.0, "rounds": 3}
    run = run_on_grid(grid(method(), tmp_path), method(), on_round=lose, **how)
    assert [row.get("bytes_resent", 0) > 0 for row in run.rows] == [False, True, True]
    assert [list(row.get("failed_evaluation", {})) for row in run.rows] == [[], ["1"], ["1"]]
    assert [list(row["failed"]) for row in run.rows] == [[], [], ["1"]]
    assert "CheckpointError" in run.rows[1]["failed_evaluation"]["1"]


def test_losing_a_message_loses_evaluation_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.deploy.flower._transport._DELIVERY_GRACE", 0.1)
    there = grid(METHODS["FedAvg"](), tmp_path, lambda *what: "error" if what == (101, "train.job", "2") else None)
    run = run_on_grid(there, METHODS["FedAvg"](), participation=1.0, rounds=3)
    assert [list(row.get("failed_evaluation", {})) for row in run.rows] == [["1"], [], []]
    assert [list(row["failed"]) for row in run.rows] == [[], ["1"], []]
    assert "the app crashed" in run.rows[0]["failed_evaluation"]["1"]


class Hanging(FedAvg):
    def evaluate(self, client: Client, message: Message) -> Message:
        while client.id == 2:
            client.check_running()
            time.sleep(0.01)
        return super().evaluate(client, message)


def test_hanging_evaluation_does_not_shorten_the_training_timeout(tmp_path: Path) -> None:
    how: dict[str, Any] = {"participation": 1.0, "rounds": 2, "reply_timeout": 2.0, "max_concurrent": 1}
    run = run_on_grid(grid(Hanging(**FAST), tmp_path), Hanging(**FAST), **how)
    assert ["before its deadline" in row["failed_evaluation"]["2"] for row in run.rows] == [True, True]
    assert [row["failed"] for row in run.rows] == [{}, {}]


# When a row is told, and what a run leaves that ends early.


def test_on_round_gets_complete_rows_after_the_next_commit(tmp_path: Path) -> None:
    store, seen = Store(tmp_path / "run"), list[Any]()

    def watch(row: dict[str, Any]) -> None:
        manifest = store.manifest() or {}
        lines = len((tmp_path / "run" / "history.jsonl").read_text(encoding="utf-8").splitlines())
        seen.append((row["round"], manifest["round"], manifest.get("open", {}).get("round"), lines))
        assert row["accuracy_clients"]

    run_on_grid(grid(METHODS["FedAvg"](), tmp_path), METHODS["FedAvg"](), out=tmp_path / "run", on_round=watch)
    assert seen == [(1, 2, 2, 1), (2, 3, None, 3), (3, 3, None, 3)]


class Stop(Exception):
    pass


def stop(row: dict[str, Any]) -> None:
    raise Stop


@pytest.mark.parametrize("rounds", [2, 3])
def test_run_stopped_with_an_open_row_resumes_bitwise_equal(rounds: int, tmp_path: Path) -> None:
    method, nodes, out = METHODS["SCAFFOLD"], tmp_path / "nodes", tmp_path / "run"
    with pytest.raises(Stop):
        run_on_grid(grid(method(), nodes), method(), out=out, on_round=stop)
    one, open_row = Store(out).rows()
    assert one["accuracy_clients"]
    assert (open_row["round"], open_row["accuracy"] is None, "accuracy_clients" in open_row) == (2, False, False)
    wanted = run_in_threads(method(), rounds=rounds)
    assert_equal(run_on_grid(grid(method(), nodes), method(), out=out, resume=True, rounds=rounds), wanted)
    assert [row["round"] for row in Store(out).rows()] == list(range(1, rounds + 1))
    assert "open" not in (Store(out).manifest() or {})


class Failing(FedAvg):
    broken = False

    def local(self, client: Client, message: Message) -> Message:
        if Failing.broken and client.round == 3:
            raise RuntimeError("broken")
        return super().local(client, message)


def test_failed_round_leaves_the_previous_row_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()
    how: dict[str, Any] = {"rounds": 3, "test": None}
    wanted = simulate(Failing(**FAST), [client_data(k) for k in range(5)], progress=False, **{**OPTIONS, **how})
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "broken", True)
        with pytest.raises(NoUsableReply, match="round 3: 0 usable replies"):
            run_on_grid(
                grid(Failing(**FAST), tmp_path), Failing(**FAST), out=tmp_path / "run",
                on_round=lambda row: told.append(row["round"]), **how,
            )  # fmt: skip
    assert told == [1, 2]
    assert [row["accuracy"] for row in Store(tmp_path / "run").rows()] == [row["accuracy"] for row in wanted.rows[:2]]
    resumed = run_on_grid(grid(Failing(**FAST), tmp_path), Failing(**FAST), out=tmp_path / "run", resume=True, **how)
    assert_equal(resumed, wanted)


def test_private_methods_are_evaluated_at_once(tmp_path: Path) -> None:
    there = grid(NoisySum(), tmp_path)
    run_on_grid(there, NoisySum(), rounds=2, participation=1.0, test=None)
    assert sum(kind == "query.job" for _, kind, _ in there.log) == 2 * 5
