"""Pool of worker processes that run clients. A process is reused by later runs, and ends with its parent process."""

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

__all__ = ["STOP_TIMEOUT", "Process", "ProcessEnded", "acquire", "pickle_config", "release"]

STOP_TIMEOUT = 10.0
"""Seconds after which a process that does not become idle is killed."""


class ProcessEnded(RuntimeError):
    """Error: a worker process has ended. The message says how it ended."""


class Process:
    """A worker process, and the pipe through which it exchanges frames (tuples) with the server's process."""

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
        """True if the process still runs."""
        return self._process.is_alive()

    def send(self, *frame: Any) -> None:
        """Send a frame to the process.

        Args:
            frame: kind of the frame, such as "job", followed by its contents. They are sent as one tuple.

        Raises:
            ProcessEnded: the process has ended.
        """
        try:
            self.connection.send(frame)
        except OSError as error:
            raise ProcessEnded(self.end()) from error

    def receive(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the next frame (message) from the process, and return a tuple of the frame's kind and contents.

        Args:
            timeout: time limit in seconds, after which the process is killed; None for no limit.

        Raises:
            ProcessEnded: the process has ended, or was killed because it sent no frame for `timeout` seconds.
        """
        try:
            if timeout is None or self.connection.poll(timeout):
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        except BaseException:  # interrupted within a frame: the rest of the stream cannot be read
            self.end()
            raise
        raise ProcessEnded(self.end())

    def end(self) -> str:
        """Kill the process if it is alive, and return a text that says how it ended."""
        self.connection.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            return "the process in which it ran did not stop, and was killed"
        return f"the process in which it ran died (exit code {self._process.exitcode})"


_IDLE: list[Process] = []
_LOCK = threading.Lock()


def acquire(config: bytes) -> Process:
    """Take an idle process from the pool, or start a new one, and start a run in it.

    Args:
        config: pickled configuration of the run, from `pickle_config`.

    Raises:
        TypeError: the process cannot build the method.
        RuntimeError: a new process does not start.
    """
    while True:
        with _LOCK:
            idle = _IDLE.pop() if _IDLE else None
        if idle is not None and idle.parent != os.getpid():
            continue  # the worker belongs to the process from which this process was forked
        process = idle or Process()
        try:
            process.send("open", config)
            kind, *rest = process.receive()
        except ProcessEnded as error:
            if idle is not None:
                continue
            raise RuntimeError(
                f"a process of the loopback did not start: {error}; see its output above. A script must do its work "
                "under `if __name__ == '__main__':`, because a new process imports it; it cannot import code from a "
                "prompt or from standard input"
            ) from error
        except BaseException:
            process.end()
            raise
        if kind == "refused":
            release(process)
            raise TypeError(
                f"the method cannot be built in another process ({rest[0]}): the functions and classes that it is made "
                "of must be at the top level of a file that a new process can import, not in a notebook, an "
                "interactive session, or under `if __name__ == '__main__':`"
            )
        return process


def release(process: Process) -> None:
    """End the run in a worker process, and return the process to the pool. Kill a process that does not become idle."""
    try:
        process.send("stop")
        process.send("close")
        while process.receive(STOP_TIMEOUT) != ("closed",):
            pass
    except ProcessEnded:
        return
    except BaseException:
        process.end()
        raise
    with _LOCK:
        _IDLE.append(process)


# The run's configuration as bytes.


def _pickle(value: Any) -> bytes:
    """Pickle a value for another process.

    Each lock in the value becomes a new lock in the other process, because locks only guard caches within a process.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {**copyreg.dispatch_table, type(threading.Lock()): lambda lock: (threading.Lock, ())}
    pickler.dump(value)
    return buffer.getvalue()


def pickle_config(config: WorkerConfig) -> bytes:
    """Pickle a run's configuration for the worker processes.

    Raises:
        TypeError: a part of the configuration, such as a lambda, cannot be pickled. The message names the part, and
            says what to write instead.
    """
    try:
        return _pickle(config)
    except Exception as error:
        where, what = _unpicklable_part("", config.method) or ("", config.method)
        code = getattr(what, "__code__", None)
        found = f", line {code.co_firstlineno} of {code.co_filename}" if code is not None else ""
        raise TypeError(
            f"{stable_repr(what)}{found} cannot be sent to another process ({error}); the method holds it as "
            f"{type(config.method).__name__}{where}. Use a function or class at the top level of a file, with "
            "functools.partial for its options: a lambda, or a function inside a function, cannot be found there"
        ) from error


def _unpicklable_part(path: str, value: Any, depth: int = 0) -> tuple[str, Any] | None:
    """Find the innermost part of a value that cannot be pickled.

    Args:
        path: path of the value, as Python code, such as ".addons[0]".
        value: the value.
        depth: number of nested values around this one; the search ends at depth 8.

    Returns:
        The path of the part, and the part itself; None if the value can be pickled.
    """
    try:
        _pickle(value)
        return None
    except Exception:
        if depth < 8:
            for name, part in _value_parts(value):
                found = _unpicklable_part(path + name, part, depth + 1)
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
