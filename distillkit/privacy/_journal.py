"""Append-only file of JSON lines that survives a kill at any byte; a ledger is stored in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from distillkit.locking import locked

__all__ = ["Journal"]

_TORN = {"torn": True}


class Journal:
    """File to which several processes append JSON objects; no line is lost once `append` has returned.

    A line is torn if the process that wrote it died before `append` returned. The next process that opens the file ends
    the line and marks it as torn. Any other damaged line is refused.

    Args:
        path: path of the file, which is created when the first line is written; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = 0
        self._line = 0
        self._bad: list[int] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a `with` block that locks the file briefly, so that reading and appending are one step."""
        from filelock import FileLock

        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_name(f"{self._path.name}.lock"), thread_local=False):
            yield

    def run_lock(self, wait: float | None = None) -> AbstractContextManager[None]:
        """Open a `with` block for a run, in which other processes may read the file but not append to it.

        Args:
            wait: number of seconds to wait for another process to leave its own `run_lock` block; None for the default
                of `locking.locked`.

        Raises:
            distillkit.locking.InUse: another process is still in such a block.
        """
        if self._path is None:
            return nullcontext()
        lock = self._path.with_name(f"{self._path.name}.owner.lock")
        return locked(lock, f"the ledger {self._path}", shared=True, wait=wait)

    def unread(self) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Return the lines that any process appended since the last call; end and mark a torn last line.

        Returns:
            (line number, object) pairs, and the number of torn lines among them.

        Raises:
            ValueError: a line in the middle is damaged, or the file has become shorter.
        """
        if self._path is None or not (self._offset or self._path.exists()):
            return [], 0
        if not self._path.exists() or self._path.stat().st_size < self._offset:
            raise ValueError(f"{self._path} lost lines since it was read, so there is no epsilon: restore the file")
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            text = file.read()
        if text and not text.endswith(b"\n"):
            text += self._close(text[text.rfind(b"\n") + 1 :])
        self._offset += len(text)
        lines, torn = [], 0
        for raw in text.splitlines():
            self._line += 1
            line = _parsed(raw)
            if line == _TORN:
                torn += len(self._bad)
                self._bad.clear()
            elif line is None:
                self._bad.append(self._line)
            elif self._bad:
                break
            else:
                lines.append((self._line, line))
        if self._bad:
            raise ValueError(
                f"line {self._bad[0]} of {self._path} is damaged, so its charge is unknown and there is no epsilon: "
                "restore the file"
            )
        return lines, torn

    def append(self, *lines: dict[str, Any]) -> None:
        """Write objects at the end of the file; they are on disk when the method returns.

        Args:
            lines: JSON objects without NaN or infinity, one per line; without arguments nothing is written.

        Raises:
            distillkit.locking.InUse: another process owns the file.
            ValueError: an object contains NaN or infinity.
        """
        if self._path is None or not lines:
            return
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with self.run_lock(wait=0.0):
            self._offset += len(self._write(text.encode()))
            self._line += len(lines)

    def _close(self, tail: bytes) -> bytes:
        mark = b"" if _parsed(tail) is not None else json.dumps(_TORN).encode() + b"\n"
        return self._write(b"\n" + mark)

    def _write(self, text: bytes) -> bytes:
        assert self._path is not None
        new = not self._path.exists()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            written = 0
            while written < len(text):
                written += os.write(handle, text[written:])
            os.fsync(handle)
        finally:
            os.close(handle)
        if new:
            _sync_folder(self._path.parent)
        return text


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _sync_folder(folder: Path) -> None:
    """Sync a new file's name to disk, if the system can open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
