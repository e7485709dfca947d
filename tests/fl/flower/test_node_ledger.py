"""Private runs on nodes: the epsilon of `simulate`, persistent ledgers, and the server's mirror of them."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit import privacy
from distillkit.privacy import BudgetExhausted, Event, Ledger, PrivacyError, compose, train_private
from distillkit.privacy._child_ledger import child_state, ledger_lines, mirror_lines
from fl import FedAvg, Method, NoUsableReply, Run, simulate
from fl.addons import DPSGD
from fl.deploy._fields import FIELDS
from fl.deploy.flower._handshake import NodeInfo
from fl.deploy.flower._node_ledger import NodeLedger, mirror_report
from fl.engine._client_runtime import FAILED_PRIVATELY
from fl.methods import PrivateFedDM
from tests.fl.federations import images
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import DM, FAST, Killed, client_data, grid, run_in_threads, run_on_grid
from tests.fl.test_private_runs import SIGMA, NoisySum
from tests.refused import refused

METHODS: dict[str, Callable[[], Method]] = {
    "PrivateFedDM": lambda: PrivateFedDM(
        sigma=2.0, sigma_sizes=2.0, least=0, num_networks=2, public_statistics=True, **DM
    ),
    "DPSGD": lambda: FedAvg(DPSGD(sigma=2.0, rate=0.5, size=12), **FAST, weights="uniform"),
}


@pytest.mark.parametrize("name", ["PrivateFedDM", "DPSGD"])
def test_privacy_columns_equal_those_of_simulate(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"evaluate": None, "rounds": 2}
    far = run_on_grid(grid(METHODS[name](), tmp_path), METHODS[name](), **how)
    here = run_in_threads(METHODS[name](), **how)
    assert [row["privacy"] for row in far.rows] == [row["privacy"] for row in here.rows]
    assert all(row["epsilon"] > 0 for row in far.rows)


SUM: dict[str, Any] = {"evaluate": None, "test": None, "participation": 1.0, "rounds": 2}


def summed(folder: Path, method: Method | None = None, fault: fake_flower.Fault = lambda *_: None, **how: Any) -> Run:
    """Run noisy sums with the nodes of this folder."""
    app = {name: how.pop(name) for name in ("policy", "code", "load_client") if name in how}
    return run_on_grid(grid(method or NoisySum(), folder, fault, **app), method or NoisySum(), **{**SUM, **how})


def events_of(folder: Path) -> dict[str, list[Event]]:
    """Return the charges of each node of this folder, by partition."""
    return mirrored_in(*(Ledger(path, disjoint=False) for path in sorted(folder.glob("ledgers/*.jsonl"))))


def mirrored_in(*ledgers: Ledger) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in itertools.chain.from_iterable(ledger.events for ledger in ledgers):
        found.setdefault(str(event.client), []).append(event)
    return found


def test_a_second_run_on_the_same_nodes_composes(tmp_path: Path) -> None:
    common = Ledger(tmp_path / "server.jsonl")
    first = [summed(tmp_path / "nodes", ledger=common).rows[-1]["epsilon"]]
    again = summed(tmp_path / "nodes").rows  # a server without the first run's ledger
    third = summed(tmp_path / "nodes", ledger=common).rows  # a server with this ledger: nothing is counted twice
    sums = [compose([(SIGMA, 1.0, n)], 1e-5).epsilon for n in range(1, 7)]
    assert first == [sums[1]]
    assert [row["epsilon"] for row in again] == sums[2:4]
    assert [row["epsilon"] for row in third] == sums[4:6]
    beside_it = Ledger(None)
    for _ in range(3):
        here = simulate(NoisySum(), [client_data(k) for k in range(5)], rounds=2, ledger=beside_it, progress=False)
    assert here.rows[-1]["epsilon"] == third[-1]["epsilon"]
    assert mirrored_in(common) == events_of(tmp_path / "nodes")


def test_slow_node_has_time_to_report_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.deploy.flower._grid._LEDGER_TIMEOUT", 0.0)
    run = summed(tmp_path, fault=lambda _, kind, group: "late" if (kind, group) == ("query.node", "ledger") else None)
    assert run.rows[-1]["epsilon"] == compose([(SIGMA, 1.0, 2)], 1e-5).epsilon


def test_draws_of_flowers_heartbeat_are_not_taken_for_those_of_a_private_network() -> None:
    calls = []

    class Network(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not calls:  # the heartbeat's thread draws during the first trace
                heartbeat = threading.Thread(target=random.uniform, args=(-0.1, 0.1))
                heartbeat.start()
                heartbeat.join()
            calls.append(x)
            return super().forward(x.flatten(1))

    train_private(Network(16, 3), torch.rand(4, 1, 4, 4), torch.arange(4) % 3, size=4, sigma=1.0, delta=0.1, steps=1)


def test_charge_is_on_disk_before_noise_is_drawn(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looking(NoisySum):
        def local(self, client: Any, message: Any) -> Any:
            super().local(client, message)
            seen.append(sum(e.round == client.round for e in events_of(tmp_path)[str(client.id)]))
            raise OSError("the disk is full")

    refused(lambda: run_on_grid(grid(Looking(), tmp_path), Looking(), **SUM), NoUsableReply, FAILED_PRIVATELY)
    assert seen == [1] * 5
    assert {k: len(e) for k, e in events_of(tmp_path).items()} == {str(k): 1 for k in range(5)}


@pytest.mark.parametrize("fate", ["lost", "garbage", "twice", "late"])
def test_charges_of_faulty_replies_count_once(fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.deploy.flower._grid._DELIVERY_GRACE", 0.2)
    book = Ledger(tmp_path / "server.jsonl")

    def fault(node: int, kind: str, group: str) -> str | None:
        return fate if (node, kind, group) == (101, "train.job", "1") else None

    run = summed(tmp_path / "nodes", fault=fault, ledger=book, reply_timeout=1.0 if fate == "lost" else 60.0)
    assert ("1" in run.rows[0]["failed"]) == (fate in ("lost", "garbage"))
    assert mirrored_in(book) == events_of(tmp_path / "nodes")
    assert run.rows[0]["epsilon"] == compose([(SIGMA, 1.0, 1)], 1e-5).epsilon


def test_repeated_round_is_charged_again(tmp_path: Path) -> None:
    seen: list[int] = []

    def die(node: int, kind: str, group: str) -> str | None:
        if (kind, group) == ("train.job", "2"):
            seen.append(node)
            if len(seen) == 3:
                raise Killed
        return None

    with pytest.raises(Killed):
        summed(tmp_path / "nodes", fault=die, out=tmp_path / "run")
    paid = {k: [e.round for e in events] for k, events in events_of(tmp_path / "nodes").items()}
    assert sorted(map(len, paid.values())) == [1, 1, 1, 2, 2]
    run = summed(tmp_path / "nodes", out=tmp_path / "run", resume=True)
    book = Ledger(tmp_path / "run" / "ledger.jsonl")
    assert mirrored_in(book) == events_of(tmp_path / "nodes")
    assert sorted(len(events) for events in mirrored_in(book).values()) == [2, 2, 2, 3, 3]
    assert run.rows[-1]["epsilon"] == compose([(SIGMA, 1.0, 3)], 1e-5).epsilon


def test_budget_of_the_run_ends_it_as_in_process(tmp_path: Path) -> None:
    said, clients = [], [client_data(k) for k in range(5)]
    budget = compose([(SIGMA, 1.0, 1)], 1e-5).epsilon
    for play in (lambda **how: summed(tmp_path, **how), lambda **how: simulate(NoisySum(), clients, **how, **SUM)):
        with pytest.raises(BudgetExhausted) as caught:
            play(ledger=Ledger(None, budget=budget))
        said.append((str(caught.value), caught.value.remaining))
    assert said[0] == said[1]


def test_node_cannot_end_a_run_without_a_budget(tmp_path: Path) -> None:
    class Lying(NoisySum):
        def local(self, client: Any, message: Any) -> Any:
            if client.id == 1:
                raise BudgetExhausted("nothing is left", remaining=0)
            return super().local(client, message)

    run = run_on_grid(grid(Lying(), tmp_path), Lying(), **{**SUM, "rounds": 1})
    assert list(run.rows[0]["failed"]) == ["1"]


def test_node_with_a_lost_ledger_is_named(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "server.jsonl")
    summed(tmp_path / "nodes", ledger=book)
    for path in sorted((tmp_path / "nodes").glob("ledgers/*.jsonl"))[:1]:
        path.unlink()
    refused(lambda: summed(tmp_path / "nodes", ledger=book), NoUsableReply, "did not report earlier charges")


def test_new_data_of_a_partition_inherit_earlier_charges(tmp_path: Path) -> None:
    summed(tmp_path / "nodes")
    run = summed(tmp_path / "nodes", load_client=lambda k: images(8, seed=90 + k), rounds=1)
    assert run.rows[0]["epsilon"] == compose([(SIGMA, 1.0, 3)], 1e-5).epsilon
    back = summed(tmp_path / "nodes", rounds=1)
    assert back.rows[0]["epsilon"] == compose([(SIGMA, 1.0, 4)], 1e-5).epsilon


def test_private_handshake_reveals_nothing_measured(tmp_path: Path) -> None:
    empty = summed(tmp_path / "nodes", load_client=lambda k: images(6, seed=k)[: 6 * (k > 0)], rounds=1)
    assert empty.rows[0]["empty"] == []
    counted = lambda k: (images(6, seed=k).images, images(6, seed=k).labels)  # noqa: E731
    refused(lambda: summed(tmp_path / "others", load_client=counted), ValueError, "node 10.*num_classes must be given")


# The mirror.


def line(**how: Any) -> dict[str, Any]:
    return {"event": asdict(Event("sum", SIGMA, **how))}


def test_mirror_adds_every_line_once_across_restarts(tmp_path: Path) -> None:
    node, run = Ledger(tmp_path / "node.jsonl"), Ledger(tmp_path / "run.jsonl")
    node.spend(Event("sum", SIGMA, count=2, client="somebody"), Event("sum", SIGMA, client="*"))
    node.add_remark("tuned on the data")
    node.assume("release")
    node.void("raw images took part")
    lines = json.loads(json.dumps(ledger_lines(node)))
    mirror_lines(run, "a", 3, lines[:2])
    for _ in range(2):
        mirror_lines(Ledger(tmp_path / "run.jsonl"), "a", 3, lines)
    assert [number for number, _ in lines] == [2, 3, 4, 5, 6]  # line 1 has the options
    assert run.mirrored("a") == 6
    assert [(e.client, e.count) for e in run.events] == [("3", 2), ("3", 1)]
    mirror_lines(run, "b", 4, lines)
    assert run.guarantee(4).reason == run.guarantee(3).reason == "raw images took part"
    assert run.guarantee().remarks == ("tuned on the data",)
    refused(lambda: run.guarantee("nobody"), PrivacyError, "neither charged nor registered")
    assert ledger_lines(node, 5) == ledger_lines(node)[4:]


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"event": {}}, {"event": None}, {"event": {**line()["event"], "sigma": -1.0}}, {"assumed": None, "by": "x"},
        {"event": {**line()["event"], "round": "1"}}, {"event": {**line()["event"], "count": 0}}, {"remarks": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_ledger_lines_are_refused_together(wrong: dict[str, Any], tmp_path: Path) -> None:
    run = Ledger(tmp_path / "run.jsonl")
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        mirror_lines(run, "a", 0, [(1, line()), (2, wrong)])
    assert not run.events
    run.spend(Event("rounds", SIGMA, relation=privacy.ADD_OR_REMOVE_CLIENT))
    mirror_lines(run, "a", 0, [(1, line())])
    assert "which one epsilon cannot cover" in run.guarantee(0).reason


def test_a_jobs_lines_are_kept_by_the_node(tmp_path: Path) -> None:
    for name in ("a", "b"):
        node = NodeLedger(tmp_path, 3, name, None)
        child = node.branch(child_state(Ledger(), "3"))
        assert not node.charged
        child.add_remark(f"tuned on {name}")
        child.assume("DPSGD", ["size"])
        assert not node.charged
        child.spend(Event("steps", SIGMA, 0.5, 7, client="3"))
        child.add_remark("again")
        assert node.charged
        child.void(f"raw images of {name} took part", client="3")
    found = node.ledger.guarantee("3")  # the data changed: the charges of the data before count, too
    assert (found.reason, found.remarks) == ("raw images of a took part", ("tuned on a", "again", "tuned on b"))
    assert [event.count for event in node.ledger.events] == [7, 7]
    assert found.assumptions["DPSGD"] == ("size",)


@pytest.mark.parametrize("wrong", [{"round": 10**9}, {"round": -1}, {"mechanism": "x" * 1001}], ids=str)
def test_events_of_a_node_are_in_range(wrong: dict[str, Any]) -> None:
    def mirror(changes: dict[str, Any]) -> None:
        mirror_lines(Ledger(), "a", 0, [(1, {"event": {**line()["event"], **changes}})])

    mirror({"round": 10**9 - 1, "mechanism": "x" * 1000})
    refused(lambda: mirror(wrong), ValueError, "of range")


INFO = NodeInfo(3, 5, "m", "", "f", "a", "", "0", 0.0, images(1, seed=0)[:0])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ({"name": "a", "since": 0}, "must have the fields"),
        ({"name": "b", "since": 0, "lines": []}, "names another ledger"),
        ({"name": "a", "since": 1, "lines": []}, "lines are missing in its ledger report"),
        ({"name": "a", "since": 0, "lines": [[2, line()], [1, line()]]}, "are not in order"),
        ({"name": "a", "since": 0, "lines": [[0, line()]]}, "are not in order"),
        ({"name": "a", "since": "0", "lines": []}, "since must be an integer"),
        ({"name": "a", "since": 0, "lines": [[1, "event"]]}, "must be objects"),
        (
            {"name": "a", "since": 0, "lines": [[n, line()] for n in range(1, 12)]},
            r"lines must be a list of a length in \[0, 10\]",
        ),
        ({"name": "a", "since": 0, "lines": [[1, line()]] * 11}, r"lines must be a list of a length in \[0, 10\]"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_malformed_ledger_reports_are_refused(said: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELDS["ledger report"], "lines", replace(FIELDS["ledger report"]["lines"], most=10))
    book = Ledger(None)
    with pytest.raises(ValueError, match=why):
        mirror_report(book, INFO, {"ledger": said if isinstance(said, str) else json.dumps(said)})
    assert not book.events
    mirror_report(book, INFO, {"ledger": json.dumps({"name": "a", "since": 0, "lines": [[4, line(client="9")]]})})
    assert [event.client for event in book.events] == ["3"]
