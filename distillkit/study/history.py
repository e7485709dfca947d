"""Rows of run histories: reading them, and their metrics, such as last and best accuracy and rounds to a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check
from distillkit._utils.files import parse_json, read_bytes

Row = Mapping[str, Any]
"""Values of one round of a history."""


class RecordError(ValueError):
    """Error for a file of a run that is missing, damaged, or of another format. The message names the file."""


def read_rows(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a run's `history.jsonl`, one row per round. The rounds must be 1, 2, 3 and so on.

    Args:
        path: path of the file. A file that does not exist has no rows.
        torn: whether the last line may be incomplete; an incomplete line is then ignored.

    Raises:
        RecordError: a line is damaged, or the rounds are not consecutive (for example because two processes wrote the
            file).
    """
    lines = read_bytes(path, RecordError).splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, path, RecordError, number)
        except RecordError:
            if torn and number == len(lines):
                break
            raise
        found = row.get("round") if isinstance(row, dict) else None
        if found != number:
            raise RecordError(
                f"{path} is damaged: line {number} is of round {found}, want {number}. It is not the history of one "
                "run; repeat the run in another folder"
            )
        rows.append(row)
    return rows


def require_rows(rows: Sequence[Row], *columns: str, name: str = "rows") -> Sequence[Row]:
    """Check that the argument `name` is a sequence of rows with these columns, and return it."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"{name} must be the rows of a history, such as run.rows, got {type(rows).__name__}")
    for index, row in enumerate(rows):
        if missing := [column for column in columns if column not in row]:
            raise ValueError(f"{name}[{index}] must be a row of a history, but has no {missing[0]!r}")
        accuracy = row.get("accuracy")
        if isinstance(accuracy, bool) or not isinstance(accuracy, Real | None):
            raise TypeError(f"{name}[{index}]['accuracy'] must be a number or None, got {accuracy!r:.40}")
    return rows


def accuracy_last(rows: Sequence[Row]) -> float | None:
    """Return the accuracy in the last of the `rows` of a history, as a fraction; None if the last round has none."""
    return rows[-1]["accuracy"] if require_rows(rows, "accuracy") else None


def accuracy_late(rows: Sequence[Row], rounds: int | None = None) -> float | None:
    """Return the mean accuracy over the last rounds of a history, as a fraction.

    The accuracy of a single round is noisy, and the best round is chosen on the test set. A mean over a number of
    rounds that was fixed before the run avoids both problems.

    Args:
        rows: rows of one history.
        rounds: number of last rounds; default: the second half of the rounds, with the middle round if their number is
            odd.

    Returns:
        The mean over those of the last rounds that were tested; None if none of them was tested.

    Raises:
        ValueError, TypeError: `rounds` is not a positive integer.
    """
    require_rows(rows)
    first = len(rows) // 2 if rounds is None else max(0, len(rows) - check.positive_int(rounds, "rounds"))
    tested = [row["accuracy"] for row in rows[first:] if row.get("accuracy") is not None]
    return statistics.fmean(tested) if tested else None


def accuracy_best(rows: Sequence[Row]) -> float | None:
    """Return the best accuracy in the `rows` of a history, as a fraction; None if no round was tested.

    The best round is chosen on the test set, so report the value as the best accuracy over rounds.
    """
    known = [row["accuracy"] for row in require_rows(rows, "accuracy") if row["accuracy"] is not None]
    return max(known, default=None)


def rounds_to(rows: Sequence[Row], target: float) -> int | None:
    """Return the first round whose accuracy is at least a target, or None if no round reaches the target.

    This is the column "ROUND" in Tables 1, 2, 4 and 5 of VHL (Tang et al., ICML 2022), where the target is the best
    accuracy of FedAvg, and "Nan" means that the target is never reached. The speedup in these tables is FedAvg's number
    of rounds divided by the method's number of rounds.

    Args:
        rows: rows of one history. A round without an accuracy is skipped.
        target: target accuracy, a fraction in [0, 1].

    Raises:
        ValueError: `target` is outside [0, 1].
    """
    check.real_number(target, "target", least=0.0, most=1.0)
    require_rows(rows, "round", "accuracy")
    reached = (row["round"] for row in rows if row["accuracy"] is not None and row["accuracy"] >= target)
    return next(reached, None)


@dataclass(frozen=True)
class SeedMean:
    """Round in which the mean accuracy over seeds is highest.

    Attributes:
        accuracy: mean accuracy in the best round, a fraction. The round is chosen on the test set, so report the value
            as the best over rounds.
        round: index of the best round; the first such round in a tie.
        deviation: largest difference, over the seeds, between `accuracy` and a seed's own best accuracy over its
            rounds; not a standard deviation.
    """

    accuracy: float
    round: int
    deviation: float


def best_seed_mean(runs: Sequence[Sequence[Row]]) -> SeedMean:
    """Return the round in which the mean accuracy over seeds is highest, with this accuracy.

    The accuracy tables of the single-image paper (Soni, Saeed and Asano, 2024) report this mean as m ± `deviation`. Let
    m be the mean in the best round, and b_s the best accuracy of seed s in any round. Then

        deviation = max(m - min_s b_s, max_s b_s - m),

    as in lines 114-131 of plotting_scripts/multiseed_helper.py in the authors' code.

    Args:
        runs: histories of one method with several seeds and the same rounds.

    Raises:
        ValueError: there is no run or no round, the rounds differ, or a round has no accuracy.
    """
    histories = check.sequence(runs, "runs", "histories, such as [run.rows]")
    for index, rows in enumerate(histories):
        require_rows(rows, "round", "accuracy", name=f"runs[{index}]")
    if not histories or not histories[0]:
        got = f"{len(histories)} histories, the first of them empty" if histories else "none"
        raise ValueError(f"runs must hold at least one history of at least one round, got {got}")
    numbers = [row["round"] for row in histories[0]]
    for index, rows in enumerate(histories):
        if [row["round"] for row in rows] != numbers:
            raise ValueError(f"runs must have the same rounds: runs[{index}] has {len(rows)}, runs[0] {len(numbers)}")
        if missing := [row["round"] for row in rows if row["accuracy"] is None]:
            raise ValueError(f"runs[{index}] has no accuracy in round {missing[0]}; pass test= to simulate")
    curves = torch.tensor([[row["accuracy"] for row in rows] for rows in histories], dtype=torch.float64)
    mean = curves.mean(0)
    best = int(mean.argmax())
    deviation = (curves.amax(1) - mean[best]).abs().max()
    return SeedMean(float(mean[best]), numbers[best], float(deviation))
