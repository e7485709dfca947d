"""Processes of the loopback: spawned once, lent to one run after the other, gone with their parent."""

from __future__ import annotations

import copyreg
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fl._components import stable_repr
from fl.deploy.loopback._worker import WorkerConfig, serve

__all__ = ["PATIENCE", "Ended", "Process", "give_back", "pickled", "take"]

PATIENCE = 10.0
"""Seconds that a process may take to become idle before it is killed."""


class Ended(RuntimeError):
    """The process has ended; the message says how."""


class Process:
    """One process that serves runs, and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.connection: Connection = ours
        self.parent = os.getpid()
        self._process = context.Process(target=serve, args=(theirs,), name="loopback", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def send(self, *frame: Any) -> None:
        """Send a frame.

        Raises:
            Ended: nobody is there.
        """
        try:
            self.connection.send(frame)
        except OSError as error:
            raise Ended(self.end()) from error

    def receive(self, patience: float | None = None) -> tuple[Any, ...]:
        """The next frame.

        Raises:
            Ended: the process has ended, or sent nothing for `patience` seconds and was killed.
        """
        try:
            if patience is None or self.connection.poll(patience):
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        except BaseException:  # interrupted in the middle of a frame: what follows cannot be read
            self.end()
            raise
        raise Ended(self.end())

    def end(self) -> str:
        """Kill it, if it is alive; how it ended, in words."""
        self.connection.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            return "the process in which it ran did not stop, and was killed"
        return f"the process in which it ran died (exit code {self._process.exitcode})"


_IDLE: list[Process] = []
_LOCK = threading.Lock()


def take(opening: bytes) -> Process:
    """A process with a run opened in it: an idle one, or a new one.

    Args:
        opening: what the run is begun with, see `pickled`.

    Raises:
        TypeError: what was sent cannot be built there.
        RuntimeError: a new process does not come up.
    """
    while True:
        with _LOCK:
            idle = _IDLE.pop() if _IDLE else None
        if idle is not None and idle.parent != os.getpid():
            continue  # of the process that this one was forked from
        process = idle or Process()
        try:
            process.send("open", opening)
            kind, *rest = process.receive()
        except Ended as error:
            if idle is not None:
                continue
            raise RuntimeError(
                f"a process of the loopback did not come up: {error}, and what it said stands above. A script must do "
                "its work under `if __name__ == '__main__':`, because a new process imports it; what is typed in, or "
                "read from standard input, it cannot import"
            ) from error
        except BaseException:
            process.end()
            raise
        if kind == "refused":
            give_back(process)
            raise TypeError(
                f"the method cannot be built in another process ({rest[0]}): the functions and classes that it is made "
                "of must stand at the top of a file that a new process can import, not in a notebook, an interactive "
                "session, or under `if __name__ == '__main__':`"
            )
        return process


def give_back(process: Process) -> None:
    """The run is over: the process goes back to the idle ones, or is killed if it does not come to rest."""
    try:
        process.send("stop")
        process.send("close")
        while process.receive(PATIENCE) != ("closed",):
            pass
    except Ended:
        return
    except BaseException:
        process.end()
        raise
    with _LOCK:
        _IDLE.append(process)


# What travels, by the means of `multiprocessing`.


def _dumped(value: Any) -> bytes:
    """As the standard pickle; a lock, which guards caches of one process, is a new lock in the other."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {**copyreg.dispatch_table, type(threading.Lock()): lambda lock: (threading.Lock, ())}
    pickler.dump(value)
    return buffer.getvalue()


def pickled(opening: WorkerConfig) -> bytes:
    """What a run is begun with, the `opening`, as bytes.

    Raises:
        TypeError: naming what cannot travel, such as a lambda, and what to write instead.
    """
    try:
        return _dumped(opening)
    except Exception as error:
        where, what = _culprit("", opening.method) or ("", opening.method)
        code = getattr(what, "__code__", None)
        found = f", line {code.co_firstlineno} of {code.co_filename}" if code is not None else ""
        raise TypeError(
            f"{stable_repr(what)}{found} cannot travel to another process ({error}); the method holds it as "
            f"{type(opening.method).__name__}{where}. Take a function or class that stands at the top of a file, with "
            "functools.partial for its options: a lambda, or a function inside a function, cannot be found there"
        ) from error


def _culprit(path: str, value: Any, depth: int = 0) -> tuple[str, Any] | None:
    """The innermost part of a value that cannot be pickled, and where it is, if the value cannot be."""
    try:
        _dumped(value)
        return None
    except Exception:
        if depth < 8:
            for name, part in _value_parts(value):
                found = _culprit(path + name, part, depth + 1)
                if found is not None:
                    return found
        return path, value


def _value_parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        yield "", value.func
        yield from ((f"({part!r})", part) for part in (*value.args, *value.keywords.values()))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())
