"""Reader of a finished run's files, which does not need the package `fl`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.transcript import NoTranscript, TranscriptMessage, read_transcript
from distillkit._utils import check
from distillkit._utils.files import parse_json, read_bytes
from distillkit._utils.plain_values import plain_values
from distillkit._utils.provenance import RUN_FORMAT
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

_RESTORE = "restore it from a backup, or run again"


class NoRun(FileNotFoundError):
    """Error: the folder does not contain a run."""


class DamagedRun(ValueError):
    """Error: a file in a run's folder cannot be read, or contradicts another file."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A finished run, read from its folder by `open_run`.

    Attributes:
        path: path of the folder.
        config: contents of `config.json`, with the options of the run.
        history: rows of the history, one dictionary per round.
        published_set: the distilled set of the run, from `set.safetensors`; None if there is none.
        models: paths of the files of the last global models, by model name ("" if there is a single model).
        transcript: whether the run's messages were saved.
    """

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    published_set: LabeledImages | None
    models: dict[str, Path]
    transcript: bool

    @property
    def transcript_hint(self) -> str:
        """Advice for the user: how to repeat the run with its messages saved in a transcript."""
        notes = self.config.get("notes")
        if isinstance(notes, dict) and "candidate" in notes:
            return "run the study again in another folder, with Federated(..., transcript=True)"
        return "run again with simulate(..., out=RunFolder(path, transcript=True))"

    @property
    def plain_fedavg(self) -> dict[str, Any] | None:
        """Options of the run's FedAvg by name, with those of the optimizer and of a single phase of training.

        None if the method is not FedAvg, or has add-ons or filters; if the labels are not classes; and if the run did
        not record its options.
        """
        method, task = (v if isinstance(v, dict) else {} for v in map(self.config.get, ("method", "labels")))
        if method.get("object") != "fl:FedAvg" or method.get("args") or task.get("object") != "fl:Classification":
            return None
        options = {"optimizer": "sgd", "phases": [], **method["with"]}
        optimizer, phases = options["optimizer"], options["phases"]
        if isinstance(optimizer, dict):
            options |= {**optimizer["with"], "optimizer": optimizer["with"]["name"]}
        if len(phases) == 1 and phases[0]["with"]["train"] == "*":
            options |= options.pop("phases")[0]["with"]
        return options

    def options(self, prefix: str) -> list[float]:
        """Return all numbers among the options of the method and its parts whose names start with `prefix`."""
        named = [item for _, options in _described(self.config.get("method")) for item in options.items()]
        return [float(v) for name, v in named if name.startswith(prefix) and type(v) in (int, float)]

    @property
    def starts_from_real(self) -> bool:
        """True if sent or published images were initialized from real images, by the config or the published set."""
        described = _described(self.config.get("method"))
        info = self.published_set.info if self.published_set is not None else {}
        return info.get("init") == "real" or any(kind == "fl:Real" or o.get("init") == "real" for kind, o in described)

    def _facts(self, name: str) -> dict[str, Any]:
        found = plain_values(self.config.get(name))
        return found if isinstance(found, dict) else {}

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if it is not recorded."""
        return self._facts("labels").get("num_classes")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of the run's images; None if it is not recorded."""
        shape = self._facts("images").get("shape")
        return self.published_set.shape if self.published_set is not None else tuple(shape) if shape else None

    @property
    def normalization(self) -> Normalization | None:
        """Normalization of the run's images; None if it is not recorded, or if the run also whitened them (ZCA)."""
        found = self._facts("images").get("normalization")
        return Normalization(found["mean"], found["std"]) if found and found.get("zca") is None else None

    @property
    def sends_sets(self) -> bool:
        """True if clients sent sets of images, according to the byte counts in the history."""
        return any(key.endswith(":labels") for row in self.history for key in row.get("up", {}))

    def messages(self) -> Iterator[TranscriptMessage]:
        """Yield the messages of the transcript. If the run has no transcript, yield nothing.

        Raises:
            attacks.transcript.DamagedTranscript: a message is damaged.
            DamagedRun: the transcript lacks a client's message, although the run's history (`history.jsonl`) counts the
                bytes of this message.
        """
        if not self.transcript:
            return
        seen: set[tuple[int, int]] = set()
        rounds: set[int] = set()
        for message in read_transcript(self.path):
            rounds.add(message.round)
            if message.direction == "up":
                seen.add((message.round, message.client))
            yield message
        for row in self.history:
            came = {int(c) for c, (up, _) in (row.get("bytes_by_client") or {}).items() if up}
            lost = sorted(c for c in came if (row["round"], c) not in seen) if row["round"] in rounds else []
            if lost:
                lacks = f"lacks the messages of clients {lost}, which the server received according to history.jsonl"
                raise DamagedRun(f"{self.path / 'transcript' / str(row['round'])} {lacks}: {_RESTORE}")


def _described(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the class and the options by name of each object in a record of options."""
    if isinstance(value, dict):
        if isinstance(value.get("object"), str) and isinstance(value.get("with"), dict):
            yield value["object"], value["with"]
        value = [*value.values()]
    for one in value if isinstance(value, list) else ():
        yield from _described(one)


def open_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Read a run from its folder, except for its messages, which `RecordedRun.messages` reads later.

    Args:
        folder: path of a folder that `fl.simulate(..., out=folder)` or a run of a study has written. The run of a study
            may have executed a federated method or made a distilled set.

    Raises:
        TypeError, ValueError: `folder` is not a path.
        NotADirectoryError: `folder` is a file.
        NoRun: the folder does not contain a run.
        DamagedRun: a file cannot be read.
    """
    path = check.folder(folder, "folder")
    if not (path / "config.json").is_file():
        raise NoRun(f"{path} holds no run (no config.json): give the out= folder of simulate, or of one run of a study")
    [config] = _objects(path / "config.json")
    if (found := config.get("format")) != RUN_FORMAT:
        wanted = f"but this version supports {RUN_FORMAT!r}: use the version of distillkit that wrote it"
        raise DamagedRun(f"{path / 'config.json'} has the format {found!r}, {wanted}")
    history, [checkpoint] = _objects(path / "history.jsonl"), _objects(path / "checkpoint" / "manifest.json") or [{}]
    rounds = int(checkpoint.get("round", 0))
    if len(history) < rounds:
        told = f"holds {len(history)} rounds, but the checkpoint is of round {rounds}"
        raise DamagedRun(f"{path / 'history.jsonl'} {told}: {_RESTORE}")
    models = sorted((path / "checkpoint").glob("model*.safetensors"))
    named = {model.stem.removeprefix("model").removeprefix("-"): model for model in models}
    try:
        transcript = bool(read_transcript(path))
    except NoTranscript:
        transcript = False
    return RecordedRun(path, config, history, _published_set(path / "set.safetensors"), named, transcript)


def _published_set(path: Path) -> LabeledImages | None:
    if not path.exists():
        return None
    try:
        return LabeledImages.load(path)
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): restore it from a backup, or make the set again") from error


def _objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, or the single object of a JSON file; none if there is no file."""
    if not path.exists():
        return []
    data = read_bytes(path, DamagedRun)
    parts = data.splitlines() if path.suffix == ".jsonl" else [data]
    found = [parse_json(part, path, DamagedRun) for part in parts]
    if wrong := [one for one in found if not isinstance(one, dict)]:
        raise DamagedRun(f"{path} holds {type(wrong[0]).__name__}, expected an object: {_RESTORE}")
    return found
