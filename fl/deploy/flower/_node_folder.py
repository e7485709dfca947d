"""A node's folder: the node's secret key, and the folders of runs that were abandoned before they completed a round."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

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
