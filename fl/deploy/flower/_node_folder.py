"""A node's folder: its key, the bodies of kept entries, and what runs have left that will never be asked for."""

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

__all__ = ["PayloadCache", "key_of", "remove_orphans"]

_MONTH = 30 * 24 * 3600.0
"""Seconds after which a run that has committed nothing is taken to have ended."""

_COMMITTED = "committed"


def key_of(folder: Path) -> bytes:
    """The key of a node's `folder`; drawn when it is first asked for, by whichever process is first."""
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


class PayloadCache:
    """The bodies of kept entries, one file a client and entry.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bodies"

    def _file(self, client: int, key: str) -> Path:
        return self._folder / str(client) / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.safetensors"

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Keep a body; see `fl.deploy._wire.Held` for `client`, `key`, `digest` and `value`."""
        write_atomically(self._file(client, key), encode(Message.unchecked({key: value}), {"digest": digest}))
        return value

    def of(self, client: int, key: str, digest: str) -> Value:
        """The body that lies here; see `fl.deploy._wire.Held` for `client`, `key` and `digest`.

        Raises:
            PayloadMissing: it does not.
        """
        try:
            message, facts = read_message(self._file(client, key))
        except CheckpointError as error:  # the server sends it once more
            raise PayloadMissing(client) from error
        if facts.get("digest") != digest:
            raise PayloadMissing(client)
        return dict(message.items())[key]


def remove_orphans(folder: Path, version: str, round_number: int) -> None:
    """Remove what runs have left that died before their first commit, after a month; this one's has just gone on.

    Such a run leaves memories that no letter of a later round ever names. One that does says that the run has committed
    a round, so that it may come back at any time.

    Args:
        folder: of the run that a letter has come for, beside those of other runs with the same data.
        version: of the memory that the letter names, or "".
        round_number: of the letter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if version and int(version.split("-")[0]) < round_number:
        (folder / _COMMITTED).touch()
    os.utime(folder)
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # another process was first
            forgotten = time.time() - other.stat().st_mtime > _MONTH
            if other != folder and forgotten and not (other / _COMMITTED).exists():
                shutil.rmtree(other)
