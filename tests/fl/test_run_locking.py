"""Locks on a run's folder, its ledger and a study; a history belongs to one run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distillkit import locking
from distillkit.locking import InUse
from distillkit.privacy import Event, Ledger
from fl import FedAvg, Filtered, simulate
from fl.engine.store import CheckpointError, read_history
from fl.filters.client_dp import ClientDP
from tests.distillkit.test_locking import HOLD, TRY
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same
from tests.refused import refused


@contextmanager
def locked_by_another_process(lock: Path) -> Iterator[int]:
    """Lock the file in another process and return its process id."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def attempt_in_another_process(lock: Path) -> str:
    """Return the output of another process that requests the lock."""
    return subprocess.run([sys.executable, "-c", TRY, str(lock)], capture_output=True, encoding="utf-8").stdout


def play(rounds: int = 3, **how: Any) -> Any:
    return simulate(FedAvg(factory=Tiny), federation(), rounds=rounds, progress=False, **how)


def private(**how: Any) -> Any:
    method = Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(sigma=4.0, rate=0.5, clip=1.0))
    return simulate(method, federation(), rounds=2, progress=False, secret=1, **how)


@pytest.fixture(autouse=True)
def without_lock_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_PATIENCE", 0.1)


def test_second_process_on_a_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    play(1, out=out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and not p.name.startswith(".owner")}
    with (
        locked_by_another_process(out / ".owner.lock") as pid,
        pytest.raises(InUse, match=f"the run in .*run is in use by process {pid}"),
    ):
        play(out=out, resume=True)
    assert before == {p: p.read_bytes() for p in before}
    assert_same(play(out=out, resume=True), play())


def test_run_locks_its_folder_and_ledger_from_first_to_last_round(tmp_path: Path) -> None:
    heard: list[str] = []

    def ask(row: dict[str, Any]) -> None:
        heard.extend(attempt_in_another_process(tmp_path / name) for name in (".owner.lock", "ledger.jsonl.owner.lock"))
        refused(lambda: play(out=tmp_path, resume=True), InUse, "already in use by this process")

    private(out=tmp_path, on_round=ask)
    assert len(heard) == 4
    assert all("is in use by process" in words for words in heard)
    assert [attempt_in_another_process(tmp_path / name) for name in (".owner.lock", "ledger.jsonl.owner.lock")] == [
        "got it\n"
    ] * 2


def test_ledger_of_a_running_process_is_read_only_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    event = Event("test", 2.0)
    mine = Ledger(path)
    mine.spend(event)
    before, epsilon = path.read_bytes(), mine.epsilon()
    with locked_by_another_process(tmp_path / "ledger.jsonl.owner.lock") as pid:
        with monkeypatch.context() as patched:
            patched.setattr("distillkit.locking._PATIENCE", None)  # a charge does not wait
            for charge in (lambda: mine.spend(event), lambda: mine.void("x"), lambda: mine.add_remark("x")):
                refused(charge, InUse, rf"the ledger .*ledger\.jsonl is in use by process {pid}")
        refused(lambda: private(ledger=mine), InUse, str(pid))
        assert path.read_bytes() == before
        assert mine.epsilon() == Ledger(path).epsilon() == epsilon
    mine.spend(event)
    assert (mine.epsilon() or 0) > (epsilon or 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: rows[:2] + rows[1:], "line 3 is of round 2, want 3"),
        (lambda rows: [rows[0], rows[2], rows[1]], "line 2 is of round 3, want 2"),
        (lambda rows: [*rows, rows[-1]], "line 4 is of round 3, want 4"),
        (lambda rows: rows[1:], "line 1 is of round 2, want 1"),
        (lambda rows: [rows[0], rows[1][:20], rows[2]], "line 2 cannot be read"),
        (lambda rows: [rows[0], "[2]", rows[2]], "line 2 is of round None, want 2"),
    ],
    ids=["twice", "swapped", "one too many", "cut", "torn inside", "no object"],
)
def test_history_with_unordered_rounds_is_refused_as_damaged(change: Any, why: str, tmp_path: Path) -> None:
    """Two processes in one folder would otherwise write rows twice without any message."""
    play(3, out=tmp_path)
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
    refused(lambda: read_history(path), CheckpointError, rf"history\.jsonl is damaged: {why}")
    refused(lambda: play(4, out=tmp_path, resume=True), CheckpointError, rf"history\.jsonl is damaged: {why}")


def test_torn_or_uncommitted_last_line_is_cut_and_the_run_resumes(tmp_path: Path) -> None:
    play(2, out=tmp_path)
    path = tmp_path / "history.jsonl"
    rows = path.read_text(encoding="utf-8")
    uncommitted = json.dumps({**json.loads(rows.splitlines()[-1]), "round": 3}) + "\n"
    for tail in (uncommitted, uncommitted[:30], uncommitted + uncommitted[:7].replace("3", "4")):
        path.write_text(rows + tail, encoding="utf-8")
        assert_same(play(2, out=tmp_path, resume=True), play(2))
        assert path.read_text(encoding="utf-8") == rows
    assert_same(play(4, out=tmp_path, resume=True), play(4))
