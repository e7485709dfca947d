"""What a run came to, in one line: so that a repetition can be compared with it to the bit."""

from __future__ import annotations

import json

from distillkit.fingerprint import tensor_fingerprint
from fl.codec import digest
from fl.engine.run import Run

__all__ = ["outcome_hash"]

_NOT_COMPARED = ("bytes_resent",)
"""Columns that say how a run went and not what came of it, beside all with seconds."""


def outcome_hash(run: Run) -> str:
    """A short text that differs when two runs came to anything else: the server's last state and the whole history.

    Two runs of the same method on the same task with the same seed have the same hash, whatever the number of workers,
    in threads or over the loopback, interrupted or not. Seconds are left out, and what a resumed run sends again. (The
    noise of a private method is the operating system's, so private runs differ.)

    Args:
        run: as `simulate` returned it.
    """
    rows = [{k: v for k, v in row.items() if "seconds" not in k and k not in _NOT_COMPARED} for row in run.rows]
    state = [digest(key, value) for key, value in sorted(run.server.state.items())]
    return tensor_fingerprint([*state, json.dumps(rows, sort_keys=True)])
