"""Append-only file of JSON lines that stores a ledger and survives a crash during a write.

The lines form a hash chain, so edits are detected. A file beside it, the head, is written before every append, so lost
lines are detected, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

from distillkit._utils import check
from distillkit._utils.files import atomic_replace, sync_folder
from distillkit.locking import locked

_AFTER = "after"


class LedgerWriteError(OSError):
    """Error for a charge that could not be written, for example because the disk is full. Nothing was released."""


def chained(lines: Sequence[dict[str, Any]], before: str = "") -> list[bytes]:
    """Convert JSON objects to lines of a file, without line breaks.

    The field "after" of every line contains the hash of all lines before it, which begins with `before`. If a line is
    edited, moved, inserted or removed, the hash in the next line therefore no longer matches.
    """
    texts: list[bytes] = []
    for line in lines:
        texts.append(json.dumps({**line, _AFTER: before}, allow_nan=False).encode())
        before = _hash(before, texts[-1])
    return texts


def _hash(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()


class Journal:
    """File to which several processes append JSON objects, one per line, protected by a hash chain.

    Before lines are appended, the file `<name>.head` is written: the number and the hash of the lines so far, and the
    text of the lines to come. When `append` returns, both are on disk. If a process dies in between, the next one
    completes the append, so nothing can be released whose lines are lost later. A file whose lines contradict the hash
    chain or the head is refused, and so is a file without its head.

    Args:
        path: path of the file, which is created when the first line is written. If it is None, nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._process = path, os.getpid()
        self._offset = 0
        self._refusal = ""
        self._hashes = [""]

    @property
    def head(self) -> dict[str, Any]:
        """Number of lines that were read or written so far and their hash, to pass to `continues` later."""
        return {"lines": len(self._hashes) - 1, "hash": self._hashes[-1]}

    def continues(self, head: Mapping[str, Any]) -> bool:
        """Return whether the file starts with all lines that it had when `head` was read."""
        count = head.get("lines")
        return type(count) is int and 0 <= count < len(self._hashes) and self._hashes[count] == head.get("hash")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a `with` block that locks the journal's file, so that reading and appending are one atomic step."""
        from filelock import FileLock

        if self._path is None:
            yield
            return
        check.folder(self._path.parent, "the folder of path").mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_name(f"{self._path.name}.lock")):
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

    def unread(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the lines that any process has appended since the last call, each with its number.

        An append that a crash interrupted is completed first.

        Raises:
            ValueError: the file is no journal, a line is damaged, or the file or its head was edited or lost lines.
        """
        if self._path is None:
            return []
        if self._refusal:
            raise ValueError(self._refusal)
        offset, count = self._offset, len(self._hashes)
        try:
            raw, head = self._new_bytes(), self._read_head()
            *whole, tail = raw.split(b"\n")
            self._offset += len(raw) - len(tail)
            lines = [self._checked(text) for text in whole]
            lines += [self._checked(text) for text in self._owed(head, tail)]
            return list(enumerate(lines, start=count))
        except BaseException:  # the next call must return the lines that this one has read
            self._offset, self._hashes = offset, self._hashes[:count]
            raise

    def append(self, *lines: dict[str, Any]) -> None:
        """Append objects to the file. The objects are on disk when the method returns.

        Args:
            lines: JSON objects without NaN or infinity, one per line. If there are none, nothing is written.

        Raises:
            distillkit.locking.InUse: another process is in a `run_lock` block for this file.
            LedgerWriteError: the file cannot be written; or there is none, and this process was forked.
            ValueError: an object contains NaN or infinity.
        """
        if self._path is None and lines and os.getpid() != self._process:
            raise LedgerWriteError(
                "this ledger is in the memory of another process, which would not see the charge; use a file, as in "
                "Ledger(path)"
            )
        if self._path is None or not lines:
            return
        texts = chained(lines, self._hashes[-1])
        with self.run_lock(wait=0.0):
            try:
                self._write_head([text.decode() for text in texts])
                self._write(b"".join(text + b"\n" for text in texts))
            except OSError as error:
                with suppress(OSError):  # otherwise, the next process completes the append
                    if self._path.exists():
                        os.truncate(self._path, self._offset)
                    self._write_head([])
                why = error.strerror or error
                raise LedgerWriteError(f"cannot write the ledger {self._path}: {why}; nothing was released") from error
        for text in texts:
            self._offset += len(text) + 1
            self._hashes.append(_hash(self._hashes[-1], text))

    def _new_bytes(self) -> bytes:
        """Return the bytes of the file that have not been read yet."""
        assert self._path is not None
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._offset:
            self._refuse(f"{self._path} lost lines since it was read")
        if size == self._offset:
            return b""
        with open(self._path, "rb") as file:
            if file.read(1) != b"{":
                raise ValueError(f"path must be a ledger or a new file, but {self._path} holds something else")
            file.seek(self._offset)
            return file.read()

    def _checked(self, text: bytes) -> dict[str, Any]:
        """Add a line to the chain and return its object."""
        number, line = len(self._hashes), _parsed(text)
        if line is None:
            self._refuse(f"line {number} of {self._path} is damaged, so its charge is unknown")
        if line.pop(_AFTER, None) != self._hashes[-1]:
            self._refuse(
                f"line {number} of {self._path} does not follow the lines before it: it was edited, or is no ledger"
            )
        self._hashes.append(_hash(self._hashes[-1], text))
        return line

    def _owed(self, head: dict[str, Any] | None, tail: bytes) -> list[bytes]:
        """Check the file against its head, write what an interrupted append left out, and return these lines."""
        if head is None:
            if len(self._hashes) > 1 or tail:
                self._refuse(f"{self._head_path()} is missing, so {self._path} may have lost lines")
            return []
        texts, done = [text.encode() for text in head["next"]], self.head["lines"] - head["lines"]
        if not self.continues(head):
            self._refuse(f"{self._path} lost or changed some of its first {head['lines']} lines")
        missing = b"".join(text + b"\n" for text in texts[done:])
        if reduce(_hash, texts[:done], head["hash"]) != self._hashes[-1] or not missing.startswith(tail):
            self._refuse(f"the last lines of {self._path} are not those of its head")
        if missing[len(tail) :]:
            self._write(missing[len(tail) :])
        self._offset += len(missing)
        return texts[done:]

    def _refuse(self, why: str) -> NoReturn:
        self._refusal = f"{why}, and there is no epsilon: restore the file"
        raise ValueError(self._refusal)

    def _head_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.head")

    def _read_head(self) -> dict[str, Any] | None:
        path = self._head_path()
        if not path.exists():
            return None
        head = _parsed(path.read_bytes())
        kinds = {"lines": int, "hash": str, "next": list}
        if head is None or {name: type(value) for name, value in head.items()} != kinds or not all(
            isinstance(text, str) for text in head["next"]
        ):  # fmt: skip
            self._refuse(f"{path} is damaged")
        return head

    def _write_head(self, texts: list[str]) -> None:
        path = self._head_path()
        with atomic_replace(path) as temporary:
            _write_durably(temporary, json.dumps({**self.head, "next": texts}).encode())
        sync_folder(path.parent)

    def _write(self, text: bytes) -> None:
        assert self._path is not None
        new = not self._path.exists()
        _write_durably(self._path, text)
        if new:
            sync_folder(self._path.parent)


def _write_durably(path: Path, text: bytes) -> None:
    """Append to a file, and return when the text is on disk."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        written = 0
        while written < len(text):
            written += os.write(handle, text[written:])
        os.fsync(handle)
    finally:
        os.close(handle)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
