"""Functions for audits that use many runs: split the runs, list events, and count them.

An audit runs a mechanism in two worlds: "inside" (with one chosen record) and "outside" (without it). An attack gives
each run one or several scores. An event says that a score lies on one side of a threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.rng import as_generator

_MAX_THRESHOLDS = 256
"""Largest number of candidate thresholds."""

_SIDES = (("inside", "at least"), ("inside", "below"), ("outside", "at least"), ("outside", "below"))

SplitRuns = dict[str, Tensor]
"""Scores of runs, float64 [runs, scores per run], by world: "inside" (with the record) or "outside" (without it)."""


@dataclass(frozen=True)
class Event:
    """The event that a score of a run lies on one side of a threshold.

    An audit compares runs in two worlds: "inside" (with one chosen record) and "outside" (without this record).

    Attributes:
        world: world in which the event seems more likely, "inside" or "outside".
        side: side of the threshold, "at least" or "below".
        threshold: threshold of the score.
        column: index of the score, if each run has several scores.
        columns: number of scores of each run.
    """

    world: str
    side: str
    threshold: float
    column: int
    columns: int

    @property
    def other(self) -> str:
        """World in which the event seems less likely: "inside" (with the record) or "outside" (without it)."""
        return "outside" if self.world == "inside" else "inside"

    def __str__(self) -> str:
        which = f" in column {self.column}" if self.columns > 1 else ""
        return f"{self.world} scores {self.side} {self.threshold:.4g}{which}"


def split_runs(inside: Tensor, outside: Tensor, generator: int | torch.Generator) -> tuple[SplitRuns, SplitRuns]:
    """Split runs at random into two halves: one for choosing an event, and one for counting how often it occurs.

    Args:
        inside: scores of the runs whose data contain the audited record: one score for each run, [n], or d scores for
            each run, [n, d].
        outside: scores of the runs without this record, [m] or [m, d].
        generator: seed or generator that draws the split.

    Returns:
        Two dictionaries, the first for choosing and the second for counting. Each has the keys "inside" and "outside",
        and contains the scores of half of the runs with the record and of half of the runs without it.
    """
    rng = as_generator(generator)
    worlds = {"inside": _table(inside, "inside"), "outside": _table(outside, "outside")}
    widths = [values.shape[1] for values in worlds.values()]
    if widths[0] != widths[1]:
        raise ValueError(
            f"inside and outside must have the same statistics for each run, got {widths[0]} and {widths[1]} columns"
        )
    parts = [values[torch.randperm(len(values), generator=rng)].tensor_split(2) for values in worlds.values()]
    return dict(zip(worlds, (part[0] for part in parts))), dict(zip(worlds, (part[1] for part in parts)))


def candidate_events(runs: SplitRuns) -> Iterator[tuple[list[Event], Tensor, int, Tensor, int]]:
    """Yield the events from which an audit chooses one, and the numbers of runs in which they occur, in groups.

    An event says that a score of a run lies on one side of a threshold. The events of a group differ only in their
    threshold. The two "worlds" are the runs with a record and the runs without it.

    Args:
        runs: the half of the runs that is used for choosing an event.

    Yields:
        A tuple of five items. The first is the list of the events of a group, which all have the same `Event.world`.
        The second is the number of runs of this world in which each event occurs, and the third is the number of all
        runs of this world. The last two items are the same numbers for the other world.
    """
    columns = runs["inside"].shape[1]
    for column in range(columns):
        own = {world: runs[:, column].sort().values for world, runs in runs.items()}
        values = torch.cat(list(own.values())).unique()
        places = values[torch.linspace(0, len(values) - 1, min(len(values), _MAX_THRESHOLDS)).round().long()]
        below = {world: torch.searchsorted(runs, places) for world, runs in own.items()}
        for world, side in _SIDES:
            found = [Event(world, side, t, column, columns) for t in places.tolist()]
            hits = {w: b if side == "below" else len(own[w]) - b for w, b in below.items()}
            other = found[0].other
            yield found, hits[world], len(own[world]), hits[other], len(own[other])


def event_counts(runs: SplitRuns, event: Event) -> tuple[int, int, int, int]:
    """Count an event in the half of the runs that was not used for choosing it.

    Returns:
        The number of runs in which it occurs and the number of all runs, first for `event.world` (the runs in which the
        event seems more likely), then for the other runs.
    """

    def count(world: str) -> tuple[int, int]:
        scores = runs[world][:, event.column]
        hits = int((scores >= event.threshold).sum())
        return (hits if event.side == "at least" else len(scores) - hits), len(scores)

    return *count(event.world), *count(event.other)


def check_scores(scores: Tensor, name: str, least: int) -> Tensor:
    """Check that there are at least `least` scores, floats without NaN, and return them as float64 on the CPU.

    Args:
        scores: one score per run or canary, [n].
        name: name of the argument, for error messages.
        least: smallest allowed number of scores.
    """
    found = _checked(scores, name)
    if found.ndim != 1 or len(found) < least:
        raise ValueError(f"{name} must be at least {least} scores, [n], got shape {list(scores.shape)}")
    return found


def _table(scores: Tensor, name: str) -> Tensor:
    found = _checked(scores, name)
    if found.ndim not in (1, 2) or len(found) < 2 or not found[0].numel():
        raise ValueError(f"{name} must be [n] or [n, d] scores of at least 2 runs, got shape {list(scores.shape)}")
    return found.reshape(len(found), -1)


def _checked(scores: Tensor, name: str) -> Tensor:
    check.float_tensor(scores, name)
    if bool(scores.isnan().any()):
        raise ValueError(
            f"{name} must not be NaN, but {int(scores.isnan().sum())} of {scores.numel()} are: the attack failed "
            "there. Leaving those runs out would bias the test"
        )
    return scores.detach().double().cpu()
