"""Training of shadow models: repeat a pipeline on random halves of its records, in parallel and resumable."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.membership._shadow_folder import FORMAT, open_shadow_folder, write_shadow
from attacks.membership._workers import Job, fit_first, fit_shadows, require_sendable
from attacks.membership.pipeline import Pipeline, RunScores
from attacks.membership.shadow_scores import ShadowScores
from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.rng import derive


def halves(count: int, records: int, seed: int) -> Tensor:
    """Draw the training records of each shadow model: random halves and their complements, in pairs.

    Shadow model 2k is trained on a random half of the records, and shadow model 2k + 1 on the other half. Every record
    is thus used by exactly half of the models. If you attack one model as the target, remove both models of its pair:
    *every* record is then used by exactly half of the remaining models. If you removed only the target, its training
    records would be used by fewer of the remaining models than other records, which would reveal them. A pair depends
    only on the seed and the pair's index, so more shadow models can be added later.

    Args:
        count: number of shadow models, even, at least 2.
        records: number of records, N, at least 4.
        seed: seed of the halves.

    Returns:
        Whether each shadow model is trained on each record, bool [count, N].

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
    """Estimated duration of training the remaining shadow models, as `estimate_cost` returns it. Prints as a sentence.

    Attributes:
        each: seconds that the training of one shadow model took.
        missing: number of shadow models that are not trained yet.
        workers: number of shadow models that are trained at the same time.
    """

    each: float
    missing: int
    workers: int

    @property
    def seconds(self) -> float:
        """Estimated seconds for training all missing shadow models if every worker has a core of its own.

        If workers share cores, the training takes longer.
        """
        return self.each * math.ceil(self.missing / self.workers)

    def __str__(self) -> str:
        return (
            f"{self.each:.3g} s per shadow: {self.missing} more take at least {self.seconds:.3g} s "
            f"with {self.workers} at a time"
        )


def estimate_cost(
    pipeline: Pipeline, count: int, *, workers: int = 1, out: str | os.PathLike[str] | None = None, seed: int = 0
) -> Cost:
    """Train one shadow model to estimate how long the training of all shadow models takes.

    Args:
        pipeline, count, workers, out, seed: arguments as for `run_shadows`. If you pass `out`, the shadow model is
            saved there and `run_shadows` does not train it again.

    Returns:
        The estimated `Cost` of the shadow models that are not in `out` yet. If `out` contains all of them, no model is
        trained, and `Cost.each` is the time that the training of the first one took.

    Raises:
        TypeError, ValueError: an argument is out of range; the shadow models in `out` were made with other settings; or
            `fit` returns no scorers (functions that score records), or a scorer returns scores that are not finite.
        InUse: another process uses `out`.
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
    executor: Executor | None = None,
    progress: bool = True,
) -> ShadowScores:
    """Train shadow models by running a pipeline on `count` random halves of its records, and score all records.

    Pass the result to `leave_one_out`, which runs attacks on it. If you pass `out`, the scores of every finished shadow
    model are saved to a file. A call with the same arguments continues an interrupted call, or adds models if `count`
    is larger than before.

    Shadow models are from Shokri et al., "Membership inference attacks against machine learning models" (S&P 2017).
    Random halves are from Carlini et al. (S&P 2022); our halves come in complementary pairs (see `halves`).

    Args:
        pipeline: the pipeline with its records.
        count: number of shadow models, even, at least 4. Each of them can also be attacked as a target.
        out: folder for the scores of the shadow models; None keeps them in memory only.
        seed: seed of the halves, and of the seeds that are passed to the pipeline's function `fit`.
        workers: number of shadow models that threads train at the same time, each on one intra-op thread.
        executor: a `concurrent.futures.Executor` with processes that train the models instead, such as
            `distillkit.study.worker_pool(4)` or that of a cluster. It is faster if `fit` spends much time in Python
            code. `fit` must be importable there: a function of a module, not a closure.
        progress: whether to show a progress bar with the time per shadow model.

    Returns:
        The scores of all records under all shadow models. They do not depend on the number of workers if `fit` draws
        random numbers from its seed only. If `fit` draws from torch's global generator, the generator is seeded before
        each run, and a warning is issued if several threads use it.

    Raises:
        TypeError, ValueError: an argument is out of range; the shadow models in `out` were made with other settings;
            `fit` cannot be sent to the executor; or `fit` returns no scorers (functions that score records), or scorers
            with other names than in an earlier call, or a scorer returns scores that are not finite.
        InUse: another process uses `out`.
    """
    workers = check.positive_int(workers, "workers")
    if executor is not None:
        check.instance(executor, Executor, "executor", "a concurrent.futures.Executor")
    check.boolean(progress, "progress")
    design = _Design(pipeline, count, seed)
    if executor is not None:
        require_sendable(pipeline)
    with (
        open_shadow_folder(out, design.facts(), count) as done,
        bar(count, "shadows", unit="shadow", progress=progress, done=len(done)) as shown,
    ):
        missing = [design.job(number) for number in range(count) if number not in done]
        for number, one in fit_shadows(pipeline, missing, workers, executor):
            done[number] = one
            write_shadow(out, number, one)
            shown.update()
            shown.set_postfix_str(f"{one.seconds:.3g} s each")
    return _stack_scores(design, done)


class _Design:
    """Plan of a set of shadow models: the records and the seed of each model, and their common settings.

    The method `facts` returns the settings. Saved shadow models are reused only if they were made with equal settings.
    """

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
