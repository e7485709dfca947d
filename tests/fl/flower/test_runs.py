"""Runs over an in-memory grid: bitwise equal to runs in threads, despite faults."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl import CheckpointError, ClientData, FedAvg, FedDM, Method, NoUsableReply, Real, Run, simulate
from fl.addons import SCAFFOLD, VHL, Anchors, SharedImage
from fl.deploy.flower import ConnectionOptions, IncompatibleNode, client_app, reply_to, serve, server_app
from fl.deploy.flower._handshake import identity_of
from fl.deploy.flower._messages import GridConnection
from fl.deploy.flower._node import Node
from fl.deploy.flower._node_registry import NodeRegistry
from fl.task import MultiLabel
from tests.fl import every_method
from tests.fl.every_method import assert_equal, rows
from tests.fl.federations import Tiny, federation, images, with_label_rows
from tests.fl.flower import fake_flower
from tests.fl.test_addon_combinations import PICTURE, SHARED
from tests.refused import refused

FAST: dict[str, Any] = {"factory": Tiny, "epochs": 1, "lr": 0.05, "batch": 8}
DM: dict[str, Any] = {"factory": Tiny, "ipc": 1, "steps": 2, "server_epochs": 1, "server_batch": 4}
METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(**FAST),
    "SCAFFOLD": lambda: FedAvg(SCAFFOLD(), **FAST),
    "FedDM": lambda: FedDM(**DM),
    "Real": lambda: Real(**DM),
}


def client_data(number: int) -> ClientData:
    return ClientData(federation()[number], images(6, seed=20 + number))


def grid(
    method: Method, folder: Path, fault: fake_flower.Fault = lambda *_: None, seed: int = 0, **app: Any
) -> fake_flower.Grid:
    made = client_app(method, app.pop("load_client", client_data), folder=folder, **app)
    return fake_flower.Grid(made, {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)}, fault, seed)


OPTIONS: dict[str, Any] = {"rounds": 3, "participation": 3, "evaluate": "all", "seed": 3}


def run_on_grid(there: fake_flower.Grid, method: Method, **options: Any) -> Run:
    limits: dict[str, Any] = {"poll_interval": 0.001, "reply_timeout": 900.0}
    limits |= {f.name: options.pop(f.name) for f in fields(ConnectionOptions) if f.name in options}
    given = {**OPTIONS, "test": images(10, seed=9), **options}
    return serve(there, method, connection=ConnectionOptions(**limits), **given)


def run_in_threads(method: Method, load: Callable[[int], Any] = client_data, **options: Any) -> Run:
    given = {"test": images(10, seed=9), **OPTIONS, **options}
    return simulate(method, [load(k) for k in range(5)], progress=False, **given)


@pytest.mark.parametrize("name", every_method.METHODS)
def test_results_equal_threads_bitwise(name: str, tmp_path: Path) -> None:
    """Clients on nodes share no objects with the server: what a method forgets to send is missing there."""
    there, here = every_method.METHODS[name](), every_method.METHODS[name]()
    held = every_method.federation()
    app = client_app(every_method.METHODS[name](), held.__getitem__, folder=tmp_path)
    nodes = {100 + k: fake_flower.context(100 + k, k, len(held)) for k in range(len(held))}
    run = run_on_grid(fake_flower.Grid(app, nodes), there, participation=1.0, **every_method.options_of(there))
    assert_equal(run, every_method.play(here))


PLAIN: dict[str, Any] = {"test": images(10, seed=9)}
LABELED: dict[str, Any] = {"task": MultiLabel(3), "test": with_label_rows(images(10, seed=9))}


def label_rows(number: int) -> ClientData:
    return ClientData(with_label_rows(federation()[number]), with_label_rows(images(6, seed=20 + number)))


@pytest.mark.parametrize(("load", "options"), [(client_data, PLAIN), (label_rows, LABELED)], ids=["plain", "rows"])
def test_server_app_runs_like_serve(load: Any, options: dict[str, Any], tmp_path: Path) -> None:
    method, found = METHODS["FedAvg"](), list[dict[str, Any]]()
    given = {**OPTIONS, **options, "rounds": 1}
    limits = ConnectionOptions(poll_interval=0.001)
    app = server_app(method, on_round=found.append, connection=limits, out=tmp_path / "run", **given)
    there = grid(method, tmp_path / "nodes", load_client=load, task=options.get("task"))
    app(there, fake_flower.context(0, None, 0))
    wanted = rows(run_in_threads(METHODS["FedAvg"](), load, **given))
    assert [{k: v for k, v in row.items() if "seconds" not in k} for row in found] == wanted
    assert (tmp_path / "run" / "history.jsonl").exists()


@pytest.mark.parametrize(("load", "options"), [(client_data, PLAIN), (label_rows, LABELED)], ids=["plain", "rows"])
def test_custom_app_reads_its_method_from_the_run_config(load: Any, options: dict[str, Any], tmp_path: Path) -> None:
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found, unused-ignore]

    app = ClientApp()

    @app.query("node")
    @app.query("job")
    @app.train("job")
    def answer(message: Any, context: Any) -> Any:
        method = METHODS[context.run_config["method"]]()
        return reply_to(message, context, method, load, folder=tmp_path, task=options.get("task"))

    nodes = {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)}
    for context in nodes.values():
        context.run_config["method"] = "SCAFFOLD"
    far = run_on_grid(fake_flower.Grid(app, nodes), METHODS["SCAFFOLD"](), **options)
    assert_equal(far, run_in_threads(METHODS["SCAFFOLD"](), load, **options))


# What goes astray.


def test_late_and_repeated_replies_change_nothing(tmp_path: Path) -> None:
    def fault(node: int, kind: str, group: str) -> str | None:
        return {101: "late", 102: "twice"}.get(node) if kind != "query.node" else None

    def counted(k: int) -> Any:  # a client's classes follow from its labels, and client 1 lacks one
        return images(12, seed=k).images, images(12, seed=k).labels.clamp(max=2 - (k == 1))

    for name, load in (("SCAFFOLD", client_data), ("FedDM", counted)):
        far, here = METHODS[name](), METHODS[name]()
        there = grid(far, tmp_path / name, fault, seed=4, load_client=load)
        assert_equal(run_on_grid(there, far), run_in_threads(here, load))


def faulty(folder: Path, fate: str, at: int, kind: str) -> fake_flower.Grid:
    """Return a grid of FedAvg with a fault of one node's messages of one kind."""
    return grid(METHODS["FedAvg"](), folder, lambda node, sent, _: fate if (node, sent) == (at, kind) else None)


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("garbage", "sent an unreadable reply: its content does not match its checksum"),
        ("error", "lost: Flower says the app crashed (code 2)"),
        ("lost", "lost: no answer in 1.1 seconds"),
    ],
)
def test_faulty_replies_are_named_in_the_history(fate: str, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fl.deploy.flower._grid._DELIVERY_GRACE", 0.1)
    there = faulty(tmp_path, fate, 101, "train.job")
    limit = 1.0 if fate == "lost" else 60.0
    (row,) = run_on_grid(there, METHODS["FedAvg"](), rounds=1, participation=1.0, reply_timeout=limit).rows
    assert list(row["failed"]) == ["1"]
    assert row["failed"]["1"].startswith(said)
    assert row["drawn"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ahead", "fails"), [(7200.0, True), (-7200.0, False)])
def test_clock_ahead_is_named(ahead: float, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is behind costs nothing, and does not extend the deadline."""
    method = FedAvg(**FAST)
    there = grid(method, tmp_path)
    clock = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    monkeypatch.setattr("fl.deploy.flower._node.time", clock)
    if not fails:
        assert run_on_grid(there, method, rounds=1, participation=1.0, reply_timeout=20.0).rows[0]["failed"] == {}
        return
    with pytest.raises(NoUsableReply, match="its clock is ahead of the server's"):
        run_on_grid(there, method, rounds=1, participation=1.0, reply_timeout=20.0)


def test_restarted_node_is_found_by_its_partition(tmp_path: Path) -> None:
    method = METHODS["SCAFFOLD"]()
    there = grid(method, tmp_path)

    def restart(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            there.nodes[300] = there.nodes.pop(101)

    assert_equal(run_on_grid(there, method, on_round=restart), run_in_threads(METHODS["SCAFFOLD"]()))
    assert any(node == 300 for node, kind, _ in there.log if kind == "train.job")


def test_lost_memory_is_an_error(tmp_path: Path) -> None:
    method = METHODS["SCAFFOLD"]()
    there = grid(method, tmp_path)

    def lose(row: dict[str, Any]) -> None:
        for path in tmp_path.rglob("memory/1/*"):
            path.unlink()

    run = run_on_grid(there, method, participation=1.0, rounds=2, on_round=lose)
    assert run.rows[0]["failed"] == {}
    assert "CheckpointError" in run.rows[1]["failed"]["1"]


def test_lost_payload_is_resent(tmp_path: Path) -> None:
    def lose(row: dict[str, Any]) -> None:
        for path in tmp_path.rglob("payloads/*"):
            path.unlink()

    method = with_kept()
    there = grid(with_kept(), tmp_path)
    run = run_on_grid(there, method, participation=1.0, on_round=lose)
    assert_equal(run, run_in_threads(with_kept(), participation=1.0))
    assert [row.get("bytes_resent", 0) > 0 for row in run.rows] == [False, True, True]
    assert [row.get("bytes_resent") for row in run.rows] == [None, *[run.rows[1]["bytes_resent"]] * 2]
    for kept in (with_kept(), FedAvg(Anchors(ipc=1, selected=(1,), steps=1, joined="always"), **FAST)):
        run = run_on_grid(grid(kept, tmp_path), kept)
        assert not any("bytes_resent" in row for row in run.rows)  # also with late clients, and anchors that change


def with_kept() -> FedAvg:
    return FedAvg(VHL(source="gaussian", classes=3, per_class=2, augment=None), **FAST)


# Killed, and resumed.


class Killed(BaseException):
    pass


def test_run_resumes_only_with_its_own_data(tmp_path: Path) -> None:
    run_on_grid(grid(METHODS["FedAvg"](), tmp_path / "nodes"), METHODS["FedAvg"](), out=tmp_path / "run", rounds=1)
    others = grid(METHODS["FedAvg"](), tmp_path / "nodes", load_client=lambda k: ClientData(images(12, seed=50 + k)))
    with pytest.raises(CheckpointError, match="data"):
        run_on_grid(others, METHODS["FedAvg"](), out=tmp_path / "run", resume=True)


# Who may take part.


def strange(folder: Path, change: str) -> fake_flower.Grid:
    method = FedAvg(**{**FAST, "lr": 0.1}) if change == "method" else METHODS["FedAvg"]()
    good = client_app(METHODS["FedAvg"](), client_data, folder=folder)
    load = {
        "shape": lambda k: images(9, seed=1).replace(images=images(9, seed=1).images[:, :, :3]),
        "classes": lambda k: images(9, seed=1).replace(num_classes=4),
        "broken": lambda k: Path("/nowhere").read_bytes(),
    }.get(change, client_data)  # type: ignore[arg-type]
    bad = client_app(method, load, folder=folder / "other", task=LABELED["task"] if change == "task" else None)
    nodes = {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)}
    place = {"twice": (0, 5), "nobody": (None, 0), "count": (2, 6)}.get(change, (2, 5))
    nodes[102] = fake_flower.context(102, *place)
    return fake_flower.Grid({node: bad if node == 102 else good for node in nodes}, nodes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("method", r"node 102 \(partition 2\) has another method than the server: .*lr=0\.1.*, not .*lr=0\.05"),
        ("task", r"has another task than the server: 'MultiLabel\(num_classes=3\)', not ''$"),
        ("shape", r"^node 102 \(partition 2\) .*partition 0"), ("classes", r"^node 102 \(partition 2\).*classes"),
        ("broken", "node 102 cannot take part: raised FileNotFoundError"),
        ("twice", "nodes 100 and 102 both have partition 0: give each node its own"),
        ("nobody", "node 102.*partition-id=0 num-partitions=2"),
        ("count", r"node 102 \(partition 2\) has 6 partitions, partition [01] has 5: start all nodes with the sa"),
    ],
)  # fmt: skip
def test_incompatible_node_is_refused_by_name(change: str, said: str, tmp_path: Path) -> None:
    refused(lambda: run_on_grid(strange(tmp_path, change), METHODS["FedAvg"]()), IncompatibleNode, said)


@pytest.mark.parametrize(
    ("fate", "limit", "error", "said"),
    [
        (
            "error",
            60.0,
            IncompatibleNode,
            r"node 104 cannot take part: .* its log\). Flower says the app crashed \(code 2\)$",
        ),
        (
            "gone",
            0.1,
            NoUsableReply,
            r"the nodes of partitions \[4\] did not connect in 0\.1 seconds \(connected: \[0, 1, 2, 3\]; node 104: "
            r"lost: Flower says the node is unavailable \(code 5\)\): start them",
        ),
    ],
)
def test_missing_node_is_named_with_the_reason(fate: str, limit: float, error: Any, said: str, tmp_path: Path) -> None:
    there = faulty(tmp_path, fate, 104, "query.node")
    refused(lambda: run_on_grid(there, METHODS["FedAvg"](), connect_timeout=limit), error, said)


def test_unreachable_node_is_asked_again(tmp_path: Path) -> None:
    there, registry = faulty(tmp_path, "gone", 104, "query.node"), NodeRegistry(METHODS["FedAvg"](), None)
    for nodes, unreachable in (([0, 1, 2, 3], [104]), ([0, 1, 2, 3, 4], [])):
        assert registry.discover(GridConnection(there, 0.001), 60.0) == []
        assert (sorted(registry.nodes), [*registry._unreachable]) == (nodes, unreachable)
        there.fault = lambda *_: None


def test_node_can_be_pickled(tmp_path: Path) -> None:
    method = FedAvg(SharedImage(PICTURE, **SHARED), **FAST)
    node = Node(method, client_data, folder=tmp_path)
    again = pickle.loads(pickle.dumps(node))
    assert identity_of(again.method) == identity_of(node.method)
    assert hello(again) == hello(node)


def test_fingerprint_depends_on_the_nodes_key(tmp_path: Path) -> None:
    said = [hello(Node(METHODS["FedAvg"](), client_data, folder=tmp_path / name)) for name in ("one", "one", "other")]
    assert said[0] == said[1] != said[2]
    assert ((tmp_path / "one" / "key").stat().st_mode & 0o777) == 0o600


CONFIG = {"partition-id": 1, "num-partitions": 5}


def hello(node: Node) -> dict[str, Any]:
    """Return a node's description of itself, without the time of its clock."""
    return {k: v for k, v in json.loads(node.handle_query({}, CONFIG)[1]["node"]).items() if k != "clock"}
