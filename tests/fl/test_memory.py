"""What a round costs the server: nothing grows with the clients drawn but unions, nothing with those not drawn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from fl import FedAvg, simulate
from fl.averaging.addon import AddOn
from fl.engine.rounds import Engine
from fl.engine.store import Store
from fl.message import Entry, Message
from fl.method import Client
from fl.reduce import Reducer
from tests.fl.small import Tiny, images


class Alive:
    """Counts how many of the objects it was shown are still held by somebody."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, thing: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(thing, self._gone)

    def _gone(self) -> None:
        self.now -= 1


class Lazy(Sequence[LabeledImages]):
    """Clients made when asked for; notes who was."""

    def __init__(self, count: int, alive: Alive | None = None) -> None:
        self.count, self.asked, self.alive = count, [], alive

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> LabeledImages:  # type: ignore[override]
        if not 0 <= number < self.count:
            raise IndexError(number)
        self.asked.append(number)
        data = images(4, seed=number % 1000)
        if self.alive is not None:
            self.alive.watch(data)
        return data


class Watched(FedAvg):
    """FedAvg whose replies and client memories are counted."""

    replies: Alive
    memories: Alive

    def local(self, client: Client, message: Message) -> Message:
        reply = super().local(client, message)
        self.replies.watch(reply)
        self.memories.watch(client.memory)
        return reply


class Remembers(AddOn):
    """Keeps the client's last weights."""

    keeps_previous = True


@pytest.mark.parametrize("workers", [1, 3])
def test_replies_images_and_memories_do_not_pile_up(workers: int, tmp_path: Path) -> None:
    """A window of twice the workers, and the one being folded, whatever the number of clients."""
    for count in (6, 30):
        method, data = Watched(Remembers(), network=Tiny), Alive()
        method.replies, method.memories = Alive(), Alive()
        simulate(method, Lazy(count, data), rounds=2, workers=workers, out=tmp_path / f"{count}", progress=False)
        gc.collect()
        for alive in (method.replies, method.memories, data):
            assert alive.most <= 2 * workers + workers + 2, count


class Rules:
    mean = Entry[torch.Tensor]("mean")
    total = Entry[torch.Tensor]("sum")
    most = Entry[torch.Tensor]("max")
    first = Entry[torch.Tensor]("first")
    union = Entry[torch.Tensor]("union")


def test_only_unions_grow_with_the_replies() -> None:
    entries = {"mean": Rules.mean, "sum": Rules.total, "max": Rules.most, "first": Rules.first, "union": Rules.union}
    alive = {name: Alive() for name in entries}
    reducer = Reducer({e.key: e for e in entries.values()})
    for client in range(50):
        reply = Message()
        for name, entry in entries.items():
            value = torch.ones(3)
            alive[name].watch(value)
            reply[entry] = value
        reducer.fold(client, reply)
    del reply, value
    held = {name: a.now for name, a in alive.items()}
    assert held["union"] == 50
    assert all(held[name] <= 1 for name in ("mean", "sum", "max", "first"))


def folder(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*.safetensors") if "clients" not in p.parts)


def test_clients_that_are_not_drawn_cost_nothing(tmp_path: Path) -> None:
    """A thousand million clients: no list of them is made, nobody else is looked at, no file is written for them."""
    looked = {}
    for count in (10, 10**9):
        clients, out = Lazy(count), tmp_path / str(count)
        run = simulate(
            FedAvg(Remembers(), network=Tiny),
            clients,
            rounds=3,
            participation=5,
            out=out,
            test=images(9, 1),
            progress=False,
        )
        drawn = [k for row in run.rows for k in row["drawn"]]
        looked[count] = len(clients.asked)
        assert set(clients.asked) <= {0, *drawn}
        assert {p.name for p in (out / "checkpoint" / "clients").iterdir()} == {str(k) for k in drawn}
        assert folder(out / "checkpoint") == ["model.safetensors", "server.3.safetensors"]
    assert looked[10] == looked[10**9]


def draws(count: int, wanted: int, rounds: int) -> list[list[int]]:
    engine: Any = SimpleNamespace(server=SimpleNamespace(clients=count, seed=3, round=0))
    found = []
    for number in range(rounds):
        engine.server.round = number
        found.append(Engine._draw(engine, wanted))
    return found


def test_draws_are_distinct_sorted_and_fair() -> None:
    found = draws(7, 3, 2100)
    assert all(len(set(d)) == 3 and d == sorted(d) for d in found)
    shares = torch.bincount(torch.tensor(found).flatten(), minlength=7) / 2100
    assert torch.allclose(shares, torch.full((7,), 3 / 7), atol=0.05)
    pairs = {(a, b) for a, b, c in found} | {(b, c) for a, b, c in found} | {(a, c) for a, b, c in found}
    assert len(pairs) == 21
    assert draws(5, 5, 1) == [[0, 1, 2, 3, 4]]


# Memories on disk: staged at once, visible when committed.


def memory(value: float) -> Message:
    return Message({FedAvg.samples: value})


def test_a_staged_memory_is_seen_in_its_round_and_gone_when_the_round_fails(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.memories.stage(4, memory(1.0), 1)
    store.memories.settle(1)
    store.memories.stage(4, memory(2.0), 2)
    assert store.memories.load(4, committed=1)[FedAvg.samples] == 2.0
    store.memories.drop()
    assert store.memories.load(4, committed=1)[FedAvg.samples] == 1.0
    assert not (store.folder / "clients" / "4" / "2.safetensors").exists()


def test_what_a_killed_round_left_is_never_taken_for_the_rerun_rounds(tmp_path: Path) -> None:
    """Client 4 answered in the round that was killed; in its second run it does not."""
    store = Store(tmp_path)
    store.memories.stage(4, memory(1.0), 1)
    store.commit(1, "run", memory(0.0), {})
    store.memories.stage(4, memory(2.0), 2)
    again = Store(tmp_path)
    assert again.restore("run") is not None
    assert again.memories.load(4, committed=1)[FedAvg.samples] == 1.0
    again.memories.stage(5, memory(3.0), 2)
    again.commit(2, "run", memory(0.0), {})
    assert again.memories.load(4, committed=2)[FedAvg.samples] == 1.0
    fresh = Store(tmp_path / "never committed")
    fresh.memories.stage(4, memory(2.0), 1)
    assert Store(tmp_path / "never committed").restore("run") is None
    assert not len(fresh.memories.load(7, committed=1))
    assert not (fresh.folder / "clients" / "4" / "1.safetensors").exists()
