"""Malformed messages are named refusals or failures, and leave no trace outside a node (defects B3, B4 and B9).

Valid messages are changed field by field, by values that lie outside the table `FIELDS` or that are odd for JSON.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillkit.privacy import Event, Ledger
from distillkit.privacy._journal import LedgerWriteError
from fl import FedAvg
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._fields import FIELDS, Field, read_fields
from fl.deploy._wire import Job, PayloadFolder, job_parts, read_job, result_parts
from fl.deploy.flower._handshake import read_partition
from fl.deploy.flower._messages import GridConnection, to_records
from fl.deploy.flower._node import Node, _run_with_timeout
from fl.deploy.flower._policy import read_policy
from fl.deploy.flower._replies import WITHHELD
from fl.engine._contract import ChangedInput
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.message import Entry, Message
from fl.participants import Interrupted
from tests.fl.flower.test_incompatible import asked, cohort
from tests.fl.flower.test_node_ledger import INFO
from tests.fl.flower.test_policy import written
from tests.fl.flower.test_runs import CONFIG, FAST, client_data
from tests.fl.test_private_runs import SIGMA
from tests.refused import refused

number_of_changes = pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
ODD: list[Any] = [
    None, True, -1, 10**400, -(10**400), 2**63, math.nan, math.inf, 1e308, "", "x", "../../evil", "/evil", "a\0b",
    "\ud800", "9" * 400, "x" * 20_000, [], [[]] * 20, {}, {"a": 1}, {"x" * 2000: 1}, json.loads("[" * 200 + "]" * 200),
]  # fmt: skip


class Cached(FedAvg):
    """FedAvg with a cached entry, whose payload a node stores."""

    kept = Entry[torch.Tensor]("first", cached=True)


def changed(value: Any, draws: random.Random) -> Any:
    """Return a copy of a JSON value in which one place, key or whole is replaced by an odd value."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and draws.random() < 0.85:
        key = draws.choice(sorted(value))
        if draws.random() < 0.1:
            del value[key]
        elif draws.random() < 0.1:
            value[draws.choice(["x", "../evil", "__class__"])] = draws.choice(ODD)
        else:
            value[key] = changed(value[key], draws)
        return value
    if isinstance(value, list) and value and draws.random() < 0.6:
        place = draws.randrange(len(value))
        value[place] = changed(value[place], draws)
        return value
    return draws.choice(ODD)


def mutated(parts: Parts, name: str, draws: random.Random) -> Parts:
    """Return the parts of a message, with a valid checksum, after a change of one of its strings."""
    message, facts = from_parts(*parts)
    text = "{" if draws.random() < 0.02 else json.dumps(changed(json.loads(facts[name]), draws))
    return to_parts(message, {**facts, name: text})


def with_place(parts: Parts, **place: Any) -> Parts:
    message, facts = from_parts(*parts)
    return to_parts(message, {**facts, "context": json.dumps({**json.loads(facts["context"]), **place})})


def valid_job() -> Parts:
    header = RequestHeader("local", 3, "abcdef01-2", seed=5)
    model = FedAvg(**FAST).networks.first("", 3, 5)
    message = Message.unchecked({"FedAvg.model": model, "Cached.kept": torch.ones(4)})
    request = ClientRequest(message, "", {"Cached.kept": "ab" * 16})
    place = {"run": "0123456789abcdef", "classes": 3, "deadline": 60.0, "ledger": None}
    return job_parts(Job(header, 1, request), {"context": json.dumps(place)})


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@number_of_changes
def test_changed_requests_are_refused_before_anything_is_written(count: int, tmp_path: Path) -> None:
    inside, draws = tmp_path / "world" / "node", random.Random(0)
    node = Node(Cached(**FAST), client_data, folder=inside)
    node.handle_query({}, CONFIG)  # writes the node's key
    assert "result" in node.handle_job(to_records(valid_job()), CONFIG, time.time())[1]
    kinds = set()
    for number in range(count):
        name = draws.choice(["job", "job", "job", "context"])
        before = files(tmp_path)
        reply = node.handle_job(to_records(mutated(valid_job(), name, draws)), CONFIG, time.time())
        kinds.update(reply[1].keys() & {"refused", "result", "missing"})
        assert len(reply[1].get("refused", "")) <= 500
        new = files(tmp_path).keys() - before.keys()
        assert all(path.is_relative_to(inside) for path in new), (number, new)
        assert "refused" not in reply[1] or not new, (number, reply[1]["refused"], new)
    assert "refused" in kinds
    assert sum(files(inside).values()) < 50_000


