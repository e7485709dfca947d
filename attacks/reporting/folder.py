"""What a report knows of a run: its folder's files, read without the federated layer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.transcript import NoTranscript, Seen, read
from distillkit._utils.provenance import RUN_FORMAT
from distillkit.sets import LabeledImages

__all__ = ["DamagedRun", "NoRun", "RunFolder", "opened"]


class NoRun(FileNotFoundError):
    """The folder holds no run; the message says what makes one."""


class DamagedRun(ValueError):
    """A file of the run's folder cannot be read, or contradicts another; it is named."""


@dataclass(frozen=True, eq=False)
class RunFolder:
    """A finished run, as its folder tells of it. Made by `opened`.

    Attributes:
        path: the folder.
        config: what it was asked to do.
        rows: its history, a line a round.
        ledger: the lines of what was charged; None if the folder has no ledger.
        published: the set that it made, `set.safetensors`; None without one.
        models: the files of its last global models, by name ("" where there is one).
        transcript: whether messages were kept.
    """

    path: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    ledger: list[dict[str, Any]] | None
    published: LabeledImages | None
    models: dict[str, Path]
    transcript: bool

    @property
    def kept_by(self) -> str:
        """What to do for a transcript where there is none: how the run is made again with its messages kept."""
        notes = self.config.get("notes")
        if isinstance(notes, dict) and "way" in notes:
            return "run the study again in another folder, its way with Federated(..., transcript=True)"
        return "run again with simulate(..., transcript=True)"

    @property
    def settings(self) -> dict[str, Any]:
        """The method's own options, as far as its recipe says them."""
        recipe = self.config.get("recipe")
        return dict(recipe.get("with") or {}) if isinstance(recipe, dict) else {}

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Channels, height and width of the run's images; None where the folder does not say."""
        if self.published is not None:
            return self.published.shape
        shape = self._images().get("shape")
        return tuple(shape["tuple"]) if isinstance(shape, dict) and "tuple" in shape else None

    @property
    def space(self) -> list[list[float]] | None:
        """Mean and standard deviation that the run's images were normalized by; None where the folder does not say."""
        said = self._images().get("normalization")
        parts = said.get("with") if isinstance(said, dict) else None
        if not isinstance(parts, dict) or parts.get("zca") is not None:
            return None
        return [[round(v, 6) for v in parts[name]["tuple"]] for name in ("mean", "std")]

    @property
    def sent_sets(self) -> bool:
        """Whether clients sent sets of images, after the history's count of bytes."""
        return any(key.endswith(":labels") for row in self.rows for key in row.get("up", {}))

    def _images(self) -> dict[str, Any]:
        images = self.config.get("images")
        return dict(images.get("dict") or []) if isinstance(images, dict) else {}

    @property
    def from_real(self) -> bool:
        """Whether the sets that travel, or are published, start from real images, as far as the folder says."""
        said = re.search(r"\binit='real'|\bReal\(", str(self.config.get("method", "")))
        info = self.published.info if self.published is not None else {}
        return said is not None or info.get("init") == "real"

    def messages(self) -> Iterator[Seen]:
        """The messages that were kept, one after another.

        Raises:
            attacks.transcript.DamagedTranscript: one of them is damaged.
            DamagedRun: one is missing of which the history says that it came.
        """
        if not self.transcript:
            return
        seen: set[tuple[int, int]] = set()
        rounds: set[int] = set()
        for message in read(self.path):
            rounds.add(message.round)
            if message.direction == "up":
                seen.add((message.round, message.client))
            yield message
        for row in self.rows:
            came = {int(c) for c, (up, _) in (row.get("bytes_by_client") or {}).items() if up}
            lost = sorted(c for c in came if (row["round"], c) not in seen) if row["round"] in rounds else []
            if lost:
                raise DamagedRun(
                    f"{self.path / 'transcript' / str(row['round'])} lacks the messages of clients {lost}, which came "
                    "according to history.jsonl: take the folder from a backup, or run again"
                )


def opened(folder: str | os.PathLike[str]) -> RunFolder:
    """Read what a run's folder says of it, but for its messages.

    Args:
        folder: of a run of `fl.simulate(..., out=folder)`, of a study, or of a way that makes a set.

    Raises:
        TypeError: no path.
        NoRun: there is no run.
        DamagedRun: a file of it cannot be read.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be the path of a run's folder, got {type(folder).__name__}")
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise NoRun(
            f"{path} holds no run (no config.json): give the folder that was simulate's out=, or that of one run of a "
            "study"
        )
    config = _json(path / "config.json", _text(path / "config.json"))
    if config.get("format", "distillkit.run/1") not in ("distillkit.run/1", RUN_FORMAT):
        raise DamagedRun(
            f"{path / 'config.json'} is of the format {config['format']!r}, which this version does not know (it knows "
            f"{RUN_FORMAT!r}): use the version of distillkit that wrote it"
        )
    return RunFolder(
        path,
        config,
        _lines(path / "history.jsonl") or [],
        _lines(path / "ledger.jsonl"),
        _published(path / "set.safetensors"),
        {
            p.stem.removeprefix("model").removeprefix("-"): p
            for p in sorted((path / "checkpoint").glob("model*.safetensors"))
        },
        _kept(path),
    )


def _kept(path: Path) -> bool:
    try:
        read(path)
    except NoTranscript:
        return False
    return True


def _published(path: Path) -> LabeledImages | None:
    if not path.exists():
        return None
    try:
        return LabeledImages.load(path)
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): take it from a backup, or make the set again") from error


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): take it from a backup, or run again") from error


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DamagedRun(f"{path} cannot be read ({error}): take it from a backup, or run again") from error
    if not isinstance(found, Mapping):
        raise DamagedRun(f"{path} holds {type(found).__name__}, want an object: take it from a backup, or run again")
    return dict(found)


def _lines(path: Path) -> list[dict[str, Any]] | None:
    """The lines of a JSON-lines file; None without it. A ledger's line that was torn is marked by the line after it."""
    if not path.exists():
        return None
    lines = _text(path).splitlines()
    torn = {i for i, line in enumerate(lines[1:]) if line.replace(" ", "") == '{"torn":true}'}
    return [_json(path, line) for i, line in enumerate(lines) if i not in torn]
