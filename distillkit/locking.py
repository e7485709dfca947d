"""One process at a time: who owns a folder or a file, and workers that do not outlive their parent."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["InUse", "exit_with_parent", "locked", "worker_pool"]

_PATIENCE = 5.0
_GUARD = threading.Lock()
_OURS: dict[Path, list[Any]] = {}  # lock file -> [the lock, how many blocks of this process hold it]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OURS.clear)


class InUse(RuntimeError):
    """Refusal: another process, or another thread of this one, owns what was asked for.

    Args:
        message: what is owned, and by whom.
        pid: the holder's process number, None if it cannot be read.

    Attributes:
        pid: as given.
    """

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.pid), vars(self)


@contextlib.contextmanager
def locked(lock: Path, what: str, *, shared: bool = False, wait: float | None = None) -> Iterator[None]:
    """Own something for the length of a `with` block, against every other process that asks for the same lock file.

    The lock is the operating system's: it goes when its holder ends, however it ends, so that nothing has to be cleaned
    up after a kill; that the file is still there means nothing. Who holds it stands in a file of the same name with
    `.json`. (A file system that knows no locks, as some of networks do, gets `filelock`'s substitute or its error.)

    Args:
        lock: the lock file; its folder is made.
        what: what is owned, for the refusal: "the run in runs/a".
        shared: let other blocks of this process in too; else they are refused as another process would be.
        wait: seconds to wait for a holder that is about to end (workers outlive a killed parent by a moment); 5.

    Raises:
        InUse: somebody else owns it; the message says which process.
        OSError: there can be no lock file.
    """
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    lock = lock.resolve()
    note = lock.with_suffix(".json")
    with _GUARD:
        if lock in _OURS and not shared:
            raise InUse(f"{what} is in use already, by this very process ({os.getpid()}): wait for it", os.getpid())
        if lock not in _OURS:
            held = FileLock(lock, thread_local=False)
            try:
                held.acquire(timeout=_PATIENCE if wait is None else wait)
            except Timeout:
                raise _refusal(note, what) from None
            note.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}) + "\n")
            _OURS[lock] = [held, 0]
        _OURS[lock][1] += 1
    try:
        yield
    finally:
        with _GUARD:
            ours = _OURS.get(lock)
            if ours is not None:  # a forked child owns nothing
                ours[1] -= 1
                if not ours[1]:
                    del _OURS[lock]
                    ours[0].release()


def _refusal(note: Path, what: str) -> InUse:
    try:
        holder = json.loads(note.read_text())
        pid, host = int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return InUse(f"{what} is in use by another process: wait for it, or end it first", None)
    where = "" if host == platform.node() else f" on {host}"
    return InUse(f"{what} is in use by process {pid}{where}: wait for it, or end it first", pid)


def exit_with_parent() -> None:
    """End this process as soon as its parent has ended, however that was; call it first thing in a worker.

    `ProcessPoolExecutor(n, mp_context=get_context("spawn"), initializer=exit_with_parent)`: otherwise the workers of a
    killed process go on with what they had begun, and then wait for ever.

    Raises:
        RuntimeError: this process was not started by `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("exit_with_parent is for a worker process of multiprocessing; this is none")

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def worker_pool(count: int) -> ProcessPoolExecutor:
    """A pool of worker processes that end with this one, also when it is killed.

    (One that is killed while it starts ends when its imports are done; it has begun nothing by then.)

    Args:
        count: how many.
    """
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=exit_with_parent)
