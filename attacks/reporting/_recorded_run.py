"""Reader of a finished run's files, which does not need the package `fl`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.transcript import NoTranscript, TranscriptMessage, read_transcript
from distillkit._utils import check
from distillkit._utils.provenance import RUN_FORMAT
from distillkit.sets import LabeledImages

__all__ = ["DamagedRun", "NoRun", "RecordedRun", "open_run"]


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
        ledger: lines of the privacy ledger; None if the run has no ledger.
        published_set: the distilled set of the run, from `set.safetensors`; None if there is none.
        models: paths of the files of the last global models, by model name ("" if there is a single model).
        transcript: whether the run's messages were saved.
    """

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    ledger: list[dict[str, Any]] | None
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
    def settings(self) -> dict[str, Any]:
        """Options of the federated method by name, from `config.json`; empty if they are not recorded."""
        recipe = self.config.get("recipe")
        return dict(recipe.get("with") or {}) if isinstance(recipe, dict) else {}

    @property
    def client_optimizer(self) -> dict[str, Any]:
        """Options of the clients' optimizer by name: the fields of `fl.ClientOptimizer` that the run recorded."""
        recorded = self.settings.get("optimizer")
        return {"name": "sgd", **(recorded.get("with") or {})} if isinstance(recorded, dict) else {"name": recorded}

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of the run's images; None if it is not recorded."""
        if self.published_set is not None:
            return self.published_set.shape
        shape = self._images().get("shape")
        return tuple(shape["tuple"]) if isinstance(shape, dict) and "tuple" in shape else None

    @property
    def normalization(self) -> list[list[float]] | None:
        """Means and standard deviations by channel with which the run's images were normalized.

        None if they are not recorded, or if the run also whitened the images (ZCA).
        """
        recorded = self._images().get("normalization")
        parts = recorded.get("with") if isinstance(recorded, dict) else None
        if not isinstance(parts, dict) or parts.get("zca") is not None:
            return None
        return [[round(v, 6) for v in parts[name]["tuple"]] for name in ("mean", "std")]

    @property
    def sends_sets(self) -> bool:
        """True if clients sent sets of images, according to the byte counts in the history."""
        return any(key.endswith(":labels") for row in self.history for key in row.get("up", {}))

    def _images(self) -> dict[str, Any]:
        images = self.config.get("images")
        return dict(images.get("dict") or []) if isinstance(images, dict) else {}

    @property
    def starts_from_real(self) -> bool:
        """True if sent or published images were initialized from real images.

        The answer comes from the run's config, and from the metadata of the published set, if there is one.
        """
        real = re.search(r"\binit='real'|\bReal\(", str(self.config.get("method", "")))
        info = self.published_set.info if self.published_set is not None else {}
        return real is not None or info.get("init") == "real"

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
                raise DamagedRun(
                    f"{self.path / 'transcript' / str(row['round'])} lacks the messages of clients {lost}, which the "
                    "server received according to history.jsonl: restore the folder from a backup, or run again"
                )


def open_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Read a run from its folder, except for its messages, which `RecordedRun.messages` reads later.

    Args:
        folder: path of a folder that `fl.simulate(..., out=folder)` or a run of a study has written. The run of a study
            may have executed a federated method or made a distilled set.

    Raises:
        TypeError: `folder` is not a path.
        NoRun: the folder does not contain a run.
        DamagedRun: a file cannot be read.
    """
    path = Path(check.instance(folder, str | os.PathLike, "folder", "the path of a run's folder"))
    if not (path / "config.json").is_file():
        raise NoRun(f"{path} holds no run (no config.json): give the out= folder of simulate, or of one run of a study")
    (config,) = _objects(path / "config.json", lines=False)
    if config.get("format") != RUN_FORMAT:
        raise DamagedRun(
            f"{path / 'config.json'} has the format {config.get('format')!r}, but this version supports "
            f"{RUN_FORMAT!r}: use the version of distillkit that wrote it"
        )
    history, manifest = _lines(path / "history.jsonl") or [], path / "checkpoint" / "manifest.json"
    if manifest.is_file():
        (facts,) = _objects(manifest, lines=False)
        rounds = int(facts.get("round", 0)) - ("open" in facts)
        if len(history) < rounds:
            raise DamagedRun(
                f"{path / 'history.jsonl'} holds {len(history)} rounds, but the checkpoint is of round {rounds}: "
                "restore it from a backup, or run again"
            )
    models = sorted((path / "checkpoint").glob("model*.safetensors"))
    return RecordedRun(
        path,
        config,
        history,
        _lines(path / "ledger.jsonl"),
        _published_set(path / "set.safetensors"),
        {model.stem.removeprefix("model").removeprefix("-"): model for model in models},
        _has_transcript(path),
    )


def _has_transcript(path: Path) -> bool:
    try:
        read_transcript(path)
    except NoTranscript:
        return False
    return True


def _published_set(path: Path) -> LabeledImages | None:
    if not path.exists():
        return None
    try:
        return LabeledImages.load(path)
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): restore it from a backup, or make the set again") from error


def _lines(path: Path) -> list[dict[str, Any]] | None:
    return _objects(path, lines=True) if path.exists() else None


def _objects(path: Path, *, lines: bool) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, or the single object of a JSON file.

    A line that was only partly written is skipped if the line after it is `{"torn": true}`.

    Args:
        path: path of the file.
        lines: whether the file has one object per line.

    Raises:
        DamagedRun: the file cannot be read.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if lines else [path.read_text(encoding="utf-8")]
        torn = {i for i, text in enumerate(texts[1:]) if text.replace(" ", "") == '{"torn":true}'}
        found = [json.loads(text) for i, text in enumerate(texts) if i not in torn]
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): restore it from a backup, or run again") from error
    if wrong := [one for one in found if not isinstance(one, dict)]:
        kind = type(wrong[0]).__name__
        raise DamagedRun(f"{path} holds {kind}, expected an object: restore it from a backup, or run again")
    return found
