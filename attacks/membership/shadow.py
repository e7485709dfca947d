"""Shadows: a pipeline run again and again on halves of the records, in parallel, so that a kill loses little."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from attacks.membership.pipeline import Fitted, Pipeline, fit_once
from attacks.membership.target import Shadows
from distillkit import check
from distillkit.files import read_tensors, write_atomically, write_tensors
from distillkit.owner import end_with_parent, owned
from distillkit.progress import bar
from distillkit.rng import derive

__all__ = ["PLACES", "Cost", "estimate", "halves", "shadows"]

Place = Literal["threads", "processes"]
PLACES = get_args(Place)
"""Where shadows are fitted; see `shadows`."""

_KIND = "distillkit shadow 1"


def halves(count: int, records: int, seed: int) -> Tensor:
    """Who is in which shadow: random halves and their complements, in pairs.

    Shadow 2k has a random half of the records and shadow 2k + 1 the other half. So every record is in exactly half of
    the shadows, every shadow has half of the records, and whoever takes out a target together with its complement is
    left with a rest in which *every* record is in exactly half: how often says nothing of the target. (In a design that
    is balanced but not in pairs it says everything: a record is once less often in the rest if the target has it.)
    A pair depends on the seed and its own number alone, so more shadows can follow.

    Args:
        count: how many shadows, even, at least 2.
        records: N, how many records, at least 4.
        seed: of the halves.

    Returns:
        bool [count, N].

    Raises:
        TypeError, ValueError: numbers out of range, or an odd count.
    """
    count = check.positive_int(count, "count", least=2)
    records, seed = check.positive_int(records, "records", least=4), check.positive_int(seed, "seed", least=0)
    if count % 2:
        raise ValueError(f"count must be even, as shadows come in pairs of complements, got {count}")
    rows = []
    for pair in range(count // 2):
        generator = derive(seed, "halves", pair)
        larger = int(torch.randint(2, (), generator=generator)) if records % 2 else 0
        half = torch.randperm(records, generator=generator).argsort() < records // 2 + larger
        rows += [half, ~half]
    return torch.stack(rows)


@dataclass(frozen=True)
class Cost:
    """What shadows will take, from one that was timed. Made by `estimate`; printed, it is a sentence.

    Attributes:
        each: seconds of the one that was fitted.
        missing: how many are left.
        workers: how many at a time.
    """

    each: float
    missing: int
    workers: int

    @property
    def seconds(self) -> float:
        """How long the rest takes if every worker has a free core; more if they share one."""
        return self.each * math.ceil(self.missing / self.workers)

    def __str__(self) -> str:
        return (
            f"{self.each:.3g} s a shadow: {self.missing} more take at least {self.seconds:.3g} s "
            f"with {self.workers} at a time"
        )


def estimate(
    pipeline: Pipeline,
    count: int,
    *,
    workers: int = 1,
    out: str | Path | None = None,
    seed: int = 0,
) -> Cost:
    """Fit one shadow, to know what all of them will take before anything long starts.

    Args:
        pipeline, count, workers, out, seed: as `shadows` will be given them. With `out` the shadow is kept there, so
            that the estimate costs nothing.

    Returns:
        The `Cost` of those still missing; where all are there, of none, at the time of the first.

    Raises:
        TypeError, ValueError, InUse: as `shadows`.
    """
    workers = check.positive_int(workers, "workers")
    design = _Design(pipeline, count, seed)
    with _kept(design, out) as done:
        missing = [number for number in range(count) if number not in done]
        if not missing:
            return Cost(done[0].seconds, 0, workers)
        first, _ = _alone(pipeline, design.inside[missing[0]], design.seed_of(missing[0]))
        _keep(out, missing[0], first)
    return Cost(first.seconds, len(missing) - 1, workers)


def shadows(
    pipeline: Pipeline,
    count: int,
    *,
    out: str | Path | None = None,
    seed: int = 0,
    workers: int = 1,
    where: Place = "threads",
    progress: bool = True,
) -> Shadows:
    """Run a pipeline on `count` random halves of its records, and keep what each outcome says of every record.

    What the attacks with shadow models need (`leave_one_out` runs them): Shokri et al., "Membership inference attacks
    against machine learning models" (S&P 2017); the halves are as in Carlini et al. (S&P 2022), but in pairs of
    complements (see `halves`). With `out` every finished shadow is a file of scores, and a call with the same arguments
    goes on where an earlier one was stopped, or adds more shadows to a smaller count.

    Args:
        pipeline: what is run, and the records.
        count: how many shadows, even, at least 4. Every one serves as a target, too.
        out: a folder for them; None to keep them in memory alone.
        seed: of the halves, and of every fit's own seed.
        workers: how many are fitted at a time, each on one intra-op thread.
        where: "threads" of this process, which any function can run in; or "processes", spawned, for which `fit` must
            be importable (a function of a module, no closure), and which Python's own work does not slow down.
        progress: whether a bar shows how far it is, and what one takes.

    Returns:
        The `Shadows`. The same with any number of workers, if `fit` draws from its seed alone. A `fit` that draws from
        torch's global generator finds it seeded, unless several threads share it: then there is a warning.

    Raises:
        TypeError, ValueError: arguments out of range; `fit` returns no scorers, other ones than before, or scores that
            are not finite; `out` holds shadows of another design; `fit` cannot be sent to processes.
        InUse: another process works in `out`.
    """
    workers = check.positive_int(workers, "workers")
    check.one_of(where, "where", PLACES)
    check.switch(progress, "progress")
    design = _Design(pipeline, count, seed)
    if where == "processes":
        _sendable(pipeline)
    with _kept(design, out) as done, bar(count, "shadows", unit="shadow", progress=progress, done=len(done)) as shown:
        for number, one in _fitted(design, [n for n in range(count) if n not in done], workers, where):
            done[number] = one
            _keep(out, number, one)
            shown.update()
            shown.set_postfix_str(f"{one.seconds:.3g} s each")
    return _gathered(design, done)


class _Design:
    """Who is in which shadow, with which seed, and what a folder remembers of it."""

    def __init__(self, pipeline: Pipeline, count: int, seed: int) -> None:
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"pipeline must be a Pipeline, got {type(pipeline).__name__}")
        check.positive_int(count, "count", least=4)
        self.pipeline, self.count = pipeline, count
        self.inside = halves(count, len(pipeline.images), seed)
        self._seed = seed

    def seed_of(self, number: int) -> int:
        return int(torch.randint(2**31, (), generator=derive(self._seed, "fit", number)))

    def facts(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for tensor in (self.pipeline.images, self.pipeline.labels, *(self.pipeline.population or ())):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        population = len(self.pipeline.population[0]) if self.pipeline.population else 0
        return {
            "format": _KIND, "records": len(self.pipeline.images), "population": population, "seed": self._seed,
            "tag": self.pipeline.tag, "data": digest.hexdigest(),
        }  # fmt: skip


def _fitted(design: _Design, missing: list[int], workers: int, where: Place) -> Iterator[tuple[int, Fitted]]:
    """The missing shadows as they come; after one that fails those under way still come, and then its error."""
    if not missing:
        return
    first, *rest = missing
    if where == "threads":
        try:
            found, drew = _alone(design.pipeline, design.inside[first], design.seed_of(first))
        except Exception as early:
            early.add_note(f"raised in shadow {first} of {design.count}")
            raise
        yield first, found
        if drew and workers > 1 and rest:
            warnings.warn(
                "fit draws from torch's global generator, which several threads share: the shadows are sound, but not "
                "the same when they are made again. Draw from seed, or give where='processes', or workers=1",
                UserWarning,
                stacklevel=4,
            )
    else:
        rest = missing
    with _pool(design.pipeline, workers, where) as pool:
        jobs: dict[Future[Fitted], int] = {}
        for number in rest:
            arguments = (design.inside[number].numpy(), design.seed_of(number))
            if where == "processes":
                jobs[pool.submit(_there, *arguments)] = number
            elif workers == 1:
                jobs[pool.submit(_seeded, design.pipeline, design.inside[number], arguments[1])] = number
            else:
                jobs[pool.submit(fit_once, design.pipeline, design.inside[number], arguments[1])] = number
        failed: BaseException | None = None
        try:
            for job in as_completed(jobs):
                error = None if job.cancelled() else job.exception()
                if error is not None and failed is None:
                    error.add_note(f"raised in shadow {jobs[job]} of {design.count}")
                    failed = error
                    for other in jobs:
                        other.cancel()
                elif error is None and not job.cancelled():
                    yield jobs[job], job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if failed is not None:
            raise failed


def _pool(pipeline: Pipeline, workers: int, where: Place) -> Executor:
    if where == "processes":
        return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(pipeline,))
    torch.set_num_threads(torch.get_num_threads())  # else threads to come would inherit the workers' count
    return ThreadPoolExecutor(workers, "shadow", initializer=torch.set_num_threads, initargs=(1,))


def _alone(pipeline: Pipeline, inside: Tensor, seed: int) -> tuple[Fitted, bool]:
    """One fit in a thread as the others will have, and whether it drew from the global generator."""
    with _pool(pipeline, 1, "threads") as pool:
        return pool.submit(_watched, pipeline, inside, seed).result()


def _watched(pipeline: Pipeline, inside: Tensor, seed: int) -> tuple[Fitted, bool]:
    with torch.random.fork_rng(devices=[]):
        before = torch.default_generator.manual_seed(seed).get_state()
        found = fit_once(pipeline, inside, seed)
        return found, not torch.equal(before, torch.default_generator.get_state())


def _seeded(pipeline: Pipeline, inside: Tensor, seed: int) -> Fitted:
    return _watched(pipeline, inside, seed)[0]


_theirs: list[Pipeline] = []


def _begin(pipeline: Pipeline) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    _theirs[:] = [pipeline]


def _there(inside: object, seed: int) -> Fitted:
    return _seeded(_theirs[0], torch.as_tensor(inside), seed)


def _sendable(pipeline: Pipeline) -> None:
    try:
        pickle.dumps(pipeline.fit)
    except Exception as error:
        raise ValueError(
            "where='processes' needs a fit that can be sent there, a function of a module or an object of such a class "
            f"({str(error).splitlines()[0]}); give where='threads' for closures and notebooks"
        ) from error


@contextlib.contextmanager
def _kept(design: _Design, out: str | Path | None) -> Iterator[dict[int, Fitted]]:
    """Own the folder, and give what it holds of this design."""
    if out is None:
        yield {}
        return
    if not isinstance(out, str | Path):
        raise TypeError(f"out must be a folder's path, got {type(out).__name__}")
    with owned(Path(out) / "shadows.lock", f"the folder of shadows {out}"):
        _same(design.facts(), Path(out) / "design.json")
        done = {}
        for number in range(design.count):
            path = _path(out, number)
            if path.exists():
                tensors, facts = read_tensors(path, kind=_KIND, what="a shadow's scores")
                done[number] = Fitted(
                    {n.removeprefix("scores."): t for n, t in tensors.items() if n.startswith("scores.")},
                    {n.removeprefix("population."): t for n, t in tensors.items() if n.startswith("population.")},
                    float(facts["seconds"]),
                )
        yield done


def _same(facts: Mapping[str, object], path: Path) -> None:
    if not path.exists():
        if any(path.parent.glob("shadow-*.safetensors")):
            raise ValueError(f"out, {path.parent}, holds shadows but no design.json; give an empty folder")
        write_atomically(path, json.dumps(facts, indent=1) + "\n")
        return
    there = json.loads(path.read_text())
    differ = [f"{k} {there.get(k)!r:.40}, here {v!r:.40}" for k, v in facts.items() if there.get(k) != v]
    if differ:
        raise ValueError(
            f"out, {path.parent}, holds shadows of another design ({'; '.join(differ)}); give another folder, or the "
            "pipeline and seed that it was begun with"
        )


def _path(out: str | Path, number: int) -> Path:
    return Path(out) / f"shadow-{number:05d}.safetensors"


def _keep(out: str | Path | None, number: int, one: Fitted) -> None:
    if out is not None:
        tensors = {f"scores.{n}": t for n, t in one.scores.items()}
        tensors |= {f"population.{n}": t for n, t in one.population.items()}
        write_tensors(_path(out, number), tensors, {"format": _KIND, "seconds": repr(one.seconds)})


def _gathered(design: _Design, done: Mapping[int, Fitted]) -> Shadows:
    ordered = [done[number] for number in range(design.count)]
    names = {n: tuple(t.shape) for n, t in ordered[0].scores.items()}
    for number, one in enumerate(ordered):
        other = {n: tuple(t.shape) for n, t in one.scores.items()}
        if other != names:
            raise ValueError(
                f"fit must return the same scorers every time, got {names} in shadow 0 and {other} in shadow {number}"
            )
    return Shadows(
        design.inside,
        {n: torch.stack([one.scores[n] for one in ordered]) for n in names},
        {n: torch.stack([one.population[n] for one in ordered]) for n in ordered[0].population},
        design.pipeline.labels.long().cpu(),
    )
