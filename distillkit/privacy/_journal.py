"""Append-only file of JSON lines that stores a ledger and survives a crash during a write.

The lines form a hash chain, so edits are detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit.locking import locked

__all__ = ["Chain", "Journal", "LedgerWriteError"]

_TORN = {"torn": True}
_AFTER = "after"


class LedgerWriteError(OSError):
    """Error for a charge that could not be written, for example because the disk is full. Nothing was released."""


class Chain:
    """Hash chain over the lines of a file.

    The field "after" of every line contains the hash of all lines before it. If a line is edited, moved, inserted or
    removed, the hash in the next line therefore no longer matches.
    """

    def __init__(self) -> None:
        self._hashes = [""]

    @property
    def lines(self) -> int:
        """Number of lines that were added to the hash chain so far."""
        return len(self._hashes) - 1

    @property
    def head(self) -> dict[str, Any]:
        """Number of lines in the chain so far and their hash, to pass to the method `continues` later."""
        return {"lines": self.lines, "hash": self._hashes[-1]}

    def continues(self, head: Any) -> bool:
        """Return whether this chain starts with all lines of the chain from which `head` was read.

        Args:
            head: earlier value of the property `head`. For any other value, the result is False.
        """
        count = head.get("lines") if isinstance(head, dict) else None
        return type(count) is int and 0 <= count <= self.lines and self._hashes[count] == head.get("hash")

    def add(self, raw: bytes) -> None:
        """Add a line of the file to the chain of hashes, in which each hash covers a line and the hash before it.

        Args:
            raw: bytes of the line without the line break. A line that was cut off by a crash is added too.
        """
        self._hashes.append(hashlib.sha256(self._hashes[-1].encode() + raw).hexdigest())

    def read(self, raw: bytes, line: dict[str, Any]) -> bool:
        """Add a line that was read from the file to the hash chain, unless its field "after" is wrong or missing.

        Args:
            raw: bytes of the line without the line break.
            line: the same line, parsed. The field "after" is removed from it.

        Returns:
            Whether the line was added: its field "after" contains the hash of all lines before it.
        """
        if line.pop(_AFTER, None) != self._hashes[-1]:
            return False
        self.add(raw)
        return True

    def texts(self, lines: Sequence[dict[str, Any]]) -> list[bytes]:
        """Convert lines to bytes without line breaks. The caller will append them to the file.

        The field "after", which contains the hash of all lines before, is added to each line. The lines are not added
        to the chain, because they have not been written yet.

        Raises:
            ValueError: a line contains NaN or infinity.
        """
        ahead, texts = Chain(), []
        ahead._hashes = self._hashes[-1:]
        for line in lines:
            texts.append(json.dumps({**line, _AFTER: ahead._hashes[-1]}, allow_nan=False).encode())
            ahead.add(texts[-1])
        return texts


class Journal:
    """File to which several processes append JSON objects, one per line, protected by a hash chain.

    When `append` returns, the lines that it wrote are on disk. A line is called torn if the process that wrote it died
    before `append` returned. The next process that opens the file ends the line and marks it as torn. A file with any
    other damaged line is refused. A file whose lines contradict the hash chain is refused too. The file `<name>.head`
    stores the number of lines and the last hash, so a file that has lost lines at its end is also refused.

    Args:
        path: path of the file, which is created when the first line is written. If it is None, nothing is written.

    Attributes:
        chain: hash chain of the lines that were read or written so far.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = 0
        self._bad: list[int] = []
        self._refusal = ""
        self.chain = Chain()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a `with` block that locks the journal's file, so that reading and appending are one atomic step."""
        from filelock import FileLock

        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_name(f"{self._path.name}.lock"), thread_local=False):
            yield

    def run_lock(self, wait: float | None = None) -> AbstractContextManager[None]:
        """Open a `with` block for a run, in which other processes may read the journal's file but not append to it.

        Args:
            wait: number of seconds to wait for another process to leave its own `run_lock` block; None for the default
                of `locking.locked`.

        Raises:
            distillkit.locking.InUse: another process has not left its own `run_lock` block in this time.
        """
        if self._path is None:
            return nullcontext()
        lock = self._path.with_name(f"{self._path.name}.owner.lock")
        return locked(lock, f"the ledger {self._path}", shared=True, wait=wait)

    def unread(self) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Return the lines that any process has appended since the last call.

        If the last line is torn, because a crash interrupted its writing, the method appends a line break and a line
        that marks the line before as torn.

        Returns:
            (line number, object) pairs, and the number of torn lines found.

        Raises:
            ValueError: the file is no journal, a line is damaged (it is not valid JSON, and not marked as torn), or the
                file was edited or has lost lines.
        """
        if self._path is None:
            return [], 0
        opening, size = not self._offset, self._path.stat().st_size if self._path.exists() else -1
        head = self._head() if opening else None
        if size < self._offset and (head is not None or not opening):
            raise ValueError(f"{self._path} lost lines since it was read, so there is no epsilon: restore the file")
        if opening and size > 0:
            with open(self._path, "rb") as file:
                if file.read(1) != b"{":
                    raise ValueError(f"path must be a ledger or a new file, but {self._path} holds something else")
        lines, torn = [], 0
        for raw in self._new_lines() if size > self._offset else ():
            self._offset += len(raw) + 1
            line = _parsed(raw)
            if line is None:
                self.chain.add(raw)
                self._bad.append(self.chain.lines)
            elif self._bad and not line.get("torn"):
                self._refuse(f"line {self._bad[0]} of {self._path} is damaged, so its charge is unknown")
            elif not self.chain.read(raw, line):
                number = self.chain.lines + 1
                self._refuse(
                    f"line {number} of {self._path} does not follow the lines before it: it was edited, or is no ledger"
                )
            elif line == _TORN:
                torn += len(self._bad)
                self._bad.clear()
            else:
                lines.append((self.chain.lines, line))
        if head is not None and not self.chain.continues(head):
            self._refuse(f"{self._path} lost or changed some of its first {head['lines']} lines")
        if self._refusal:
            raise ValueError(f"{self._refusal}, and there is no epsilon: restore the file")
        return lines, torn

    def append(self, *lines: dict[str, Any]) -> None:
        """Append objects to the file. The objects are on disk when the method returns.

        Args:
            lines: JSON objects without NaN or infinity, one per line. If there are none, nothing is written.

        Raises:
            distillkit.locking.InUse: another process is in a `run_lock` block for this file.
            LedgerWriteError: the file cannot be written.
            ValueError: an object contains NaN or infinity.
        """
        if self._path is None or not lines:
            return
        texts = self.chain.texts(lines)
        with self.run_lock(wait=0.0):
            try:
                self._offset += len(self._write(b"".join(text + b"\n" for text in texts)))
            except OSError as error:
                why = error.strerror or error
                raise LedgerWriteError(f"cannot write the ledger {self._path}: {why}; nothing was released") from error
        for text in texts:
            self.chain.read(text, json.loads(text))
        with suppress(OSError):  # an older head is still true
            write_atomically(self._head_path(), json.dumps(self.chain.head) + "\n")

    def _new_lines(self) -> Iterator[bytes]:
        """Yield the lines of the file that have not been read yet.

        If the last line lacks a line break, because a crash interrupted its writing, the method appends a line break.
        If this line is not valid JSON, it is incomplete ("torn"). The method then also appends another line, which
        marks it as torn.
        """
        assert self._path is not None
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            *whole, tail = file.read().split(b"\n")
        yield from whole
        if tail:
            self._write(b"\n")
            yield tail
            if _parsed(tail) is None:
                (mark,) = self.chain.texts([_TORN])
                self._write(mark + b"\n")
                yield mark

    def _refuse(self, why: str) -> None:
        self._refusal = self._refusal or why

    def _head_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.head")

    def _head(self) -> dict[str, Any] | None:
        try:
            return _parsed(self._head_path().read_bytes())
        except FileNotFoundError:
            return None

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
    """Sync a folder to disk, so that a new file's name survives a crash.

    On systems that cannot open folders, the function does nothing.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
