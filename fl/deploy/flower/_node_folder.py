"""A node's folder: the node's key, cached payloads, and removal of files that abandoned runs left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path

from fl._codec import encode
from fl.deploy._wire import PayloadMissing
from fl.engine.store import CheckpointError, read_message, write_atomically
from fl.message import Message, Value

__all__ = ["PayloadFolder", "node_key", "remove_dead_runs"]

_MAX_AGE = 30 * 24 * 3600.0
"""Seconds without a request after which a run without a committed round is removed."""

_COMMITTED = "committed"


def node_key(folder: Path) -> bytes:
    """Return the secret key in a node's `folder`. If there is none, create it."""
    path = folder / "key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        mine = folder / f"key.{secrets.token_hex(8)}"
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
    return path.read_bytes()


class PayloadFolder:
    """Payloads of cached entries on disk, one file per client and entry.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bodies"

    def _file(self, client: int, key: str) -> Path:
        return self._folder / str(client) / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.safetensors"

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Save a payload, and return it; see `fl.deploy._wire.PayloadStore` for the arguments."""
        write_atomically(self._file(client, key), encode(Message.unchecked({key: value}), {"digest": digest}))
        return value

    def of(self, client: int, key: str, digest: str) -> Value:
        """Return a saved payload; see `fl.deploy._wire.PayloadStore` for the arguments.

        Raises:
            PayloadMissing: the payload is missing, or has another digest.
        """
        try:
            message, facts = read_message(self._file(client, key))
        except CheckpointError as error:  # the server sends the payload again
            raise PayloadMissing(client) from error
        if facts.get("digest") != digest:
            raise PayloadMissing(client)
        return dict(message.items())[key]


def remove_dead_runs(folder: Path, version: str, round_number: int) -> None:
    """Remove the folders of old runs that never committed a round, and record that this run is still active.

    A folder is removed if it had no request for a month. A run that never committed a round starts from scratch when
    it is repeated, so its memories are not needed. If a request names a memory of an earlier round, the run has
    committed a round and can be resumed at any time, so its folder is marked and kept.

    Args:
        folder: folder of the request's run; its parent also holds the folders of other runs with the same data.
        version: memory version that the request names; "" if it names none.
        round_number: index of the request's round.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if version and int(version.split("-")[0]) < round_number:
        (folder / _COMMITTED).touch()
    os.utime(folder)
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it first
            expired = time.time() - other.stat().st_mtime > _MAX_AGE
            if other != folder and expired and not (other / _COMMITTED).exists():
                shutil.rmtree(other)
