"""Unexpected messages between server and nodes: refused by name, while other clients continue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit.privacy import Ledger
from fl import FedAvg, Message, NoUsableReply
from fl._codec import to_parts
from fl.deploy._wire import Job, result_parts
from fl.deploy.flower import IncompatibleNode
from fl.deploy.flower._grid import ConnectionOptions, GridTransport, PendingRequest
from fl.deploy.flower._messages import from_records, to_records
from fl.deploy.flower._node_registry import NodeRegistry
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from tests.fl.federations import images
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import FAST, METHODS, grid, run_on_grid
from tests.refused import refused

ONCE: dict[str, Any] = {"rounds": 1, "participation": 1.0, "evaluate": "none"}


def test_wrong_number_of_clients_is_refused(tmp_path: Path) -> None:
    there = grid(METHODS["FedAvg"](), tmp_path)
    with pytest.raises(IncompatibleNode, match="clients=4, but the nodes have num-partitions=5: make them equal"):
        run_on_grid(there, METHODS["FedAvg"](), clients=4)
    refused(lambda: run_on_grid(there, METHODS["FedAvg"](), clients=0), ValueError, "clients must be at least 1, got 0")


def test_message_not_accepted_by_flower_fails_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = grid(METHODS["FedAvg"](), tmp_path)
    push = there.push_messages

    def full(messages: Any) -> list[str]:
        letters = list(messages)
        kinds = {(one.metadata.dst_node_id, one.metadata.message_type) for one in letters}
        return [""] if kinds == {(101, "train.job")} else list(push(letters))

    monkeypatch.setattr(there, "push_messages", full)
    [row] = run_on_grid(there, METHODS["FedAvg"](), **ONCE).rows
    assert row["failed"] == {"1": "was not reached: Flower did not accept the message to node 101"}


def test_node_with_another_partition_refuses_the_request(tmp_path: Path) -> None:
    there = grid(METHODS["FedAvg"](), tmp_path)

    def swap(row: dict[str, Any]) -> None:
        there.nodes[101], there.nodes[102] = there.nodes[102], there.nodes[101]

    run = run_on_grid(there, METHODS["FedAvg"](), **{**ONCE, "rounds": 2}, on_round=swap)
    assert run.rows[0]["failed"] == {}
    assert "this node is partition 2, and received a request for 1" in run.rows[1]["failed"]["1"]
    assert "this node is partition 1, and received a request for 2" in run.rows[1]["failed"]["2"]


def test_run_name_cannot_escape_the_nodes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.deploy.flower._grid._run_name", lambda out: "../../elsewhere")
    with pytest.raises(NoUsableReply, match=r"run must be a string of a length in .*, got '\.\./\.\./elsewhere'"):
        run_on_grid(grid(METHODS["FedAvg"](), tmp_path / "a" / "b"), METHODS["FedAvg"](), **ONCE)
    assert not list(tmp_path.rglob("*elsewhere*"))


def test_late_incompatible_node_is_left_out_with_a_warning(tmp_path: Path) -> None:
    there = grid(METHODS["FedAvg"](), tmp_path)

    def arrive(row: dict[str, Any]) -> None:
        there.nodes[300] = fake_flower.context(300, 2, 9)

    with pytest.warns(UserWarning, match=r"node 300.*9 partitions.*; the run goes on without it"):
        run = run_on_grid(there, METHODS["FedAvg"](), **{**ONCE, "rounds": 2}, on_round=arrive)
    assert [row["failed"] for row in run.rows] == [{}, {}]


# A single reply.


def asked(resent: int | None = None) -> PendingRequest:
    return PendingRequest(Job(RequestHeader("local", 3, "a", seed=5), 1, ClientRequest(Message())), resent=resent)


def cohort(ledger: Ledger | None = None) -> GridTransport:
    options = ConnectionOptions(reply_timeout=1.0, connect_timeout=1.0, max_concurrent=1)
    transport = GridTransport(None, NodeRegistry(FedAvg(**FAST), None), options, images(0, 1))  # type: ignore[arg-type]
    transport._ledger = ledger
    return transport


def test_missing_payload_is_resent_once() -> None:
    lacking = to_parts(Message(), {"missing": "A.x"})
    assert cohort()._read(asked(), lacking) is None
    found = cohort()._read(asked(resent=100), lacking)
    assert isinstance(found, ClientResult)
    assert found.error == "sent an unreadable reply: it lacks a payload that was sent"


def test_name_of_a_run_is_that_of_its_checkpoint() -> None:
    transport = cohort()
    for metadata in ({"run": "0123456789abcdef"}, {}):
        transport.restore(metadata, {})
        assert transport.metadata() == {"run": "0123456789abcdef"}


def test_private_reply_without_a_ledger_report_is_an_error(tmp_path: Path) -> None:
    found = cohort(Ledger(tmp_path / "ledger.jsonl"))._read(asked(), result_parts(ClientResult(1, Message())))
    assert isinstance(found, ClientResult)
    assert (found.reply, found.error) == (None, "sent an unreadable reply: it has no ledger report")


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = to_records(to_parts(Message.unchecked({"A.x": torch.ones(2)}), {"context": json.dumps({})}))
    assert from_records(content)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RuntimeError, match="tensors are sent in little-endian order, and this machine is big-endian"):
        to_records(to_parts(Message.unchecked({"A.x": torch.ones(2)}), {}))
