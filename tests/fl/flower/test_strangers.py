"""Apps that are not distillkit's, clocks that differ, and nodes that are restarted while a request is pending."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from fl import FedAvg
from fl.addons import DPSGD, SCAFFOLD
from fl.deploy.flower import _grid, client_app
from fl.deploy.flower._handshake import IncompatibleNode, NodeInfo
from fl.deploy.flower._node import Node
from fl.deploy.flower._node_registry import NodeRegistry, _warn_of_clock
from tests.fl.federations import Tiny
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import FAST, assert_equal, client_data, grid, run_in_threads, run_on_grid
from tests.refused import refused


def other_app() -> Any:
    """Return a client app of Flower's tutorial kind."""
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found, unused-ignore]

    app = ClientApp()
    app.train()(lambda message, context: None)
    app.evaluate()(lambda message, context: None)
    return app


def test_another_client_app_is_named_at_once(tmp_path: Path) -> None:
    method = FedAvg(**FAST)
    there = grid(method, tmp_path)
    there.app = {100: there.app, 101: other_app(), **{102 + k: there.app for k in range(3)}}
    started = time.monotonic()
    with pytest.raises(IncompatibleNode, match=r"node 101 cannot take part: .* not made with client_app"):
        run_on_grid(there, method, connect_timeout=60.0)
    assert time.monotonic() - started < 30