@number_of_changes
def test_changed_replies_are_failures_of_their_client(count: int) -> None:
    draws, ledger = random.Random(1), Ledger(delta=1e-5)
    good = ClientResult(1, Message.unchecked({"x": torch.ones(3)}), seconds=1.0, notes={"images": 3})
    line = [2, {"event": {**vars(Event("sum", SIGMA)), "client": "1"}}]
    report = {"name": "a", "since": 0, "lines": [line]}
    whole = result_parts(good, {"ledger": json.dumps(report)})
    found: dict[bool, int] = {True: 0, False: 0}
    for _ in range(count):
        name, private = draws.choice([("result", False), ("result", False), ("ledger", True)])
        transport = cohort(ledger if private else None)
        transport._registry.nodes[1] = INFO
        result = transport._read(asked(), mutated(whole, name, draws))
        assert isinstance(result, ClientResult)
        assert len(result.error or "") <= 500
        assert len(json.dumps(dict(result.notes), default=str)) < 2_000_000
        assert 0 <= result.seconds < math.inf
        found[result.error is None] += 1
    assert found[False] > 0.5 * count
    assert len(ledger.events) < 2 * count
    assert all(event.count < 10**13 for event in ledger.events)


class Odd:
    """A message whose content is no record of distillkit."""

    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize(
    "content",
    [None, 3, "tensors", [], {}, {"tensors": None, "strings": None}, {"tensors": {"a": 3}, "strings": {}},
     {"tensors": {}, "strings": {"a": 3}}, {"tensors": {}, "strings": 5}],
    ids=str,
)  # fmt: skip
def test_records_of_strangers_are_value_errors(content: Any) -> None:
    refused(lambda: GridConnection(None, 0.1).read(Odd(content)), ValueError, r"distillkit|tensor")


def test_errors_on_a_node_with_a_policy_are_withheld(tmp_path: Path) -> None:
    def broken(partition: int) -> Any:
        raise KeyError("6 images")

    policy = written(tmp_path / "policy.toml")
    for options, said in (
        ({}, "raised KeyError: '6 images' (line"),
        ({"policy": policy}, f"raised KeyError ({WITHHELD})"),
    ):
        node = Node(Cached(**FAST), broken, folder=tmp_path / "node", **options)  # type: ignore[arg-type]
        for reply in (node.handle_query({}, CONFIG), node.handle_job(to_records(valid_job()), CONFIG, time.time())):
            assert reply[1]["refused"].startswith(said)


@pytest.mark.parametrize(("number", "count"), [(None, None), (5, 5), (-1, 5), (True, 5), ("1.0", 5), (0, 10**6 + 1)])
def test_partition_of_a_node_is_in_range(number: Any, count: Any, tmp_path: Path) -> None:
    node, config = Node(Cached(**FAST), client_data, folder=tmp_path), {"partition-id": number, "num-partitions": count}
    said = f"the node has partition-id={number!r} and num-partitions={count!r}; expected a number from 0 on, and the "
    said += "number of partitions, at most 1000000: start it with flower-supernode --node-config 'partition-id=0"
    for reply in (node.handle_query({}, config), node.handle_job(to_records(valid_job()), config, time.time())):
        assert said in reply[1]["refused"]
    assert read_partition({"partition-id": "999999", "num-partitions": 10**6}) == (999_999, 10**6)
    ask = to_records(to_parts(Message(), {"ledger": "{}"}))
    assert "this node runs no private method, and keeps no ledger" in node.handle_query(ask, CONFIG)[1]["refused"]


