"""What a run came to, in one line: so that a repetition can be compared with it to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distillkit.fingerprint import tensor_fingerprint
from fl._codec import digest
from fl.engine.run import Run
from fl.message import Message

__all__ = ["hash_of", "outcome_hash"]

_NOT_COMPARED = ("bytes_resent", "bytes_spared")
"""Columns that say how a run went and not what came of it, beside all with seconds."""

_REMARKS = "remarks"
"""Of a ledger: whether it was begun by the run, say."""


def outcome_hash(run: Run) -> str:
    """A short text that differs when two runs came to anything else: the server's last state and the whole history.

    Two runs of the same method on the same task with the same seed have the same hash, whatever the number of workers,
    in threads or over the loopback, interrupted or not. Seconds are left out, and bytes that travelled again, or not at
    all. (The noise of a private method is the operating system's, so private runs differ.)

    Args:
        run: as `simulate` returned it.
    """
    return hash_of(run.rows, run.server.state)


def hash_of(rows: Sequence[Mapping[str, Any]], state: Message) -> str:
    """`outcome_hash` of a run that lies in files.

    Args:
        rows: of its history.
        state: the server's after the last of them.
    """
    said = json.loads(json.dumps([_compared(row) for row in rows]))  # as a file has them: all names are strings
    digests = [digest(key, value) for key, value in sorted(state.items())]
    return tensor_fingerprint([*digests, json.dumps(said, sort_keys=True)])


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in row.items() if "seconds" not in k and k not in _NOT_COMPARED}
    if isinstance(kept.get("setup"), Mapping):  # what went down before round 1 was not counted at first
        kept["setup"] = {k: v for k, v in kept["setup"].items() if k not in ("bytes_down", "down")}
    if isinstance(kept.get("privacy"), Mapping):
        kept["privacy"] = {k: v for k, v in kept["privacy"].items() if k != _REMARKS}
    return kept