def test_another_client_app_that_connects_later_is_left_out(tmp_path: Path) -> None:
    method = FedAvg(**FAST)
    there = grid(method, tmp_path)

    def connect(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            there.app = {**{100 + k: there.app for k in range(5)}, 300: other_app()}
            there.nodes[300] = fake_flower.context(300, None, 0)

    with pytest.warns(UserWarning, match=r"node 300 cannot take part: .*; the run goes on without it"):
        run = run_on_grid(there, method, on_round=connect)
    assert_equal(run, run_in_threads(method))
    assert [node for node, _, _ in there.log].count(300) == 1


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_messages_of_another_server_app_are_refused_with_a_sentence(kind: str, tmp_path: Path) -> None:
    from flwr.app import Message, RecordDict  # type: ignore[import-not-found, unused-ignore]

    app = client_app(FedAvg(**FAST), client_data, folder=tmp_path)
    with pytest.raises(RuntimeError, match=f"got a '{kind}' message of another server app: make the server app with"):
        app(Message(RecordDict(), 7, kind), fake_flower.context(7, 0, 2))
    assert not list(tmp_path.iterdir())


# Clocks.


@pytest.mark.parametrize(("shift", "said"), [(7200.0, "7[12].. seconds ahead of"), (-7200.0, "7[12].. seconds behind")])
def test_clock_that_differs_is_named(shift: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = Node._describe

    def shifted(*given: Any) -> NodeInfo:
        info = describe(*given)
        return replace(info, clock=info.clock + shift)

    monkeypatch.setattr(Node, "_describe", shifted)
    method = FedAvg(**FAST)
    with pytest.warns(UserWarning, match="clock") as caught:
        run_on_grid(grid(method, tmp_path), method, rounds=1)
    clocks = "".join(sorted(str(w.message) for w in caught if "clock" in str(w.message)))
    for k in range(5):
        assert re.search(rf"\(partition {k}\) is at least {said} .*set both clocks by NTP", clocks)
    way = "ahead of" if shift > 0 else "behind"
    assert sorted(re.findall(rf"\(partition (\d)\) is at least 7[12].. seconds {way}", clocks)) == [*"01234"]


@pytest.mark.parametrize("clock", [994.9, 995.1, 1014.9, 1015.1])
def test_a_clock_is_compared_with_the_whole_time_of_the_handshake(clock: float) -> None:
    with warnings.catch_warnings(record=True) as caught:
        _warn_of_clock(replace(INFO, clock=clock), 1000.0, 1010.0)
    way, end = ("ahead of", "early") if clock > 1000 else ("behind", "late")
    said = (
        f"at least 5 seconds {way} the server's, so its clients are stopped that much too {end}: set both clocks by NTP"
    )
    far = clock in (994.9, 1015.1)
    assert [str(one.message) for one in caught] == [f"the clock of node 0 (partition 0) is {said}"] * far


HELD = LabeledImages(torch.zeros(1, 1, 4, 4), torch.tensor([0]), num_classes=2)
INFO = NodeInfo(0, 1, "", "", "", "", "", "", 0.0, HELD[:0])


def test_description_whose_space_holds_images_is_refused() -> None:
    assert NodeInfo.read(INFO.parts(), 7).node == 7
    refused(lambda: NodeInfo.read(replace(INFO, space=HELD).parts(), 7), ValueError, "must be a set without images")
    refused(lambda: NodeInfo.read(replace(INFO, partitions=0).parts(), 7), ValueError, "invalid reply to the handshake")
    refused(lambda: NodeInfo.read(replace(INFO, partition=1).parts(), 7), ValueError, "has partition-id=1 and num-part")


@pytest.mark.parametrize("field", ["method", "task", "version"])
def test_node_of_another_method_task_or_version_is_refused(field: str) -> None:
    registry = NodeRegistry(FedAvg(**FAST), None)
    info = replace(INFO, **registry._expected)
    registry.register(info)
    for classes in ("", '["a"]'):  # a node need not know the names
        registry.register(replace(info, classes=classes))
    refused(lambda: registry.register(replace(info, **{field: "x"})), IncompatibleNode, f"has another {field} than")
    moved = replace(info, fingerprint="x", node=8)
    refused(lambda: registry.register(moved), IncompatibleNode, "node 8 .* other data, or another key, than node 0,")


@pytest.mark.parametrize(("given", "classes"), [((), 4), ((0,), 4), ((1,), 5)])
def test_number_of_classes_is_given_or_the_largest(given: tuple[int, ...], classes: int) -> None:
    registry = NodeRegistry(FedAvg(**FAST), None)
    for k, own in enumerate((2, 4, 3)):
        space = HELD[:0].replace(num_classes=classes if k in given else own, classes_given=k in given)
        registry.nodes[k] = replace(INFO, partition=k, partitions=3, space=space)
    space = registry.common_space(None)
    assert (space.num_classes, space.classes_given) == (classes, given != ())
    known = registry.fingerprint(b"key")
    registry.nodes = dict(reversed(registry.nodes.items()))
    assert registry.fingerprint(b"key") == known != registry.fingerprint(b"other key")


# Restarted nodes.


class Restarting:
    """A fault: node 102 dies with its request of round 2, and returns under another number, once or every time."""

    def __init__(self, how: str, dies_again: bool = False) -> None:
        self.how, self.dies_again, self.asked = how, dies_again, list[int]()
        self.grid: fake_flower.Grid

    def __call__(self, node: int, kind: str, group: str) -> str | None:
        if kind != "train.job" or group != "2" or node not in (102, 202, 302):
            return None
        self.asked.append(node)
        if node == 102 or self.dies_again:
            del self.grid.nodes[node]
            self.grid.nodes[node + 100] = fake_flower.context(node + 100, 2, 5)
            return self.how
        return None


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_grid, "_DISCOVERY_INTERVAL", 0.0)
    monkeypatch.setattr(_grid, "_DELIVERY_GRACE", 1.0)


def on_restarting_node(method: FedAvg, folder: Path, fault: Restarting, **options: Any) -> Any:
    there = fault.grid = grid(method, folder, fault)
    return run_on_grid(there, method, participation=1.0, reply_timeout=10.0, **options)


@pytest.mark.parametrize("how", ["dead", "gone"])
def test_a_restarted_node_gets_its_request_again(how: str, tmp_path: Path, eager: None) -> None:
    """ "dead": Flower never says anything; "gone": Flower says that the node is unavailable."""
    fault = Restarting(how)
    run = on_restarting_node(FedAvg(SCAFFOLD(), **FAST), tmp_path, fault)
    assert fault.asked == [102, 202]
    assert_equal(run, run_in_threads(FedAvg(SCAFFOLD(), **FAST), participation=1.0))


def test_a_request_is_repeated_once(tmp_path: Path, eager: None) -> None:
    fault = Restarting("gone", dies_again=True)
    run = on_restarting_node(FedAvg(**FAST), tmp_path, fault)
    assert fault.asked == [102, 202]
    assert list(run.rows[1]["failed"]) == ["2"]
    assert run.rows[2]["failed"] == {}


def test_a_node_that_stays_away_is_named_as_soon_as_flower_knows(tmp_path: Path) -> None:
    method = FedAvg(**FAST)
    there = grid(method, tmp_path, lambda node, kind, _: "gone" if (node, kind) == (102, "train.job") else None)
    run = run_on_grid(there, method, participation=1.0)
    assert [list(row["failed"]) for row in run.rows] == [["2"]] * 3
    assert "unavailable" in run.rows[0]["failed"]["2"]


def test_private_requests_are_not_repeated(tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt would spend the budget."""
    monkeypatch.setattr(_grid, "_LEDGER_TIMEOUT", 0.1)
    fault = Restarting("gone")
    method = FedAvg(DPSGD(sigma=3.0, rate=0.5, size=12), factory=Tiny, steps=1, lr=0.1, weights="uniform")
    run = on_restarting_node(method, tmp_path, fault, evaluate="none")
    assert fault.asked == [102]
    assert list(run.rows[1]["failed"]) == ["2"]
    assert run.rows[2]["failed"] == {}
