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
    """Store of payloads in a folder, with one file per entry; see `PayloadStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.safetensors"

    def keep(self, key: str, digest: str, value: Value) -> None:
        """Save a payload."""
        write_atomically(self._file(key), encode(Message.unchecked({key: value}), {"digest": digest}))

    def load(self, key: str, digest: str) -> Value:
        """Return a saved payload."""
        try:
            message, metadata = read_message(self._file(key))
        except CheckpointError as error:  # the server sends the payload again
            raise PayloadMissing(key) from error
        if metadata.get("digest") != digest:
            raise PayloadMissing(key)
        return dict(message.items())[key]


def remove_dead_runs(folder: Path, version: str, round_number: int) -> None:
    """Remove the folders of abandoned runs, and record that the run with the folder `folder` is active.

    A run is abandoned if it had no request for a month and has never completed a round, so it can only start again. A
    run that has completed a round can be resumed at any time, so its folder is marked and kept. A round was completed
    if a request of a later round uses a client memory that was stored in it.
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
