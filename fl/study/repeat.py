"""Repetition of a saved run on all or some of its records, for example to train shadow models."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.provenance import git_commit
from distillkit._utils.user_warnings import warn
from distillkit.data import Split
from distillkit.privacy import Ledger
from distillkit.sets import Images
from distillkit.study._execution import PreparedRun, RunSpec
from distillkit.study.task import Task
from fl.engine import RunFolder
from fl.engine._clients import ClientData, ClientRegistry
from fl.engine._run_record import data_fingerprint
from fl.engine.simulate import simulate
from fl.engine.store import OtherSettings, Store, write_atomically
from fl.method import Method
from fl.study.federated import client_data
from fl.study.saved_run import NotRepeatable, SavedRun, load

__all__ = ["repeat"]


def repeat(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    keep: Sequence[int] | Tensor | None = None,
    seed: int | None = None,
    data: Callable[[], Split] | Split | None = None,
    method: Method | None = None,
    clients: Sequence[Images | ClientData] | None = None,
    test: Images | None = None,
    server_data: Mapping[str, Images] | None = None,
    workers: int = 1,
    device: str | None = None,
    names: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
    progress: bool = True,
) -> SavedRun:
    """Repeat a saved run, using only its `config.json` and the images.

    Before round 1, the images are read again and compared with the images of the run. The results are bit-identical for
    any number of workers. If you pass `keep`, the clients get only the listed records, and each record stays with its
    client. You can train shadow runs for membership attacks in this way.

    Args:
        folder: folder of the run.
        out: folder of the repetition. If it contains an interrupted repetition, this repetition is resumed. Default: a
            temporary folder.
        keep: indices of the records to keep in the task's training set, int [M]; None keeps all records.
        seed: seed of initial weights, batches and drawn clients; the partition does not change. Default: the run's
            seed. For shadow runs, use a different seed, because an attacker does not know the run's seed.
        data: the images, or a function that reads them. You need this argument if the files have moved, for example
            `partial(load_folder, "new/place", size=32)`. Pass loaded images (`load(folder).task.load()`) to avoid
            reading them for every repetition.
        method: the method, if `config.json` cannot describe it; see `load`.
        clients, test, server_data: the images of a run that was made by `simulate` outside a study. Such a run does not
            record the source of its images.
        workers: number of clients that run in parallel.
        device: device of clients and server; default: the device of the run. On another device, rounding may differ,
            and so may the hash of the results (`outcome_hash`).
        names: your functions and classes that the run uses, by "module:name": `{"models:small": small}`.
        trust: names of your modules whose functions and classes the run uses, for example `["models"]`; see
            `distillkit.serialization.from_config`.
        progress: whether to show a progress bar.

    Returns:
        The repetition, as `load` returns it. Its `hash` is equal to that of the saved run if all records are kept and
        the seed is the same.

    Raises:
        NotRepeatable: the folder does not record its method, task or images; or the images differ from those of the
            run. The message names the difference.
        fl.CheckpointError: there is no run in the folder, or a file is damaged or from a later version.

    Warns:
        UserWarning: the hash of a complete repetition differs from the hash of the finished run. The warning lists the
        software versions of both runs. A private run gives no warning, because its noise comes from the operating
        system and cannot be repeated.
    """
    known = load(folder, method=method, names=names, trust=trust)
    seed = known.seed if seed is None else check.positive_int(seed, "seed", least=0)
    given = {"clients": clients, "test": test, "server_data": server_data}
    with ExitStack() as stack:
        if out is None:
            out = stack.enter_context(tempfile.TemporaryDirectory())
        target = check.folder(out, "out")
        if target.resolve() == known.folder.resolve():
            raise ValueError(f"out must be another folder than the run's, got {out}")
        options = {"workers": workers, "device": device or known.config["device"], "progress": progress}
        try:
            if clients is None:
                if wrong := [name for name, value in given.items() if value is not None]:
                    raise ValueError(f"{wrong[0]} goes with clients: give both, or neither")
                whole = _of_task(known, target, keep, seed, data, options)
            else:
                if keep is not None or data is not None:
                    raise ValueError("keep and data are for a run of a study: pass clients with only the kept records")
                whole = _of_images(known, target, seed, clients, test, server_data, options)
        except OtherSettings as error:
            raise NotRepeatable(f"the run in {folder} had other data or options: {error}") from error
        again = load(target, method=method, names=names, trust=trust)
        for name in ("task", "candidate", "settings", "kept"):  # read now what a temporary folder holds
            with suppress(NotRepeatable):
                getattr(again, name)
    if (
        whole
        and seed == known.seed
        and len(again.rows) == len(known.rows)
        and again.hash != known.hash
        and "privacy" not in known.config
    ):
        warn(
            f"the repetition of {folder} has the hash {again.hash}, the run {known.hash}; the run used "
            f"{_versions(known)} on {known.config['device']}, the repetition {_versions(again)} on "
            f"{again.config['device']}"
        )
    return again


def _of_task(
    known: SavedRun,
    out: Path,
    keep: Any,
    seed: int,
    data: Any,
    options: dict[str, Any],
) -> bool:
    """Repeat a run that belongs to a study, by executing its task and candidate again.

    Args:
        known: the saved run.
        out, keep, seed, data: arguments of `repeat`.
        options: other arguments of `simulate`.

    Returns:
        Whether the repetition uses exactly the training records of the saved run.
    """
    task, candidate, notes = known.task, known.candidate, known.config["notes"]
    if data is not None and not isinstance(data, Split):
        task = replace(task, data=data)
    split = data if isinstance(data, Split) else _read(task, known.folder)
    if keep is not None and not isinstance(keep, Tensor):
        keep = torch.as_tensor(check.sequence(keep, "keep", "numbers of training records"))
    keep = known.kept if keep is None else keep
    whole = keep is None or (known.kept is not None and torch.equal(keep, known.kept))
    if "clients" in known.config and not whole:
        _require_same_images(known, task, split)
    elif whole and not (out / "config.json").exists():
        _begin(known, out, seed, options["device"])
    spec = RunSpec(known.folder.name, "", task.name, notes["method"], seed, known.settings, bool(notes["validation"]))
    if seed != known.partition_seed:
        options = {**options, "partition_seed": known.partition_seed}
    options = {**options, "keep": keep, "commit": git_commit(), "shared": known.folder / "arguments"}
    PreparedRun(spec, task, split, candidate, known.method).execute(out, **options)
    return whole


def _of_images(
    known: SavedRun, out: Path, seed: int, clients: Any, test: Any, server_data: Any,
    options: dict[str, Any],
) -> bool:  # fmt: skip
    """Repeat a run on images that the caller passes. The run was made by a call of `simulate`, outside a study.

    Args:
        known: the saved run.
        out, seed, clients, test, server_data: arguments of `repeat`.
        options: other arguments of `simulate`.

    Returns:
        Whether the repetition uses all training records of the run; always True here.
    """
    config, ledger = known.config, None
    privacy = config.get("privacy")
    if not (out / "config.json").exists():
        _begin(known, out, seed, options["device"])
    if privacy is not None:
        ledger = Ledger(
            out / "ledger.jsonl", delta=privacy["delta"], budget=config["budget"], disjoint=privacy["disjoint"]
        )
    simulate(
        known.method, clients, rounds=max(config["rounds"], len(known.rows)), test=test, server_data=server_data,
        task=known.labels, participation=config["participation"], min_replies=config["min_replies"],
        evaluate=config["evaluate"], seed=seed, ledger=ledger, secret=privacy and privacy["secret"],
        server_threads=config["threads"]["server"], resume=True,
        out=RunFolder(out, notes=config.get("notes")), **options,
    )  # fmt: skip
    return True


def _begin(known: SavedRun, out: Path, seed: int, device: str) -> None:
    """Write the saved run's options to the folder of its repetition.

    `simulate` then refuses to run the repetition with other options.

    Args:
        known: the saved run.
        out: folder of the repetition.
        seed: seed of the repetition.
        device: device of the repetition.
    """
    out.mkdir(parents=True, exist_ok=True)
    if "clients" not in known.config:
        return
    key = Store(known.folder).folder / "identity.key"
    if key.exists():
        Store(out).folder.mkdir(exist_ok=True)
        shutil.copy(key, Store(out).folder)
    config = {**known.config, "seed": seed, "device": device}
    write_atomically(out / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _require_same_images(known: SavedRun, task: Task, split: Split) -> None:
    """Check that the task's images are still those of the saved run.

    Raises:
        NotRepeatable: the images have changed since the saved run.
    """
    validation = bool(known.config["notes"]["validation"])
    allocation = task.assign(split, known.partition_seed, validation=validation, keep=known.kept)
    key = Store(known.folder).key() if "privacy" in known.config else b""
    found = data_fingerprint(ClientRegistry(client_data(allocation), split.train.num_classes, False), key)
    if found != known.config["data"]:
        raise NotRepeatable(
            f"the images that {task.name} reads now are not those of the run in {known.folder}: data was "
            f"{known.config['data']}, now {found}. If they have moved, pass data=, a function that reads them"
        )


def _read(task: Task, folder: Path) -> Split:
    try:
        return task.load()
    except (OSError, ValueError) as error:
        raise NotRepeatable(
            f"the images of the run in {folder} cannot be read: {error}. If they have moved, pass data=, such as "
            "partial(load_folder, 'new/place', size=32)"
        ) from error


def _versions(run: SavedRun) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.config["versions"].items())
