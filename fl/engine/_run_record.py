"""What a run's folder says of the run, and what it takes to go on with it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from distillkit._sanity_checks import warn, without_warnings
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit.fingerprint import network_fingerprint, set_fingerprint, tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.serialization import ConfigError, SerializationError, from_config, referenced_objects, to_config
from distillkit.sets import LabeledImages, StoredImages
from fl._components import identity
from fl.engine._clients import ClientRegistry
from fl.engine.store import CheckpointError
from fl.method import Method
from fl.participants import Server

__all__ = [
    "FREE",
    "config_of",
    "data_fingerprint",
    "read_config",
    "repetition",
    "require_whole_ledger",
    "warn_if_not_resumable",
]

FREE = ("rounds", "versions", "notes", "transcript")
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


def data_fingerprint(clients: ClientRegistry, key: bytes = b"") -> str:
    """What `config.json` says of the clients' images: of all, or of the first client's where they are read when drawn.

    Args:
        clients: as `simulate` has them once they are checked.
        key: see `distillkit.fingerprint.tensor_fingerprint`.
    """
    held = list(clients) if clients.whole else [clients[0]]
    return tensor_fingerprint([json.dumps([[_facts(h.train, key), _facts(h.test, key)] for h in held])], key=key)


def _facts(data: LabeledImages | StoredImages | None, key: bytes) -> list[Any] | None:
    return None if data is None else [len(data), set_fingerprint(data, key=key)]


def read_config(out: Path) -> dict[str, Any]:
    """A run's `config.json`, of this format or the first, which had none: its run can be resumed, but not repeated.

    Args:
        out: the run's folder.

    Raises:
        CheckpointError: there is none, it is damaged, or a later version of distillkit wrote it.
    """
    path = out / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("format", "distillkit.run/1") not in ("distillkit.run/1", RUN_FORMAT):
        found = config.get("format") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"{path} is of the format {found!r}, which this version does not know (it writes {RUN_FORMAT!r}): go on "
            "with the version of distillkit that wrote it"
        )
    return config


def repetition(method: Method, server: Server, out: Path) -> dict[str, Any]:
    """What `config.json` says beside a run's settings, so that the method is built again from it (`fl.study.load`).

    Tensors that it was given are written to `out`/arguments.

    Args:
        method, server: of the run.
        out: its folder.

    Returns:
        `format`; `recipe`, the config of the method (see `distillkit.serialization`), or None and then
        `recipe_missing`, the reason; `labels`, the config of the task, or None; `images`, their shape, dtype and
        normalisation; `budget` of a private run.
    """
    store = out / "arguments"
    said, missing = _said(method, "method", store)
    space = {"shape": server.shape, "dtype": server.dtype, "normalization": server.normalization}
    found = {
        "format": RUN_FORMAT,
        "recipe": said,
        "labels": _said(server.task, "task", store)[0],
        "images": to_config(space, store=store, name="images"),
    }
    if missing is not None:
        found["recipe_missing"] = missing
    return found if server.ledger is None else {**found, "budget": server.ledger.budget}


def _said(value: Any, name: str, store: Path) -> tuple[Any, str | None]:
    try:
        said = to_config(value, store=store, name=name)
        with without_warnings():
            again = from_config(json.loads(json.dumps(said)), store=store, names=referenced_objects(value))
    except (SerializationError, ConfigError) as error:
        return None, str(error)
    if _without_address(again) != _without_address(value):
        return None, f"what built the {name} builds another one, {identity(again)}"
    return said, None


def _without_address(value: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", identity(value))


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
    clients: int,
    data: str,
    server: Server,
    participation: float | int,
    min_replies: int,
    evaluate: Any,
    server_threads: int,
    test: LabeledImages | StoredImages | None,
    rounds: int,
    key: bytes,
) -> dict[str, Any]:
    """What `config.json` says of a run: all that its result is a function of, and the versions that made it.

    Args:
        method, server, participation, min_replies, evaluate, server_threads, test, rounds: as `simulate` has them once
            they are checked.
        clients: how many there are.
        data: a fingerprint of their images.
        key: of the fingerprints of data; empty for plain ones.
    """

    architectures = method.inner.architectures(server.task.num_classes)
    fixed = {
        "method": identity(method),
        "task": repr(server.task),
        "seed": server.seed,
        "clients": clients,
        "data": data,
        "test": _facts(test, key),
        "server_data": {name: _facts(d, key) for name, d in server.data.items()},
        "network": {n: network_fingerprint(net, torch.empty(0, *server.shape)) for n, net in architectures.items()},
        "participation": participation,
        "min_replies": min_replies,
        "evaluate": evaluate,
        "threads": {"client": 1, "server": server_threads},
        "device": str(server.device),
    }
    assigned = method.inner.assigned(clients)
    if assigned:
        fixed["assigned"] = tensor_fingerprint([json.dumps(list(assigned))])
    return {**fixed, "rounds": rounds, "versions": versions()}
