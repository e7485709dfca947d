"""Interleaved comparison of our code with the straightforward implementation and with convolutions alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.clock import Cost, cost_of, now, since, with_peak
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.plain import Step

Lap = Callable[[], None]
Ours = Callable[[int, Lap], Tensor]
"""Does so many steps, calls the function after each, and returns what came of them."""

Result = dict[str, Any]

EXACT, ROUNDED, OTHER = 1e-5, 1e-2, 0.5
"""How far the two sides may be apart, relative to their length: in float64; in float32, where a ReLU that turns at
another bit moves a gradient by up to one in a thousand, before the table says so; and before they count as other work.
"""

LEAST, MOST = 3, 15
"""Rounds."""


@dataclass(frozen=True)
class Race:
    """Two implementations of the same work.

    Attributes:
        ours: see `Ours`.
        plain: function that starts the straightforward implementation and returns its step. The result of a step equals
            that of ours after equally many steps.
        noted: function that runs one step of ours on this thread, inside the recorder of convolutions that it gets;
            default: `ours`.
    """

    ours: Ours
    plain: Callable[[], Step]
    noted: Callable[[Convolutions], object] | None = None

    def once(self, alone: bool) -> tuple[Tensor, Convolutions | None]:
        """Run a step of ours; return its result, and its convolutions if they all run on this thread, see `alone`."""
        if self.noted is not None or not alone:
            return self.ours(1, nothing), None
        with Convolutions() as noted:
            return self.ours(1, nothing), noted

    def convolutions(self, *, later: bool = False) -> Convolutions:
        """Record the convolutions of a step of ours: the first, or a `later` one without one-time work."""
        noted, threads = Convolutions(), torch.get_num_threads()
        noted.counting = not later

        def lap() -> None:
            noted.counting = True

        torch.set_num_threads(1)  # with more, classes go side by side on threads that it does not see
        if self.noted is not None:
            self.noted(noted)
        else:
            with noted:
                self.ours(1 + later, lap)
        torch.set_num_threads(threads)
        return noted


@dataclass(frozen=True)
class Row:
    """Line of the table.

    Attributes:
        name: name of the measured work.
        race: function that makes the race for given sizes.
        by: "cpu" or "wall": kind of seconds from which the ratio is computed.
        target: target of the ratio.
        share: minimum target for the share of the convolutions.
        threads: number of intra-op threads.
        of: number of steps that share the one-time work before the first step.
        within: largest relative difference of both sides in float32 that the table does not report.
    """

    name: str
    race: Callable[[Any], Race]
    by: str = "cpu"
    target: float | None = None
    share: float | None = None
    threads: int = 1
    of: int = 0
    within: float = ROUNDED


def nothing() -> None:
    """Do nothing; for steps without preparation."""


def checked(row: Row, sizes: Any) -> float:
    """Return the difference of both implementations after a step in float64.

    Raises:
        RuntimeError: the difference is too large for rounding, so the two sides do different work.
    """
    torch.set_default_dtype(torch.float64)
    try:
        race = row.race(sizes)
        return _near(row, race.ours(1, nothing), race.plain()(), EXACT)
    finally:
        torch.set_default_dtype(torch.float32)


def _near(row: Row, ours: Tensor, plain: Tensor, most: float) -> float:
    difference = float((ours - plain).norm() / plain.norm())
    if not difference <= most:
        raise RuntimeError(
            f"{row.name}: the two sides are {difference:.1e} apart in {ours.dtype}, more than {most:.0e}"
        )
    return difference


def timed(row: Row, race: Race, noted: Convolutions, rounds: int) -> tuple[dict[str, list[Cost]], Cost]:
    """Return the costs of each round on either side and of the convolutions, and of our first step separately."""
    found: dict[str, list[Cost]] = {"ours": [], "plain": [], "convolutions": []}
    first: list[Cost] = []
    step, alone = race.plain(), noted.alone(row.threads)
    begun = now()

    def lap() -> None:
        nonlocal begun
        took = since(begun)
        if first:
            found["ours"].append(took)
            found["plain"].append(cost_of(step))
            found["convolutions"].append(alone())
        else:
            first.append(took)
        begun = now()

    race.ours(rounds + 1, lap)
    return found, first[0]


def measured(row: Row, sizes: Any, tiny: Any, seconds: float) -> Result:
    """Measure a line of the table: the ratios of all rounds and their parts.

    Args:
        row: what to measure.
        sizes: at which.
        tiny: at which both sides are compared in float64.
        seconds: about how long; three rounds are made in any case.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(row.threads)
    try:
        exact = checked(row, tiny)
        begun = now()
        race = row.race(sizes)
        (found_by_ours, noted), memory = with_peak(lambda: race.once(row.threads == 1 and not row.of))
        found_by_plain, plain_memory = with_peak(race.plain())
        rounded = _near(row, found_by_ours, found_by_plain, OTHER)
        noted = race.convolutions(later=row.of > 0) if noted is None else noted
        rounds = min(MOST, max(LEAST, int(seconds / since(begun)["wall"])))
        found, first = timed(row, race, noted, rounds)
        line = _line(row, found, first)
        line |= {"difference": rounded, "difference_float64": exact, "within": row.within}
        line |= {"memory": {"ours": memory, "plain": plain_memory}, "bounded_by": []}
        if missed(line):
            line["bounded_by"] = largest(lambda: race.ours(1, nothing))
    finally:
        torch.set_num_threads(threads)
    return line


def _line(row: Row, found: dict[str, list[Cost]], first: Cost) -> Result:
    ours = [cost[row.by] for cost in found["ours"]]
    once = max(0.0, first[row.by] - statistics.median(ours)) / row.of if row.of else 0.0
    ratios = [(own + once) / plain[row.by] for own, plain in zip(ours, found["plain"])]
    shares = [alone[row.by] / own for own, alone in zip(ours, found["convolutions"])]
    seconds = {side: {by: [cost[by] for cost in costs] for by in ("cpu", "wall")} for side, costs in found.items()}
    return {
        "row": row.name, "by": row.by, "threads": row.threads, "target": row.target, "share_target": row.share,
        "rounds": len(ours), "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        "share": statistics.median(shares), "once": once, "first": first,
        "seconds": seconds,
        "faults": {side: statistics.median(cost["faults"] for cost in found[side]) for side in ("ours", "plain")},
    }  # fmt: skip


def missed(line: Result) -> bool:
    """Check whether a line of the table misses one of its targets."""
    slow = line["target"] is not None and line["ratio"] > line["target"]
    return slow or (line["share_target"] is not None and line["share"] < line["share_target"])


def largest(work: Callable[[], object], count: int = 3) -> list[tuple[str, float]]:
    """Return the operations of a piece of work with the most CPU time on all its threads, with their shares."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
        work()
    events: Sequence[Any] = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events) or 1.0
    events = sorted(events, key=lambda event: -event.self_cpu_time_total)
    return [(event.key, event.self_cpu_time_total / total) for event in events[:count]]
