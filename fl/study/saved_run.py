"""Reading of a saved run: its history, models and sets, and the method and task that produced them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from distillkit._utils import check
from distillkit.data import Split
from distillkit.fingerprint import tensor_fingerprint
from distillkit.serialization import ConfigError, from_config
from distillkit.sets import LabeledImages
from distillkit.study._records import read_json
from distillkit.study.candidate import Candidate
from distillkit.study.history import RecordError
from distillkit.study.task import Allocation, Task
from fl._codec import digest
from fl._components import options_by_name
from fl.engine._run_record import read_config
from fl.engine.run import Run
from fl.engine.store import CheckpointError, Store
from fl.message import Message
from fl.method import Method
from fl.participants import Server
from fl.task import LabelTask


class NotRepeatable(ValueError):
    """Error: a run's folder lacks information that is needed to load or repeat the run.

    The message names the missing part, and the argument to pass instead.
    """


@dataclass(frozen=True, repr=False)
class SavedRun:
    """A run that `load` has read from its folder. `fl.study.repeat` runs it again.

    Attributes:
        folder: folder of the run.
        config: contents of the run's `config.json`.
        rows: rows of the run's history, one per completed round.
        line: contents of the run's `summary.json`; None for an unfinished run or a run outside a study.
        method: the method, rebuilt from the config.
        state: the server's state after the last round: its values by key.
        models: global models after the last round by name ("" for a single one), in eval mode.
        sets: the sets of images in the server's state, by key, such as FedDM's synthetic images or FedLGD's anchors.
            For a run of a candidate that makes a set without federated rounds, the only key is "set".
    """

    folder: Path
    config: Mapping[str, Any]
    rows: list[dict[str, Any]]
    line: Mapping[str, Any] | None
    method: Any
    state: Message
    models: Mapping[str, nn.Module]
    sets: Mapping[str, LabeledImages]
    _build: Callable[[Any], Any]

    @property
    def seed(self) -> int:
        """Seed of the run's initial weights, batches and other random draws."""
        return int(self.config["seed"])

    @property
    def partition_seed(self) -> int:
        """Seed with which the images were partitioned among the clients.

        It equals `seed`, except if this run repeats an earlier run with a new seed and the old partition.
        """
        return int((self.config.get("notes") or {}).get("partition_seed", self.seed))

    @property
    def labels(self) -> LabelTask:
        """Label task of the run, such as `Classification`, rebuilt from the run's config.

        Raises:
            NotRepeatable: the config does not describe the label task.
        """
        return _labels(self.config, self._build)

    @property
    def hash(self) -> str | None:
        """Hash of the run's results, with which repetitions are compared; see `outcome_hash`.

        If the run has no federated rounds, this is the hash in the run's `summary.json`.
        """
        return hash_of(self.rows, self.state) if self.rows else (self.line or {}).get("hash")

    @cached_property
    def task(self) -> Task:
        """Study task of the run, which loads and partitions the images. It is rebuilt from the run's config.

        Raises:
            NotRepeatable: the run was not part of a study, so its images are unknown.
        """
        return cast(Task, self._noted("task"))

    @cached_property
    def candidate(self) -> Candidate:
        """The study's candidate that produced the run, with its options except `make`, `settings` and `search`.

        Raises:
            NotRepeatable: the run was not part of a study.
        """
        return cast(Candidate, self._noted("candidate"))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run's candidate (method in the study), by name. The method object was built with them.

        Raises:
            NotRepeatable: the run was not part of a study.
        """
        return dict(self._noted("settings"))

    @cached_property
    def kept(self) -> Tensor | None:
        """Indices of the task's training records that this run used; None if it used all records.

        Only runs made by `repeat(keep=...)` use a part of the records.
        """
        return cast(Tensor, self._noted("keep")) if "keep" in (self.config.get("notes") or {}) else None

    def assign(self, split: Split | None = None, keep: Tensor | None = None) -> Allocation:
        """Return the allocation of the task's images to the clients, as it was in this run.

        Args:
            split: the task's images, if you have loaded them already; default: `task.load()`.
            keep: indices of the training records to use; default: the records that this run used.
        """
        return self.task.assign(
            self.task.load() if split is None else split,
            self.partition_seed,
            validation=bool(self.config["notes"]["validation"]),
            keep=self.kept if keep is None else keep,
        )

    def _noted(self, name: str) -> Any:
        notes = self.config.get("notes") or {}
        if name not in notes:
            raise NotRepeatable(
                f"the run in {self.folder} does not record its {name}, because it was not part of a study; pass "
                "its images: repeat(folder, clients=..., test=...)"
            )
        try:
            if name == "settings":
                return {option: self._build(config) for option, config in notes[name].items()}
            return self._build(notes[name])
        except ConfigError as error:
            raise NotRepeatable(f"the {name} of the run in {self.folder} cannot be rebuilt: {error}") from error

    def __repr__(self) -> str:
        ran = type(self.method).__name__ if self.method is not None else "an unknown method"
        return f"SavedRun({len(self.rows)} rounds of {ran} in {self.folder})"


def load(
    folder: str | Path,
    *,
    method: Method | None = None,
    names: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
) -> SavedRun:
    """Read a saved run from its folder: its history, models, sets, and the method.

    This function does not train, does not read a dataset, and does not change the folder.

    Args:
        folder: folder of the run, written by `simulate(..., out=folder)` or a study.
        method: the method, if `config.json` cannot describe it (for example because its network factory is a lambda).
            Its description must be equal to the one in `config.json`.
        names: your functions and classes that the run uses, by "module:name": `{"models:small": small}`.
        trust: names of your modules whose functions and classes the run uses, for example `["models"]`; see
            `distillkit.serialization.from_config`.

    Raises:
        fl.CheckpointError: there is no run in the folder, or a file is damaged or from another version.
        NotRepeatable: the method is neither recorded nor passed, or the passed method differs from the recorded one.
    """
    folder = check.path(folder, "folder")
    config, store = read_config(folder), Store(folder)
    build = partial(from_config, store=folder / "arguments", names=names, trust=trust)
    path = folder / "summary.json"
    try:
        line = read_json(path) if path.exists() else None
    except RecordError as error:
        raise CheckpointError(str(error)) from error
    built = _method(config, folder, build) if method is None else method
    if "clients" not in config:  # a candidate that makes a set
        sets = {p.stem: LabeledImages.load(p) for p in [folder / "set.safetensors"] if p.exists()}
        return SavedRun(folder, config, [], line, built, Message(), {}, sets, build)
    found, recorded = options_by_name(built), config["method"]
    if found != recorded and " at 0x" not in json.dumps(recorded):
        origin = "got" if method is not None else "but this version builds from its recipe"
        raise NotRepeatable(f"method must be that of the run in {folder}, {recorded}, {origin} {found}")
    rows, state = store.rows(), store.state() if store.manifest() else Message()
    sets = {key: value for key, value in state.items() if isinstance(value, LabeledImages)}
    models: dict[str, nn.Module] = {}
    if rows:
        images = build(config["images"])
        server = Server(
            _labels(config, build), tuple(images["shape"]), images["normalization"], config["clients"], config["seed"],
            state=state, round=len(rows), dtype=images["dtype"],
        )  # fmt: skip
        models = {name: p.network for name, p in built.predictors(server).items()}
    return SavedRun(folder, config, rows, line, built, state, models, sets, build)


def _method(config: Mapping[str, Any], folder: Path, build: Callable[[Any], Any]) -> Any:
    why = config.get("recipe_missing")
    try:
        if config.get("recipe") is not None:
            return build(config["recipe"])
    except ConfigError as error:
        why = str(error)
    raise NotRepeatable(f"{folder / 'config.json'} does not say how to build the run's method: {why}. Pass method=")


def _labels(config: Mapping[str, Any], build: Callable[[Any], Any]) -> LabelTask:
    if config["labels"] is None:
        raise NotRepeatable(f"config.json does not say how to build the label task {config['task']}")
    return cast(LabelTask, build(config["labels"]))


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
    """Return the same hash as `outcome_hash`, from the `rows` of a history and the server's `state` after the last."""
    history = json.loads(json.dumps([_compared(row) for row in rows]))  # all names are strings, as in a file
    digests = [digest(key, value) for key, value in sorted(state.items())]
    return tensor_fingerprint([*digests, json.dumps(history, sort_keys=True)])


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in row.items() if "seconds" not in k and k != "bytes_resent"}
    if isinstance(kept.get("privacy"), Mapping):  # its remarks say whether the run created its ledger
        kept["privacy"] = {k: v for k, v in kept["privacy"].items() if k != "remarks"}
    return kept
