"""Locks between processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["InUse", "locked"]

_PATIENCE = 5.0
_GUARD = threading.Lock()
_OURS: dict[Path, list[Any]] = {}  # lock file -> [the lock, number of blocks of this process that hold it]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OURS.clear)


class InUse(RuntimeError):
    """Error for a resource that another process, or another thread of this process, has locked.

    Args:
        message: error message, with the resource and the process that has locked it.
        pid: id of the process that has locked the resource, or None if it is unknown.

    Attributes:
        pid: id of the process that has locked the resource, or None if it is unknown.
    """

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.pid), vars(self)


@contextlib.contextmanager
def locked(lock: Path, resource: str, *, shared: bool = False, wait: float | None = None) -> Iterator[None]:
    """Lock a resource during a `with` block. Other processes cannot lock the same lock file during the block.

    The operating system holds the lock and releases it when the process ends for any reason, so no cleanup is needed
    after a killed process, although its lock file remains. A `.json` file beside the lock file contains the id of the
    process that holds the lock. On Linux, the process keeps the lock even if someone removes the lock file, as long as
    the `.json` file remains. On file systems without locks, such as some network file systems, `filelock` uses a
    substitute or raises an error.

    Args:
        lock: path of the lock file. Its folder is created if it does not exist.
        resource: name of the resource, used in error messages: "the run in runs/a".
        shared: whether other `with` blocks of this process may share the lock. Otherwise these blocks are refused, like
            those of other processes.
        wait: largest number of seconds to wait for another process to release the lock. Default: 5, because the workers
            of a killed process end shortly after it.

    Raises:
        InUse: another process holds the lock; the message contains its id.
        OSError: the lock file cannot be created.
        TypeError, ValueError: an argument is invalid.
    """
    from filelock import FileLock, Timeout

    # No `check` here: its import of torch would delay the start of other processes by seconds.
    if not isinstance(lock, Path):
        raise TypeError(f"lock must be a pathlib.Path, got {type(lock).__name__}")
    if wait is not None and not (isinstance(wait, int | float) and 0 <= wait < math.inf):
        raise ValueError(f"wait must be a number of seconds, at least 0, got {wait!r}")
    lock = lock.resolve()
    if (file := next((one for one in lock.parents if one.is_file()), None)) is not None:
        raise NotADirectoryError(f"the folder of {resource} must be a folder, but {file} is a file; give another path")
    lock.parent.mkdir(parents=True, exist_ok=True)
    if lock.is_dir():
        raise IsADirectoryError(f"lock must be a file, but {lock} is a folder; give the path of a file in it")
    note = lock.with_suffix(".json")
    with _GUARD:
        if lock in _OURS and not shared:
            raise InUse(f"{resource} is already in use by this process ({os.getpid()}): wait for it", os.getpid())
        if lock not in _OURS:
            held, patience = FileLock(lock, thread_local=False), _PATIENCE if wait is None else wait
            end = time.monotonic() + patience
            try:
                held.acquire(timeout=patience)
            except Timeout:
                raise _refusal(note, resource) from None
            while _has_living_owner(note):  # the lock file was removed, or the owner is about to end
                if time.monotonic() > end:
                    held.release()
                    raise _refusal(note, resource)
                time.sleep(0.02)
            owner = {"pid": os.getpid(), "host": platform.node(), "started": _start_time(os.getpid())}
            note.write_text(json.dumps(owner) + "\n", encoding="utf-8")
            _OURS[lock] = [held, 0]
        _OURS[lock][1] += 1
    try:
        yield
    finally:
        with _GUARD:
            ours = _OURS.get(lock)
            if ours is not None:  # a forked child process holds no lock
                ours[1] -= 1
                if not ours[1]:
                    del _OURS[lock]
                    note.unlink(missing_ok=True)
                    ours[0].release()


def _start_time(pid: int) -> str | None:
    """Return the start time of a running process, which distinguishes it from later processes with the same id.

    Return None if there is no such process, or the system does not report the start time.
    """
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if state in "ZX" else others[18]  # a zombie process holds no locks
    except (OSError, ValueError, IndexError):
        return None


def _has_living_owner(note: Path) -> bool:
    """Return whether the `.json` file `note` records a process other than this one that still runs on this machine."""
    try:
        owner = json.loads(note.read_text(encoding="utf-8"))
        pid, host, started = int(owner["pid"]), owner["host"], owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return host == platform.node() and pid != os.getpid() and started is not None and _start_time(pid) == started


def _refusal(note: Path, resource: str) -> InUse:
    try:
        holder = json.loads(note.read_text(encoding="utf-8"))
        pid, host = int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return InUse(f"{resource} is in use by another process: wait for it, or end it first", None)
    where = "" if host == platform.node() else f" on {host}"
    return InUse(f"{resource} is in use by process {pid}{where}: wait for it, or end it first", pid)
