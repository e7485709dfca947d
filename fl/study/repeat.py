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
    if clients is None and (test is not None or server_data is not None):
        raise ValueError(f"{'server_data' if test is None else 'test'} goes with clients: give both, or neither")
    if clients is not None and (keep is not None or data is not None):
        raise ValueError("keep and data are for a run of a study: pass clients with only the kept records")
    if keep is None:
        keep = known.kept if clients is None else None
    elif not isinstance(keep, Tensor):
        keep = torch.as_tensor(check.sequence(keep, "keep", "numbers of training records"))
    whole = keep is None or (known.kept is not None and torch.equal(keep, known.kept))
    with ExitStack() as stack:
        target = check.folder(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out, "out")
        if target.resolve() == known.folder.resolve():
            raise ValueError(f"out must be another folder than the run's, got {out}")
        options: dict[str, Any] = {"workers": workers, "device": device or known.config["device"], "progress": progress}
        if whole and not (target / "config.json").exists():
            _begin(known, target, seed, options["device"])
        try:
            if clients is None:
                _of_task(known, target, keep, whole, seed, data, options)
            else:
                _of_images(known, target, seed, {"test": test, "server_data": server_data, **options}, clients)
        except OtherSettings as error:
            raise NotRepeatable(f"the run in {folder} had other data or options: {error}") from error
        again = load(target, method=method, names=names, trust=trust)
        for name in ("task", "candidate", "settings", "kept"):  # read now what a temporary folder holds
            with suppress(NotRepeatable):
                getattr(again, name)
    complete = whole and seed == known.seed and len(again.rows) == len(known.rows)
    if complete and again.hash != known.hash and "privacy" not in known.config:
        ran, repeated = (", ".join(f"{n} {v}" for n, v in one.config["versions"].items()) for one in (known, again))
        warn(
            f"the repetition of {folder} has the hash {again.hash}, the run {known.hash}; the run used {ran} on "
            f"{known.config['device']}, the repetition {repeated} on {again.config['device']}"
        )
    return again


def _of_task(
    known: SavedRun, out: Path, keep: Tensor | None, whole: bool, seed: int, data: Any, options: dict[str, Any]
) -> None:
    """Repeat a run of a study with the records `keep`, which are the `whole` run's or fewer."""
    task, notes, split = known.task, known.config["notes"], data
    if not isinstance(data, Split):
        task = task if data is None else replace(task, data=data)
        try:
            split = task.load()
        except (OSError, ValueError) as error:
            raise NotRepeatable(
                f"the images of the run in {known.folder} cannot be read: {error}. If they have moved, pass data=, "
                "such as partial(load_folder, 'new/place', size=32)"
            ) from error
    if "clients" in known.config and not whole:
        _require_same_images(known, task, split)
    spec = RunSpec(known.folder.name, "", task.name, notes["method"], seed, known.settings, bool(notes["validation"]))
    if seed != known.partition_seed:
        options["partition_seed"] = known.partition_seed
    options |= {"keep": keep, "commit": git_commit(), "shared": known.folder / "arguments"}
    PreparedRun(spec, task, split, known.candidate, known.method).execute(out, **options)


def _of_images(known: SavedRun, out: Path, seed: int, options: dict[str, Any], clients: Any) -> None:
    """Repeat a run that a call of `simulate` made outside a study, on the images of these clients."""
    config, ledger = known.config, None
    if (privacy := config.get("privacy")) is not None:
        facts = {"delta": privacy["delta"], "budget": config["budget"], "disjoint": privacy["disjoint"]}
        ledger = Ledger(out / "ledger.jsonl", **facts)
    same = {name: config[name] for name in ("participation", "min_replies", "evaluate")}
    simulate(
        known.method, clients, rounds=max(config["rounds"], len(known.rows)), task=known.labels, seed=seed,
        ledger=ledger, secret=privacy and privacy["secret"], server_threads=config["threads"]["server"], resume=True,
        out=RunFolder(out, notes=config.get("notes")), **same, **options,
    )  # fmt: skip


def _begin(known: SavedRun, out: Path, seed: int, device: str) -> None:
    """Write the run's options to the folder of its repetition, so that `simulate` refuses other options."""
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
    """Check that the task's images are still those of the saved run."""
    validation = bool(known.config["notes"]["validation"])
    allocation = task.assign(split, known.partition_seed, validation=validation, keep=known.kept)
    key = Store(known.folder).key() if "privacy" in known.config else b""
    found = data_fingerprint(ClientRegistry(client_data(allocation), split.train.num_classes, False), key)
    if found != known.config["data"]:
        raise NotRepeatable(
            f"the images that {task.name} reads now are not those of the run in {known.folder}: data was "
            f"{known.config['data']}, now {found}. If they have moved, pass data=, a function that reads them"
        )
