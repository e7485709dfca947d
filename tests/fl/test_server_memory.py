"""Memory use of the server: independent of the number of clients except for unions, and of clients not drawn."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from fl import FedAvg, simulate
from fl.aggregation import Aggregator
from fl.averaging.addon import AddOn
from fl.engine import _outliers
from fl.engine._client_memory import MemoryStore
from fl.engine._client_records import ClientRecord, ClientRecords
from fl.engine._round_stats import RoundStats
from fl.engine.store import CheckpointError, Store
from fl.message import Entry, Message
from fl.participants import Client
from tests.fl.federations import Tiny, images
from tests.refused import refused


class Alive:
    """Counts how many of the watched objects still exist."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, thing: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(thing, self._gone)

    def _gone(self) -> None:
        self.now -= 1


class Lazy(Sequence[LabeledImages]):
    """Clients created on access; records their numbers."""

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
    """FedAvg that counts replies and client memories."""

    replies: Alive
    memories: Alive

    def local(self, client: Client, message: Message) -> Message:
        reply = super().local(client, message)
        self.replies.watch(reply)
        self.memories.watch(client.memory)
        return reply


class Remembers(AddOn):
    """Keeps the client's last weights."""

    needs_previous = True


@pytest.mark.parametrize("workers", [1, 3])
def test_replies_images_and_memories_do_not_accumulate(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice the number of workers plus the one being accumulated, beside what may wait in memory."""
    monkeypatch.setattr(_outliers, "_IN_MEMORY", 0)
    for count in (6, 30):
        method, data = Watched(Remembers(), factory=Tiny), Alive()
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
    reducer = Aggregator({e.key: e for e in entries.values()})
    for client in range(50):
        reply = Message()
        for name, entry in entries.items():
            value = torch.ones(3)
            alive[name].watch(value)
            reply[entry] = value
        reducer.fold(client, reply)
    del reply, value
    client_data = {name: a.now for name, a in alive.items()}
    assert client_data["union"] == 50
    assert all(client_data[name] <= 1 for name in ("mean", "sum", "max", "first"))


def folder(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*.safetensors") if "clients" not in p.parts)


def test_clients_that_are_not_drawn_cost_nothing(tmp_path: Path) -> None:
    """With 10^9 clients: no list of them is created, no other client is accessed, and no file is written for them."""
    looked = {}
    for count in (20, 10**9):
        clients, out = Lazy(count), tmp_path / str(count)
        how: dict[str, Any] = {"rounds": 3, "participation": 5, "test": images(9, 1), "progress": False}
        run = simulate(FedAvg(Remembers(), factory=Tiny), clients, out=out, **how)
        drawn = [k for row in run.rows for k in row["drawn"]]
        looked[count] = len(clients.asked)
        assert set(clients.asked) <= {0, *drawn}
        assert {p.name for p in (out / "checkpoint" / "clients").iterdir()} == {str(k) for k in drawn}
        assert folder(out / "checkpoint") == ["model.safetensors", "server.2.safetensors", "server.3.safetensors"]
    assert looked[20] == looked[10**9]


# MemoryStore: pending until the server says that they count.


def memory(value: float) -> Message:
    return Message({FedAvg.samples: value})


@pytest.fixture(params=["disk", "RAM"])
def memories(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path if request.param == "disk" else None)


def client_data(memories: MemoryStore, client: int, *versions: str) -> list[str]:
    return [v for v in versions if v in memories._versions(client)]


def test_pending_memory_is_readable_but_unused_after_a_failed_or_killed_round(memories: MemoryStore) -> None:
    memories.stage(4, "1-a", memory(1.0))
    memories.commit({4: "1-a"})
    memories.stage(4, "2-a", memory(2.0))
    assert memories.load(4, "1-a")[FedAvg.samples] == 1.0  # another request, which does not know of the pending one
    memories.stage(4, "2-b", memory(2.0))
    memories.stage(6, "2-b", memory(2.0))
    assert client_data(memories, 4, "1-a", "2-a", "2-b") == ["1-a", "2-b"]
    memories.rollback()
    assert client_data(memories, 4, "1-a", "2-b") + client_data(memories, 6, "2-b") == ["1-a"]
    assert memories.load(4, "1-a")[FedAvg.samples] == 1.0
    # Clients 4 and 7 reply in a killed attempt of round 2, but not in the committed one; 7 for the first time.
    memories.stage(4, "2-a", memory(2.0))
    memories.stage(5, "2-b", memory(3.0))
    memories.commit({5: "2-b"})
    assert memories.load(4, "1-a")[FedAvg.samples] == 1.0
    assert memories.load(5, "2-b")[FedAvg.samples] == 3.0
    memories.stage(7, "2-a", memory(4.0))
    assert not len(memories.load(7, ""))
    assert client_data(memories, 7, "2-a") == []


def test_lost_memory_differs_from_a_client_without_memory(memories: MemoryStore) -> None:
    refused(lambda: memories.load(4, "1-a"), CheckpointError, "1-a")
    memories.stage(4, "1-a", memory(1.0))
    copy = memories.load(4, "1-a")
    copy[FedAvg.samples] = 9.0
    assert memories.load(4, "1-a")[FedAvg.samples] == 1.0


# What the server knows of clients: in the checkpoint, a line a round.


def test_client_records_change_only_with_a_committed_round() -> None:
    index = ClientRecords()
    index.update(4, {"poster": "x"}, "1-a")
    assert index[4] == ClientRecord("1-a", {"poster": "x"})  # in the same round already
    index.rollback()
    assert index[4] == ClientRecord()
    index.update(4, {"poster": "x", "flyer": "z"}, "1-b")
    assert index.commit() == {4: "1-b"}
    index.update(4, {"poster": "y"})
    changes = index.changes()
    assert changes == {"4": {"memory": "1-b", "cached": {"poster": "y", "flyer": "z"}}}
    assert index.commit() == {4: "1-b"}
    index.update(4, {"poster": "y"})
    assert index.changes() == {}
    again = ClientRecords()
    again.restore(changes)
    assert again.versions() == index.versions() == {4: "1-b"}
    assert again[4] == index[4]


def test_uncommitted_records_are_truncated(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number, changes in ((1, {"4": {"memory": "1-a", "cached": {}}}), (2, None)):
        store.append({"round": number})
        store.commit(number, "run", memory(0.0), {}, {}, changes)
    records = store.folder / "clients.jsonl"
    whole = records.read_text(encoding="utf-8")
    for tail in (whole.replace('"round": 1', '"round": 3'), whole[:20]):
        records.write_text(whole + tail, encoding="utf-8")
        found = Store(tmp_path).restore("run")
        assert found is not None
        assert (found.round, found.metadata, found.changes) == (2, {}, [{"4": {"memory": "1-a", "cached": {}}}])
        assert records.read_text(encoding="utf-8") == whole
    refused(lambda: Store(tmp_path).restore("other"), CheckpointError, "belongs to another run or round than this one")
    manifest = json.loads((store.folder / "manifest.json").read_text(encoding="utf-8"))
    for change in ({"run": "other"}, {"server": "server.1.safetensors"}):
        (store.folder / "manifest.json").write_text(json.dumps({**manifest, **change}), encoding="utf-8")
        (store.folder / "manifest.previous.json").unlink(missing_ok=True)
        refused(lambda: Store(tmp_path).restore("run"), CheckpointError, "belongs to another run or round than this")
    (store.folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    refused(lambda: Store(tmp_path / "empty").state(), CheckpointError, "holds no completed round")
    records.write_text(whole[:20] + "\n" + whole, encoding="utf-8")
    refused(lambda: Store(tmp_path).restore("run"), CheckpointError, r"clients\.jsonl is damaged: line 1")


def test_history_stores_each_name_and_equal_numbers_once() -> None:
    """With thousands of clients a round, the bytes they sent are most of a run's rows."""
    rows = []
    for _ in range(2):
        stats = RoundStats()
        for client in (1000, 1001, 1002):
            stats.count(client, {"a": 70_000}, {"b": 80_000})
            stats.count(client, {"a": 70_000}, {"b": 80_000})
        rows.append(stats.row([])["bytes_by_client"])
    assert rows[0] == rows[1] == {name: [140_000, 160_000] for name in ("1000", "1001", "1002")}
    assert all(one is other for one, other in zip(*rows, strict=True))
    assert len({id(number) for both in rows[0].values() for number in both}) == 2


class Kept:
    pictures = Entry[LabeledImages]("first")


def test_loaded_memory_is_a_deep_copy_without_graphs(memories: MemoryStore) -> None:
    weights = torch.ones(2, requires_grad=True)
    pictures = LabeledImages(
        torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]), num_classes=2, columns={"c": torch.zeros(2)}
    )
    values = {FedAvg.update: {"w": 2 * weights}, Kept.pictures: pictures}
    memories.stage(4, "1-a", Message(values))
    found = memories.load(4, "1-a")
    assert not found[FedAvg.update]["w"].requires_grad
    found[FedAvg.update]["w"] -= 1
    for tensor in (found[Kept.pictures].images, found[Kept.pictures].labels, found[Kept.pictures].columns["c"]):
        tensor.add_(1)
    again = memories.load(4, "1-a")
    assert again[FedAvg.update]["w"].tolist() == [2, 2]
    assert again[Kept.pictures].images.sum() == again[Kept.pictures].columns["c"].sum() == 0
    assert again[Kept.pictures].labels.tolist() == [0, 1]
