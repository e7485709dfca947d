"""Hash of a run's results, with which repetitions of a run are compared bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distillkit._utils import check
from distillkit.fingerprint import tensor_fingerprint
from fl._codec import digest
from fl.engine.run import Run
from fl.message import Message

__all__ = ["hash_of", "outcome_hash"]

_NOT_COMPARED = ("bytes_resent",)
"""Columns about the execution instead of the results, in addition to those with seconds."""

_REMARKS = "remarks"
"""Column of a ledger's remarks, for example whether the run created it."""


def outcome_hash(run: Run) -> str:
    """Return a hash of the server's last state and the whole history.

    Two runs of the same method on the same task with the same seed have the same hash, for any number of workers, on
    Flower too, and even if a run was interrupted and resumed. The hash leaves out durations, and the column
    `bytes_resent` of the history (bytes that were sent again after a loss).

    Two runs of a private method have different hashes, because their noise comes from the operating system.

    Args:
        run: the result of `simulate`.
    """
    check.instance(run, Run, "run", "the Run that simulate returns")
    return hash_of(run.rows, run.server.state)


def hash_of(rows: Sequence[Mapping[str, Any]], state: Message) -> str:
    """Return the same hash as `outcome_hash`, for a run whose history and state were read from files.

    Args:
        rows: rows of the run's history.
        state: the server's state after the last row.
    """
    history = json.loads(json.dumps([_compared(row) for row in rows]))  # all names are strings, as in a file
    digests = [digest(key, value) for key, value in sorted(state.items())]
    return tensor_fingerprint([*digests, json.dumps(history, sort_keys=True)])


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in row.items() if "seconds" not in k and k not in _NOT_COMPARED}
    if isinstance(kept.get("setup"), Mapping):  # older versions did not count bytes before round 1
        kept["setup"] = {k: v for k, v in kept["setup"].items() if k not in ("bytes_down", "down")}
    if isinstance(kept.get("privacy"), Mapping):
        kept["privacy"] = {k: v for k, v in kept["privacy"].items() if k != _REMARKS}
    return kept
