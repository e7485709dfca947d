"""A run read back from its folder: its history, its models, its sets, and the method and the task that made them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distillkit.data import Split
from distillkit.serialization import ConfigError, from_config
from distillkit.sets import LabeledImages
from distillkit.study.candidate import Candidate
from distillkit.study.task import Allocation, Task
from fl._components import identity
from fl.engine._run_record import read_config
from fl.engine.store import CheckpointError, Store
from fl.message import Message
from fl.method import Method
from fl.networks import Factory
from fl.participants import Server
from fl.study._outcome_hash import hash_of
from fl.task import Classification, LabelTask, MultiLabel

__all__ = ["Loaded", "NotRepeatable", "load"]


class NotRepeatable(ValueError):
    """A run's folder does not say what it would take to do this; the message names what is missing and the remedy."""


@dataclass(frozen=True, repr=False)
class Loaded:
    """A run as its folder tells it, which `load` gives; `fl.study.repeat` runs it again.

    Attributes:
        folder: of the run.
        config: its `config.json`.
        rows: of its history, one a round that is completed.
        line: its `summary.json`, None for a run that no study finished.
        method: what ran, built again; None where only a `factory` was given.
        state: the server's after the last round, by the entries' keys.
        models: the global models by name ("" where there is one), in eval mode, as they were after the last round.
        sets: the sets of images among the server's state, by the entries' keys (FedDM's synthetic images, FedLGD's
            anchors); of a way that makes a set it is "set".
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
        """What everything random followed from."""
        return int(self.config["seed"])

    @property
    def partition_seed(self) -> int:
        """What the partition was drawn from: the seed, but for a repetition under another one."""
        return int((self.config.get("notes") or {}).get("partition_seed", self.seed))

    @property
    def labels(self) -> LabelTask:
        """What the labels mean.

        Raises:
            NotRepeatable: nobody says how to build it.
        """
        return _labels(self.config, self._build)

    @property
    def hash(self) -> str | None:
        """What the run came to (see `outcome_hash`); a way that makes a set says it in its line."""
        return hash_of(self.rows, self.state) if self.rows else (self.line or {}).get("hash")

    @cached_property
    def task(self) -> Task:
        """What it ran on, built again.

        Raises:
            NotRepeatable: it was no run of a study, so nothing says where its images came from.
        """
        task: Task = self._noted("task")
        return task

    @cached_property
    def candidate(self) -> Candidate:
        """The study's way that ran it, without how it was made and tried.

        Raises:
            NotRepeatable: see `task`.
        """
        candidate: Candidate = self._noted("way")
        return candidate

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the way made the method with.

        Raises:
            NotRepeatable: see `task`.
        """
        return dict(self._noted("settings"))

    @cached_property
    def kept(self) -> torch.Tensor | None:
        """Numbers of the training records that it was run on, if not on all."""
        keep: torch.Tensor | None = self._noted("keep") if "keep" in (self.config.get("notes") or {}) else None
        return keep

    def assign(self, split: Split | None = None, keep: torch.Tensor | None = None) -> Allocation:
        """Who held which images in this run.

        Args:
            split: the task's images if they are read already; default: `task.load()`.
            keep: numbers of training records: what clients have of theirs; default: what they had in this run.
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
                f"the run in {self.folder} does not say its {name}, as it was no run of a study; give its images "
                "yourself: repeat(folder, clients=..., test=...)"
            )
        try:
            if name == "settings":
                return {option: self._build(said) for option, said in notes[name].items()}
            return self._build(notes[name])
        except ConfigError as error:
            raise NotRepeatable(f"the {name} of the run in {self.folder} cannot be built again: {error}") from error

    def __repr__(self) -> str:
        ran = type(self.method).__name__ if self.method is not None else "a method that is not known"
        return f"Loaded({len(self.rows)} rounds of {ran} in {self.folder})"


def load(
    folder: str | Path,
    *,
    method: Method | None = None,
    factory: Factory | Mapping[str, Factory] | None = None,
    names: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
) -> Loaded:
    """Read a run back: its history, its models with their weights, its sets, and what made them.

    Nothing is trained and no image is read; the folder is left as it is.

    Args:
        folder: of the run, as `simulate(..., out=folder)` or a study wrote it.
        method: the method as it was, where `config.json` cannot say it (its network is a lambda, say). It is compared.
        factory: what makes the networks, for a folder that says nothing of its method (those of earlier versions): its
            history and models are read, and `method` is None.
        names, trust: your functions and classes that the run uses; see `distillkit.serialization.from_config`.

    Raises:
        fl.CheckpointError: no run, a damaged file, or one that a later version wrote; it is named.
        NotRepeatable: the folder does not say how its method is built, and neither `method` nor `factory` is given; or
            what is given is another one.
    """
    folder = Path(folder)
    config, store = read_config(folder), Store(folder)
    build = partial(from_config, store=folder / "arguments", names=names, trust=trust)
    path = folder / "summary.json"
    try:
        line = json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    built = method if method is not None else _method(config, folder, build, factory is not None)
    if "clients" not in config:  # a way that makes a set
        sets = {p.stem: LabeledImages.load(p) for p in [folder / "set.safetensors"] if p.exists()}
        return Loaded(folder, config, [], line, built, Message(), {}, sets, build)
    if built is not None and identity(built) != config["method"] and " at 0x" not in config["method"]:
        came = "got" if method is not None else "but this version builds from its recipe"
        raise NotRepeatable(f"method must be that of the run in {folder}, {config['method']}, {came} {identity(built)}")
    manifest = store.manifest()
    rows = store.rows()
    state = store.state() if manifest else Message()
    sets = {key: value for key, value in state.items() if isinstance(value, LabeledImages)}
    models: Mapping[str, nn.Module] = {}
    if rows and built is not None and "images" in config:
        models = _models(built, config, state, len(rows), build)
    elif rows and factory is not None:
        models = _by_factory(factory, config, folder)
    elif rows:
        raise NotRepeatable(
            f"{folder / 'config.json'} is of the first format and does not say what its images are, so that its models "
            "cannot be built from the method; give factory=, what makes their network"
        )
    return Loaded(folder, config, rows, line, built, state, models, sets, build)


def _method(config: Mapping[str, Any], folder: Path, build: Callable[[Any], Any], optional: bool) -> Any:
    why = config.get("recipe_missing", "it is of the first format")
    if config.get("recipe") is not None:
        try:
            return build(config["recipe"])
        except ConfigError as error:
            why = str(error)
    if optional:
        return None
    raise NotRepeatable(
        f"{folder / 'config.json'} does not say how to build the run's method: {why}. Give method=, the method as it "
        "was, or for the history and the models alone factory=, what makes their network"
    )


def _models(
    method: Method, config: Mapping[str, Any], state: Message, rounds: int, build: Callable[[Any], Any]
) -> dict[str, nn.Module]:
    images = build(config["images"])
    server = Server(
        _labels(config, build), tuple(images["shape"]), images["normalization"], config["clients"], config["seed"],
        state=state, round=rounds, dtype=images["dtype"],
    )  # fmt: skip
    return {name: p.network for name, p in method.predictors(server).items()}


def _labels(config: Mapping[str, Any], build: Callable[[Any], Any]) -> LabelTask:
    if config.get("labels") is not None:
        task: LabelTask = build(config["labels"])
        return task
    kinds: dict[str, Callable[[int], LabelTask]] = {"Classification": Classification, "MultiLabel": MultiLabel}
    found = re.fullmatch(r"(\w+)\(num_classes=(\d+)\)", config["task"])
    if not found or found[1] not in kinds:
        raise NotRepeatable(f"config.json does not say how to build what the labels mean, {config['task']}")
    return kinds[found[1]](int(found[2]))


def _by_factory(factory: Factory | Mapping[str, Factory], config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    classes, models = _labels(config, from_config).num_classes, {}
    for path in sorted((folder / "checkpoint").glob("model*.safetensors")):
        name = path.stem.removeprefix("model").removeprefix("-")
        make = factory[name] if isinstance(factory, Mapping) else factory
        with torch.random.fork_rng(devices=[]):
            network = make(classes)
        try:
            network.load_state_dict(_plain(path))
        except RuntimeError as error:
            raise NotRepeatable(
                f"factory must make the network of {path}, but its weights do not fit: {error}"
            ) from error
        models[name] = network.eval().requires_grad_(False)
    return models


def _plain(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
