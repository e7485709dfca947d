"""Files in a node's folder: the node's secret key, and the values of message entries that the server sends only once.

The module also removes the folders of runs that were abandoned before they completed a round.
"""

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
"""Time in seconds after which the folder of a run without a completed round is removed, if it gets no request."""

_COMMITTED = "committed"


def node_key(folder: Path) -> bytes:
    """Return the secret key of a node from the file `key` in its `folder`. If there is no such file, create it."""
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
    """Store of payloads (values of cached message entries) on disk, with one file per client and entry.

    Args:
        folder: the run's folder on the node.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bodies"

    def _file(self, client: int, key: str) -> Path:
        return self._folder / str(client) / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.safetensors"

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Save a payload (the value of a cached message entry) that a client received, and return it."""
        write_atomically(self._file(client, key), encode(Message.unchecked({key: value}), {"digest": digest}))
        return value

    def load(self, client: int, key: str, digest: str) -> Value:
        """Read and return the saved payload (value) of the message entry `key` that the client with index `client`
        received.
        """
        try:
            message, metadata = read_message(self._file(client, key))
        except CheckpointError as error:  # the server sends the payload again
            raise PayloadMissing(client) from error
        if metadata.get("digest") != digest:
            raise PayloadMissing(client)
        return dict(message.items())[key]


def remove_dead_runs(folder: Path, version: str, round_number: int) -> None:
    """Remove the folders of abandoned runs, and record that the run with the folder `folder` is active.

    A run is abandoned if it had no request for a month and has never completed a round. Such a run can only start again
    from round 1, so its files are not needed. A run that has completed a round can be resumed at any time, so its
    folder is marked and kept. The node sees that a round was completed when a later request uses a client memory that
    was stored in that round.
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
