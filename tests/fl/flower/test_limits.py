"""Size limits of messages, and removal of files of dead runs from nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fl import Message
from fl._codec import to_parts
from fl.deploy.flower import client_app
from fl.deploy.flower._messages import from_records, to_records
from fl.deploy.flower._node_folder import remove_dead_runs
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import METHODS, Killed, assert_equal, client_data, grid, run_in_threads, run_on_grid


def test_oversized_message_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = to_records(to_parts(Message.unchecked({"A.x": torch.zeros(1000)}), {"job": "x" * 100}))
    tensors, strings = from_records(content)
    size = sum(len(n) + 4000 for n in tensors) + sum(len(n) + len(v) for n, v in strings.items())
    assert from_records(content, size)[1] == strings
    monkeypatch.setattr("fl.deploy.flower._messages._read_tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match=f"{size} bytes, more than max_message_bytes={size - 1}"):
        from_records(content, size - 1)


def test_oversized_messages_are_reported_on_both_sides(tmp_path: Path) -> None:
    method = METHODS["FedAvg"]()
    app = client_app(method, client_data, folder=tmp_path)
    narrow = client_app(method, client_data, folder=tmp_path, max_message_bytes=700)

    def swollen(message: Any, context: Any) -> Any:
        answer = app(message, context)
        if message.metadata.message_type != "query.node":
            answer.content["strings"]["more"] = " " * 300_000
        return answer

    nodes = {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)}
    there = fake_flower.Grid({**dict.fromkeys(nodes, app), 101: swollen, 102: narrow}, nodes)
    run = run_on_grid(there, method, rounds=1, participation=1.0, evaluate="none", max_message_bytes=200_000)
    assert run.rows[0]["failed"].keys() == {"1", "2"}
    assert "more than max_message_bytes=200000, and was not read" in run.rows[0]["failed"]["1"]
    assert "refused" in run.rows[0]["failed"]["2"]
    assert "more than max_message_bytes=700" in run.rows[0]["failed"]["2"]


@pytest.mark.parametrize("limit", [1, 3])
def test_number_of_clients_with_a_message_is_limited(limit: int, tmp_path: Path) -> None:
    under_way: list[int] = []

    def count(node: int, kind: str, group: str) -> None:
        if kind == "train.job":
            under_way.append(1 + len(there._jobs))

    there = grid(METHODS["FedAvg"](), tmp_path, count)
    run = run_on_grid(there, METHODS["FedAvg"](), rounds=1, participation=1.0, max_concurrent=limit)
    assert (len(under_way), max(under_way)) == (5, limit)
    assert_equal(run, run_in_threads(METHODS["FedAvg"](), rounds=1, participation=1.0))


def pending(folder: Path) -> list[Path]:
    return sorted(folder.rglob("memory/*/*.safetensors"))


def test_restarted_run_replaces_the_files_of_a_dead_one(tmp_path: Path) -> None:
    seen: list[int] = []

    def die(node: int, kind: str, group: str) -> str | None:
        seen.append(node)
        if len(seen) == 9:  # after five hellos, in the fourth job of round 1
            raise Killed
        return None

    method, whole = METHODS["SCAFFOLD"](), {"participation": 1.0}
    with pytest.raises(Killed):
        run_on_grid(grid(method, tmp_path / "nodes", die), method, out=tmp_path / "run", **whole)
    dead = pending(tmp_path / "nodes")
    assert len(dead) == 3
    again = grid(METHODS["SCAFFOLD"](), tmp_path / "nodes")
    run = run_on_grid(again, method, out=tmp_path / "run", resume=True, **whole)
    assert_equal(run, run_in_threads(METHODS["SCAFFOLD"](), **whole))
    assert not set(dead) & set(pending(tmp_path / "nodes"))
    names = {path.parents[2].name for path in pending(tmp_path / "nodes")}
    assert len(names) == 1


def test_only_uncommitted_runs_are_removed_after_a_month(tmp_path: Path) -> None:
    ages = {"dead": 40, "young": 20, "tested": 40, "resting": 40}
    for name in ages:
        version = {"tested": "2-abc", "resting": "1-abc"}.get(name, "")
        remove_dead_runs(tmp_path / name, version, 2)  # a test in a round may name what the round has not committed
        (tmp_path / name / "memory").mkdir()
    for name, days in ages.items():
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    remove_dead_runs(tmp_path / "here", "", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "resting", "young"]
    remove_dead_runs(tmp_path / "young", "", 1)
    assert time.time() - (tmp_path / "young").stat().st_mtime < 60  # it goes on, so it has a month again
