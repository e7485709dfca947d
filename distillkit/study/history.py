"""What is read off a run's history, a line a round: last and best accuracy, rounds to a target, best seed mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check

__all__ = [
    "RecordError",
    "Row",
    "SeedMean",
    "accuracy_best",
    "accuracy_last",
    "best_seed_mean",
    "read_rows",
    "rounds_to",
]

Row = Mapping[str, Any]


class RecordError(ValueError):
    """A file of a run that is missing, damaged, or of another make than can be read; it is named."""


def read_rows(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """The rows of a `history.jsonl`, which are rounds 1, 2, 3 and so on.

    Args:
        path: of the file; one that does not exist has no rows.
        torn: whether the last line may be half written; it is left out then.

    Raises:
        RecordError: a line is damaged, or the rounds do not count up by one (as when two processes wrote the file).
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if torn and number == len(lines):
                break
            raise RecordError(f"{path} is damaged: line {number} cannot be read ({error})") from error
        found = row.get("round") if isinstance(row, dict) else None
        if found != number:
            raise RecordError(
                f"{path} is damaged: line {number} is of round {found}, want {number}; rounds count up by one, so this "
                "is no history of one run: begin it again in another folder"
            )
        rows.append(row)
    return rows


def accuracy_last(rows: Sequence[Row]) -> float | None:
    """The accuracy after the last round of a history's `rows`, a fraction; None without one."""
    return rows[-1]["accuracy"] if rows else None


def accuracy_best(rows: Sequence[Row]) -> float | None:
    """The best accuracy after any round of a history's `rows`, a fraction; None without one.

    It was chosen on the test set: quote it as such.
    """
    known = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return max(known, default=None)


def rounds_to(rows: Sequence[Row], target: float) -> int | None:
    """How many rounds a run needed to a target accuracy: the first whose accuracy is at least that; None if none is.

    The measure of convergence of VHL's Tables 1, 2, 4 and 5 (Tang et al., ICML 2022), "ROUND", where the target is
    the best accuracy of FedAvg, and "Nan" stands for never. Its speedup is FedAvg's rounds over a method's.

    Args:
        rows: of one history; a round without an accuracy reaches nothing.
        target: a fraction in [0, 1].

    Raises:
        ValueError: a target outside [0, 1].
    """
    check.real_number(target, "target", least=0.0, most=1.0)
    reached = (row["round"] for row in rows if row["accuracy"] is not None and row["accuracy"] >= target)
    return next(reached, None)


@dataclass(frozen=True)
class SeedMean:
    """The best round of the mean curve over seeds.

    Attributes:
        accuracy: of the mean curve in its best round, a fraction. Chosen on the test set: quote it as such.
        round: the first such round.
        deviation: the largest distance from `accuracy` to a seed's own best accuracy: no standard deviation.
    """

    accuracy: float
    round: int
    deviation: float


def best_seed_mean(runs: Sequence[Sequence[Row]]) -> SeedMean:
    """The maximum over rounds of the mean over seeds, which the single image's tables give as their accuracy.

    The +- of those tables (Soni, Saeed and Asano, 2024) is `deviation`: max(mean - worst seed's best, best seed's best
    - mean), lines 114-131 of the release's plotting_scripts/multiseed_helper.py.

    Args:
        runs: the histories of one method under several seeds, of the same rounds.

    Raises:
        ValueError: no run, no round, histories of other rounds, or a round without an accuracy.
    """
    if not runs or not runs[0]:
        got = f"{len(runs)} histories, the first of them empty" if runs else "none"
        raise ValueError(f"runs must hold at least one history of at least one round, got {got}")
    numbers = [row["round"] for row in runs[0]]
    for index, rows in enumerate(runs):
        if [row["round"] for row in rows] != numbers:
            raise ValueError(f"runs must have the same rounds: runs[{index}] has {len(rows)}, runs[0] {len(numbers)}")
        missing = [row["round"] for row in rows if row["accuracy"] is None]
        if missing:
            raise ValueError(f"runs[{index}] has no accuracy in round {missing[0]}: give simulate a test set")
    curves = torch.tensor([[row["accuracy"] for row in rows] for rows in runs], dtype=torch.float64)
    mean = curves.mean(0)
    best = int(mean.argmax())
    apart = (curves.amax(1) - mean[best]).abs().max()
    return SeedMean(float(mean[best]), numbers[best], float(apart))
