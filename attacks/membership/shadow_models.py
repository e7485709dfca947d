"""Shadow models: repeated runs of a pipeline on halves of the records, in parallel and resumable."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.membership._shadow_folder import FORMAT, open_shadow_folder, write_shadow
from attacks.membership._workers import BACKENDS, Backend, Job, fit_first, fit_shadows, require_sendable
from attacks.membership.pipeline import Pipeline, RunScores
from attacks.membership.shadow_scores import ShadowScores
from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.rng import derive

__all__ = ["BACKENDS", "Cost", "estimate_cost", "halves", "run_shadows"]


def halves(count: int, records: int, seed: int) -> Tensor:
    """Return the records of each shadow: random halves and their complements, in pairs.

    Shadow 2k has a random half of the records and shadow 2k + 1 the other half. Every record is thus in exactly half of
    the shadows, and every shadow has half of the records. If a target is removed together with its complement, *every*
    record is in exactly half of the remaining shadows, so these counts do not reveal the target's records. In a design
    that is balanced but not paired, the counts reveal the target's records: each of these is in one remaining shadow
    fewer. A pair depends only on the seed and the pair's index, so more shadows can be added later.

    Args:
        count: number of shadows, even, at least 2.
        records: number of records, N, at least 4.
        seed: seed of the halves.

    Returns:
        Membership of each record in each shadow, bool [count, N].

    Raises:
        TypeError, ValueError: a value is out of range, or the count is odd.
    """
    count = check.positive_int(count, "count", least=2)
    records, seed = check.positive_int(records, "records", least=4), check.positive_int(seed, "seed", least=0)
    if count % 2:
        raise ValueError(f"count must be even because shadows come in pairs of complements, got {count}")
    rows = []
    for pair in range(count // 2):
        generator = derive(seed, "halves", pair)
        larger = int(torch.randint(2, (), generator=generator)) if records % 2 else 0
        half = torch.randperm(records, generator=generator).argsort() < records // 2 + larger
        rows += [half, ~half]
    return torch.stack(rows)


@dataclass(frozen=True)
class Cost:
    """Estimated cost of the remaining shadows, from one timed shadow. `estimate_cost` returns it. Prints as a sentence.

    Attributes:
        each: seconds of the timed shadow.
        missing: number of remaining shadows.
        workers: number of shadows fitted at a time.
    """

    each: float
    missing: int
    workers: int

    @property
    def seconds(self) -> float:
        """Estimated duration of the remaining shadows if every worker has its own core; more if they share cores."""
        return self.each * math.ceil(self.missing / self.workers)

    def __str__(self) -> str:
        return (
            f"{self.each:.3g} s per shadow: {self.missing} more take at least {self.seconds:.3g} s "
            f"with {self.workers} at a time"
        )


def estimate_cost(
    pipeline: Pipeline, count: int, *, workers: int = 1, out: str | os.PathLike[str] | None = None, seed: int = 0
) -> Cost:
    """Fit one shadow to estimate the cost of all of them.

    Args:
        pipeline, count, workers, out, seed: arguments as for `run_shadows`. With `out`, the shadow is saved there, so
            the estimate costs nothing extra.

    Returns:
        The estimated `Cost` of the missing shadows. If none is missing, `each` is the duration of the first one.

    Raises:
        TypeError, ValueError, InUse: as for `run_shadows`.
    """
    workers = check.positive_int(workers, "workers")
    design = _Design(pipeline, count, seed)
    with open_shadow_folder(out, design.facts(), count) as done:
        missing = [number for number in range(count) if number not in done]
        if not missing:
            return Cost(done[0].seconds, 0, workers)
        first, _ = fit_first(pipeline, design.job(missing[0]))
        write_shadow(out, missing[0], first)
    return Cost(first.seconds, len(missing) - 1, workers)


def run_shadows(
    pipeline: Pipeline,
    count: int,
    *,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    workers: int = 1,
    backend: Backend = "threads",
    progress: bool = True,
) -> ShadowScores:
    """Run a pipeline on `count` random halves of its records, and keep the scores of every record under every result.

    The attacks with shadow models need these scores; `leave_one_out` runs the attacks. Shadow models are from Shokri et
    al., "Membership inference attacks against machine learning models" (S&P 2017). Random halves are from Carlini et
    al. (S&P 2022); ours are pairs of complements (see `halves`). With `out`, every finished shadow is saved as a file
    of scores. A call with the same arguments continues an interrupted one, or adds shadows to a smaller count.

    Args:
        pipeline: the pipeline with its records.
        count: number of shadows, even, at least 4. Each also serves as a target.
        out: folder for the shadows; None keeps them in memory only.
        seed: seed of the halves and of the seeds passed to `fit`.
        workers: number of shadows fitted at a time, each on one intra-op thread.
        backend: backend of the workers. "threads" of this process can run any function. For spawned "processes", `fit`
            must be importable (a function of a module, not a closure). Use processes if `fit` spends much time in
            Python code.
        progress: whether to show a progress bar with the time per shadow.

    Returns:
        The `ShadowScores`, independent of the number of workers if `fit` draws from its seed only. If `fit` draws from
        torch's global generator, the generator is seeded before each fit. With several threads a warning is given,
        because they would share the generator.

    Raises:
        TypeError, ValueError: an argument is out of range, `out` holds shadows of another design, or `fit` cannot be
            sent to processes. Also if `fit` returns no scorers, other scorers than before, or scores that are not
            finite.
        InUse: another process uses `out`.
    """
    workers = check.positive_int(workers, "workers")
    check.one_of(backend, "backend", BACKENDS)
    check.boolean(progress, "progress")
    design = _Design(pipeline, count, seed)
    if backend == "processes":
        require_sendable(pipeline)
    with (
        open_shadow_folder(out, design.facts(), count) as done,
        bar(count, "shadows", unit="shadow", progress=progress, done=len(done)) as shown,
    ):
        missing = [design.job(number) for number in range(count) if number not in done]
        for number, one in fit_shadows(pipeline, missing, workers, backend):
            done[number] = one
            write_shadow(out, number, one)
            shown.update()
            shown.set_postfix_str(f"{one.seconds:.3g} s each")
    return _stack_scores(design, done)


class _Design:
    """Records and seed of each shadow model, and settings by which a folder is checked to belong to the attack."""

    def __init__(self, pipeline: Pipeline, count: int, seed: int) -> None:
        check.instance(pipeline, Pipeline, "pipeline", "a Pipeline")
        check.positive_int(count, "count", least=4)
        self.pipeline, self.count = pipeline, count
        self.inside = halves(count, len(pipeline.images), seed)
        self._seed = seed

    def job(self, number: int) -> Job:
        seed = int(torch.randint(2**31, (), generator=derive(self._seed, "fit", number)))
        return Job(number, self.inside[number], seed)

    def facts(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for tensor in (self.pipeline.images, self.pipeline.labels, *(self.pipeline.population or ())):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        population = len(self.pipeline.population[0]) if self.pipeline.population else 0
        return {
            "format": FORMAT, "records": len(self.pipeline.images), "population": population, "seed": self._seed,
            "tag": self.pipeline.tag, "data": digest.hexdigest(),
        }  # fmt: skip


def _stack_scores(design: _Design, done: Mapping[int, RunScores]) -> ShadowScores:
    ordered = [done[number] for number in range(design.count)]
    names = {n: tuple(t.shape) for n, t in ordered[0].scores.items()}
    for number, one in enumerate(ordered):
        other = {n: tuple(t.shape) for n, t in one.scores.items()}
        if other != names:
            raise ValueError(
                f"fit must return the same scorers every time, got {names} in shadow 0 and {other} in shadow {number}"
            )
    return ShadowScores(
        design.inside,
        {n: torch.stack([one.scores[n] for one in ordered]) for n in names},
        {n: torch.stack([one.population[n] for one in ordered]) for n in ordered[0].population},
        design.pipeline.labels.long().cpu(),
    )
