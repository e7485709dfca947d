"""Contents of a run's `config.json`, and checks that a resumed run has the same options, data and ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distillkit._utils.files import parse_json, read_bytes
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit._utils.user_warnings import warn, without_warnings
from distillkit.fingerprint import network_fingerprint, set_fingerprint, tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.serialization import ConfigError, SerializationError, from_config, referenced_objects, to_config
from distillkit.sets import LabeledImages, StoredImages
from fl._components import options_by_name, stable_repr, without_addresses
from fl.engine._clients import ClientRegistry
from fl.engine._config import RunConfig
from fl.engine.store import CheckpointError, OtherSettings
from fl.method import Method
from fl.participants import Server

FREE = ("rounds", "versions", "notes", "transcript")
"""Keys of config.json whose values may differ when a run is resumed. "notes" are those of `RunFolder`."""


def warn_if_not_resumable(config: dict[str, Any], out: Path) -> None:
    """Warn if the method's description in `config.json` contains a memory address.

    Such a run cannot be resumed, because the address is different in each process.
    """
    if " at 0x" in (described := json.dumps(config["method"])):
        warn(
            f"the run in {out} cannot be resumed, because its method does not state its options: {described}. "
            "Make the class a frozen dataclass, or return the options from `arguments()`; use field(repr=False) for "
            "functions and networks"
        )


def data_fingerprint(clients: ClientRegistry, key: bytes = b"") -> str:
    """Return a fingerprint of the clients' training and test images.

    If clients are read on demand, the fingerprint covers the first client only.

    See `Transport.fingerprint` for the key.
    """
    client_data = list(clients) if clients.all_loaded else [clients[0]]
    return tensor_fingerprint([json.dumps([[_facts(h.train, key), _facts(h.test, key)] for h in client_data])], key=key)


def _facts(data: LabeledImages | StoredImages | None, key: bytes) -> list[Any] | None:
    return None if data is None else [len(data), set_fingerprint(data, key=key)]


def read_config(out: Path) -> dict[str, Any]:
    """Read a run's `config.json`.

    Args:
        out: folder of the run.

    Raises:
        CheckpointError: the file is missing, damaged, or of another version of distillkit.
    """
    path = out / "config.json"
    config = parse_json(read_bytes(path, CheckpointError), path, CheckpointError)
    if not isinstance(config, dict) or config.get("format") != RUN_FORMAT:
        found = config.get("format") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"{path} has the format {found!r}, which this version does not know (it writes {RUN_FORMAT!r}): use "
            "the version of distillkit that wrote it"
        )
    return config


def require_same(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to resume a run that was started with different options. Only options in `FREE` may differ."""
    saved, wanted = read_config(out), json.loads(json.dumps(record))
    pairs = {k: (saved.get(k), wanted[k]) for k in wanted if k not in FREE}
    if differs := "; ".join(text for name, pair in pairs.items() for text in _differences(name, *pair)):
        raise OtherSettings(f"{out} holds a run with other settings ({differs}); give another folder")


def _differences(name: str, was: Any, now: Any) -> Iterator[str]:
    """Yield the differences between two JSON values, each with the path to the innermost value that differs."""
    if isinstance(was, dict) and isinstance(now, dict) and was.get("object") == now.get("object"):
        for key in {**was, **now}:
            yield from _differences(name if key in ("with", "") else f"{name}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, pair in enumerate(zip(was, now, strict=True)):
            yield from _differences(f"{name}[{i}]", *pair)
    elif was != now:
        yield f"{name}: was {was!r:.100}, now {now!r:.100}"


def repetition(method: Method, server: Server, out: Path) -> dict[str, Any]:
    """Return the part of `config.json` from which `fl.study.load` builds the method again to repeat the run.

    Tensors among the method's arguments are written to `out`/arguments.
    """
    store = out / "arguments"
    config, missing = _rebuildable_config(method, "method", store)
    space = {"shape": server.shape, "dtype": server.dtype, "normalization": server.normalization}
    found = {
        "format": RUN_FORMAT,
        "recipe": config,
        "labels": _rebuildable_config(server.task, "task", store)[0],
        "images": to_config(space, store=store, name="images"),
    }
    if missing is not None:
        found["recipe_missing"] = missing
    return found if server.ledger is None else {**found, "budget": server.ledger.budget}


def _rebuildable_config(value: Any, name: str, store: Path) -> tuple[Any, str | None]:
    try:
        config = to_config(value, store=store, name=name)
        with without_warnings():
            again = from_config(json.loads(json.dumps(config)), store=store, names=referenced_objects(value))
    except (SerializationError, ConfigError) as error:
        return None, str(error)
    if without_addresses(again) != without_addresses(value):
        return None, f"the config of the {name} builds another one, {stable_repr(again)}"
    return config, None


def require_whole_ledger(ledger: Ledger | None, row: dict[str, Any], metadata: Mapping[str, str]) -> None:
    """Refuse to resume a private run if its privacy ledger lacks charges, or if lines of the ledger were changed."""
    if ledger is None:
        return
    stated = row["privacy"]
    spent = stated["epsilon"] if stated["epsilon"] is not None else stated["nominal_epsilon"]
    spent = math.inf if spent is None else spent
    known = ledger.guarantee().nominal
    if known < spent * (1 - 1e-6):
        raise CheckpointError(
            f"the ledger {ledger.path} has epsilon {known:.4g}, but the run had spent {spent:.4g} after round "
            f"{row['round']}: resume with the ledger that the run was started with"
        )
    if "ledger" in metadata:
        try:
            ledger.require_head(json.loads(metadata["ledger"]))
        except ValueError as error:
            raise CheckpointError(str(error)) from error


def config_of(method: Method, config: RunConfig, server: Server, data: str, key: bytes) -> dict[str, Any]:
    """Return the contents of `config.json`: all options and data fingerprints on which the result depends.

    The software versions are recorded, too.
    """
    architectures = method.inner.architectures(server.task.num_classes)
    record: dict[str, Any] = {
        "method": options_by_name(method),
        "task": repr(server.task),
        "seed": server.seed,
        "clients": server.clients,
        "data": data,
        "test": _facts(config.test, key),  # type: ignore[arg-type]
        "server_data": {name: _facts(d, key) for name, d in server.data.items()},
        "network": {n: network_fingerprint(net, torch.empty(0, *server.shape)) for n, net in architectures.items()},
        "participation": config.participation,
        "min_replies": config.min_replies,
        "evaluate": config.evaluate,
        "threads": {"client": 1, "server": config.server_threads},
        "device": str(server.device),
    }
    assigned = method.inner.assigned_architectures(server.clients)
    if assigned:
        record["assigned"] = tensor_fingerprint([json.dumps(list(assigned))])
    record |= {"rounds": config.rounds, "versions": versions()}
    if config.folder is not None and config.folder.transcript:
        record["transcript"] = {
            "adversary": "server",
            "sees": "every message of every client in completed rounds; interrupted rounds are in folders of their own",
        }
    if config.folder is not None and config.folder.notes is not None:
        record["notes"] = dict(config.folder.notes)
    ledger = server.ledger
    if ledger is not None:
        record["privacy"] = {"delta": ledger.delta, "secret": config.secret, "disjoint": ledger.disjoint}
    return record
