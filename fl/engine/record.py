"""What a run's folder says of the run, and what it takes to go on with it."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import torch

import distillkit
from distillkit.fingerprint import network_identity, set_fingerprint, tensor_fingerprint
from distillkit.plausible import warn
from distillkit.privacy import Ledger
from distillkit.sets import LabeledImages
from fl.engine.roster import Roster
from fl.engine.store import CheckpointError
from fl.method import Method
from fl.parts import identity
from fl.sides import Server

__all__ = ["FREE", "config_of", "require_whole_ledger", "warn_if_not_resumable"]

FREE = ("rounds", "versions")
"""What a resumed run may have otherwise than before."""


def warn_if_not_resumable(config: dict[str, Any], out: Path) -> None:
    """Warn before round 1 that no later process can tell whether it has the same method: its record is an address.

    Args:
        config: of the run.
        out: its folder.
    """
    if " at 0x" in config["method"]:
        warn(
            f"the run in {out} cannot be resumed, because nothing says what its method was built with: "
            f"{config['method']}. Write the options as a frozen dataclass, or return them from `arguments()`; fields "
            "that hold functions or networks: field(repr=False)"
        )


def require_whole_ledger(ledger: Ledger | None, row: dict[str, Any]) -> None:
    """Refuse to go on with a ledger that knows of less than the run has spent.

    Args:
        ledger: of the run that goes on; None if it has none.
        row: of the last completed round.

    Raises:
        CheckpointError: with both numbers.
    """
    if ledger is None:
        return
    stated = row["privacy"]
    spent = stated["epsilon"] if stated["epsilon"] is not None else stated["nominal_epsilon"]
    spent = math.inf if spent is None else spent
    known = ledger.guarantee().nominal
    if known < spent * (1 - 1e-6):
        raise CheckpointError(
            f"the ledger {ledger.path} knows of epsilon {known:.4g}, but the run had spent {spent:.4g} after round "
            f"{row['round']}: go on with the ledger that it was begun with"
        )


def config_of(
    method: Method,
    clients: Roster,
    server: Server,
    participation: float | int,
    min_replies: int,
    evaluate: Any,
    server_threads: int,
    test: LabeledImages | None,
    rounds: int,
    key: bytes,
) -> dict[str, Any]:
    """What `config.json` says of a run: all that its result is a function of, and the versions that made it.

    Args:
        method, clients, server, participation, min_replies, evaluate, server_threads, test, rounds: as `simulate` has
            them once they are checked.
        key: of the fingerprints of data; empty for plain ones.
    """

    def facts(data: LabeledImages | None) -> list[Any] | None:
        return None if data is None else [len(data), set_fingerprint(data, key=key)]

    held = list(clients) if clients.whole else [clients[0]]
    architectures = method.inner.architectures(server.task.num_classes)
    fixed = {
        "method": identity(method),
        "task": repr(server.task),
        "seed": server.seed,
        "clients": len(clients),
        "data": tensor_fingerprint([json.dumps([[facts(h.train), facts(h.test)] for h in held])], key=key),
        "test": facts(test),
        "server_data": {name: facts(d) for name, d in server.data.items()},
        "network": {n: network_identity(net, torch.empty(0, *server.shape)) for n, net in architectures.items()},
        "participation": participation,
        "min_replies": min_replies,
        "evaluate": evaluate,
        "threads": {"client": 1, "server": server_threads},
        "device": str(server.device),
    }
    assigned = method.inner.assigned(len(clients))
    if assigned:
        fixed["assigned"] = tensor_fingerprint([json.dumps(list(assigned))])
    versions = {"distillkit": distillkit.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**fixed, "rounds": rounds, "versions": versions}