def test_refused_requests_leave_no_files(tmp_path: Path) -> None:
    """The policy, and the client's number, are checked before a payload or a folder is written."""
    policy = written(tmp_path / "policy.toml", methods='["Another"]')
    assert read_policy(policy).methods == ("Another",)
    for options, config in (({"policy": policy}, CONFIG), ({}, {"partition-id": 2, "num-partitions": 5})):
        node = Node(Cached(**FAST), client_data, folder=tmp_path / "node", **options)  # type: ignore[arg-type]
        node.handle_query({}, config)
        before = files(tmp_path)
        for run in range(50):
            parts = with_place(valid_job(), run=f"{run:016x}")
            refused = node.handle_job(to_records(parts), config, time.time())[1]["refused"]
            assert "its policy" in refused or "received a request for 1" in refused
        assert files(tmp_path) == before


@pytest.mark.parametrize("part", FIELDS)
def test_every_bound_of_the_table_is_tried_on_both_sides(part: str) -> None:
    for name, field in FIELDS[part].items():
        if field.kind in ("an integer", "a number"):
            assert field.accepts(int(field.least)), name
            assert field.accepts(int(field.most)), name
            assert not field.accepts(int(field.least) - 1), name
            assert not field.accepts(int(field.most) + 1), name
            assert not field.accepts(True), name
            assert not field.accepts(math.nan), name
        if field.kind == "a string" and not field.pattern and field.most <= 10**6:
            assert field.accepts("é" * int(field.most)), name
            assert not field.accepts("x" * (int(field.most) + 1)), name
        assert field.accepts(None) == field.optional, name
    lists = Field("a list", 0, 2, item=Field("a string", 1, 1))
    assert [lists.accepts(x) for x in ([], ["a", "b"], ["a"] * 3, ["ab"], [1])] == [True, True, False, False, False]
    named = Field("a mapping", 1, 2, item=Field("a string", 1, 1, "[a-z]*"))
    odd = ({}, {"x": "ab"}, {"x": "1"}, {"x" * 1001: "a"}, {"x": "a", "y": "b", "z": "c"})
    assert [named.accepts(x) for x in ({"x" * 1000: "a"}, {"x": "a", "y": "b"}, *odd)] == [True] * 2 + [False] * 5
    with pytest.raises(ValueError, match="remaining must be an integer in .* got a huge number"):
        read_fields("exhausted", {"reason": "", "remaining": 10**5000})


def test_job_with_entries_that_nobody_names_is_refused(tmp_path: Path) -> None:
    message = Message.unchecked({"a": 1.0, "b": 2.0})
    fields = json.loads(job_parts(Job(RequestHeader("local", 1, "a", 0), 1, ClientRequest(message, "")))[1]["job"])
    for entries, why in ((["a"], "does not name the entry 'b'"), (["a", "b", "c"], "lacks the entry 'c'")):
        with pytest.raises(ValueError, match=why):
            read_job(message, {"job": json.dumps({**fields, "entries": entries})}, PayloadFolder(tmp_path))


def test_loading_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    """A node with a hanging disk does not block the run, and the reason is named (defect B10)."""
    release = threading.Event()

    def hangs(partition: int) -> Any:
        release.wait(60)
        return client_data(partition)

    parts = with_place(valid_job(), deadline=0.5)
    node = Node(Cached(**FAST), hangs, folder=tmp_path)
    began = time.monotonic()
    reply = node.handle_job(to_records(parts), CONFIG, time.time())
    release.set()
    assert time.monotonic() - began < 30
    assert re.fullmatch(r"did not load its data within 0\.\d+ seconds", reply[1]["refused"])


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (None, "did not answer before its deadline, and was stopped"),
        (SystemExit(3), "ended with an internal error; see the node's log"),
        (LedgerWriteError("no space left"), "could not write its ledger; see the node's log"),
        (ChangedInput("local changed its message"), "local changed its message"),
    ],
    ids=["hangs", "exits", "full disk", "changed input"],
)
def test_client_that_does_not_reply_is_stopped(ending: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(runtime: Any, *_: Any) -> ClientResult:
        if ending is not None:
            raise ending
        runtime.stop.wait(60)
        raise Interrupted

    monkeypatch.setattr("fl.deploy.flower._node.respond", respond)
    runtime: Any = SimpleNamespace(stop=threading.Event())
    result = _run_with_timeout(60.0 if ending is not None else 0.1, runtime, asked().job)
    assert result == ClientResult(1, error=said)
    assert runtime.stop.is_set() == (ending is None)
