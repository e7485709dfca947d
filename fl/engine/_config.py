"""Options that every run has, and of its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit._utils.options import Options, check_options
from distillkit.privacy import Ledger
from distillkit.sets import Images, StoredImages
from fl.task import LabelTask


@dataclass(frozen=True)
class RunFolder:
    """Folder for a run's files, with options. Pass it as the argument `out` of `fl.simulate` in place of a path.

    Args:
        path: folder for config.json, history.jsonl and checkpoint/.
        transcript: whether to save every message that the server sends and accepts, under transcript/. The query that
            some methods send to clients before round 1 (`Method.answer`) is included. Evaluation results are not saved.
        notes: JSON values that are written to config.json under "notes", such as the source of the data. You may
            change them when you resume a run.
        deadline: time, as from `time.time()`, after which the run ends with `fl.participants.Interrupted`. The run
            first finishes and saves the current round or, if a client is condensing its data, the current step of the
            condensation. Continue with `resume=True`.
        cache: folder of condensed sets that several runs share. If data, networks, seed and options are equal, a client
            loads its first set from there instead of condensing it (see `fl.addons.Condensed`). Private runs do not use
            the cache.
    """

    path: str | Path
    transcript: bool = False
    notes: Options | None = None
    deadline: float | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            raise TypeError(f"out must be a folder's path or a RunFolder(path, ...), got {type(self.path).__name__}")
        if self.cache is not None:
            check.folder(self.cache, "cache")
        check_options(self)
        if self.notes is not None:
            try:
                json.dumps(dict(self.notes))
            except (TypeError, ValueError) as error:
                raise TypeError(f"notes must be a mapping of JSON values: {error}") from error
        if self.deadline is not None:
            check.real_number(self.deadline, "deadline")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that every run has, whether its clients run on this machine or on other machines.

    `fl.simulate` describes the fields. They are recorded in config.json.
    """

    rounds: int
    test: Images | StoredImages | None = None
    task: LabelTask | None = None
    server_data: Mapping[str, Images] | None = None
    participation: float | int = 1.0
    min_replies: int = 1
    evaluate: Literal["drawn", "all", "none"] | Sequence[int] | None = None
    seed: int = 0
    ledger: Ledger | None = None
    secret: int | None = None
    server_threads: int = 1
    device: torch.device | str = "cpu"
    out: str | Path | RunFolder | None = None
    resume: bool = False
    on_round: Callable[[dict[str, Any]], None] | None = None

    @property
    def folder(self) -> RunFolder | None:
        """The option `out` as a `RunFolder`; None if the run writes no files."""
        return self.out if isinstance(self.out, RunFolder | None) else RunFolder(self.out)
