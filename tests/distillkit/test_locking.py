"""Locks with one owner at a time, and workers that end with their parent."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distillkit import locking
from distillkit._utils import processes
from distillkit._utils.processes import exit_with_parent
from distillkit.locking import InUse, locked
from tests.refused import refused

BARE = f"""
import importlib.util, os, sys, time
from pathlib import Path
def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
locking = loaded("locking", {locking.__file__!r})
processes = loaded("processes", {processes.__file__!r})
"""
"""Another process that does not import torch, which takes seconds."""

HOLD = BARE + "with locking.locked(Path(sys.argv[1]), 'it'):\n    print('held', flush=True)\n    time.sleep(60)\n"
FORK = BARE + (
    "with locking.locked(Path(sys.argv[1]), 'it'):\n    print(os.fork() or 'held', flush=True)\n    time.sleep(60)\n"
)
TRY = BARE + (
    "try:\n    with locking.locked(Path(sys.argv[1]), 'the run in x', wait=0.1): print('got it')\n"
    "except locking.InUse as error: print(error.pid, error)\n"
)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".owner.lock"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def one(code: str, *arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, encoding="utf-8"))
        return started[-1]

    yield one
    for process in started:
        with process:
            if os.name == "posix":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()


def tried(start: Callable[..., subprocess.Popen[str]], lock: Path) -> str:
    return start(TRY, lock).communicate(timeout=30)[0].strip()


def test_second_process_is_refused_with_the_owners_process_id(tmp_path: Path, start: Any) -> None:
    lock = tmp_path / "new" / ".owner.lock"
    with locked(lock, "the run in x"):
        pid = os.getpid()
        assert tried(start, lock) == f"{pid} the run in x is in use by process {pid}: wait for it, or end it first"
    assert tried(start, lock) == "got it"


@pytest.mark.parametrize("code", [HOLD, FORK], ids=["alone", "with a forked child that lives on"])
def test_killed_owner_leaves_no_lock(code: str, lock: Path, start: Any) -> None:
    holder = start(code, lock)
    assert holder.stdout.readline()
    with pytest.raises(InUse, match=f"in use by process {holder.pid}: wait") as refused, locked(lock, "it", wait=0.1):
        pass
    assert refused.value.pid == holder.pid
    holder.kill()
    holder.wait()
    with locked(lock, "it", wait=1.0):
        assert tried(start, lock).startswith(str(os.getpid()))


FORKED = BARE + (
    "with locking.locked(Path(sys.argv[1]), 'it'):\n"
    "    child = os.fork()\n"
    "    if child:\n"
    "        os.waitpid(child, 0)\n"
    "        print('held', flush=True)\n"
    "        time.sleep(60)\n"
    "os._exit(0)\n"
)


def test_forked_child_does_not_release_the_lock(lock: Path, start: Any) -> None:
    holder = start(FORKED, lock)
    assert holder.stdout.readline()
    with pytest.raises(InUse, match=f"in use by process {holder.pid}: wait"), locked(lock, "it", wait=0.1):
        pass


def test_releasing_an_unowned_lock_does_nothing(lock: Path, start: Any) -> None:
    """As in the child of a fork: the lock belongs to its parent."""
    with locked(lock, "it"):
        held, _ = locking._OURS.pop(lock.resolve())
    assert tried(start, lock) != "got it"
    held.release()
    lock.with_suffix(".json").unlink()
    assert tried(start, lock) == "got it"


def test_lock_waits_briefly_for_an_ending_owner(lock: Path, start: Any) -> None:
    holder = start(HOLD, lock)
    assert holder.stdout.readline()
    threading.Timer(0.5, holder.kill).start()
    refused(locked(lock, "it", wait=0).__enter__, InUse, f"it is in use by process {holder.pid}: wait for it")
    with locked(lock, "it"):
        pass


def test_another_thread_is_another_owner_unless_shared(lock: Path, start: Any) -> None:
    found: list[BaseException | None] = []

    def attempt(path: Path, shared: bool) -> None:
        try:
            with locked(path, "the run in x", shared=shared):
                found.append(None)
        except InUse as error:
            found.append(error)

    with locked(lock, "the run in x", shared=True):
        for path in (lock, lock.parent / ".." / lock.parent.name / lock.name):
            found.clear()
            for shared in (False, True):
                thread = threading.Thread(target=attempt, args=(path, shared))
                thread.start()
                thread.join()
            assert "already in use by this process" in str(found[0])
            assert found[1] is None
        assert tried(start, lock) != "got it", "the first block holds it still"
    assert tried(start, lock) == "got it"


def test_unreadable_owner_file_names_no_process(lock: Path, start: Any) -> None:
    with locked(lock, "the run in x"):
        lock.with_suffix(".json").write_text('{"pid": 7, "host": "elsewhere"}', encoding="utf-8")
        assert tried(start, lock).startswith("7 the run in x is in use by process 7 on elsewhere: wait for it")
        for text in ("{", "[]", '{"pid": null, "host": 1}'):
            lock.with_suffix(".json").write_text(text, encoding="utf-8")
            assert tried(start, lock).startswith("None the run in x is in use by another process")


PARENT = BARE + (
    "import multiprocessing, concurrent.futures\n"
    "def work(_):\n"
    "    time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    context = multiprocessing.get_context('spawn')\n"
    "    pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=context, initializer=processes.exit_with_parent)\n"
    "    work_all = [pool.submit(time.sleep, 60), pool.submit(time.sleep, 60)]\n"
    "    time.sleep(0.5)\n"
    "    print(*pool._processes, flush=True)\n"
    "    time.sleep(60)\n"
)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z")


def test_workers_end_within_two_seconds_of_their_parents_death(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, encoding="utf-8")
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    try:
        assert len(workers) == 2
        assert all(map(alive, workers))
        time.sleep(1.0)  # of their start
        parent.kill()
        parent.wait()
        until = time.monotonic() + 2.0
        while any(map(alive, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(alive, workers))
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
        parent.stdout.close()


def test_only_a_worker_can_end_with_its_parent() -> None:
    with pytest.raises(RuntimeError, match="exit_with_parent must be called in a worker process"):
        exit_with_parent()


def test_lock_survives_the_removal_of_its_file(lock: Path, start: Any) -> None:
    """Until its owner ends (defect B11)."""
    owner = start(HOLD, lock)
    assert owner.stdout.readline().strip() == "held"
    lock.unlink()
    for _ in range(2):
        assert tried(start, lock).startswith(f"{owner.pid} the run in x is in use by process {owner.pid}")
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    assert tried(start, lock) == "got it"


def test_note_of_an_earlier_process_with_the_same_id_blocks_nothing(tmp_path: Path, start: Any) -> None:
    lock, other = tmp_path / ".owner.lock", start(HOLD, tmp_path / "another.lock")
    other.stdout.readline()
    note = json.loads((tmp_path / "another.json").read_text(encoding="utf-8"))
    assert note["pid"] == other.pid
    assert note["started"] == Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    for changed in ({"started": "1"}, {"host": "elsewhere"}):
        lock.with_suffix(".json").write_text(json.dumps({**note, **changed}), encoding="utf-8")
        assert tried(start, lock) == "got it"
        assert not lock.with_suffix(".json").exists()


@pytest.mark.parametrize("wait", [-0.1, math.inf, math.nan, "1"])
def test_impossible_waits_and_folders_are_refused(wait: Any, tmp_path: Path) -> None:
    words = f"wait must be a number of seconds, at least 0, got {wait!r}"
    refused(locked(tmp_path / "a", "it", wait=wait).__enter__, ValueError, words)
    refused(locked(tmp_path, "it").__enter__, IsADirectoryError, "lock must be a file")
