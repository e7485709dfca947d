"""Fitting shadows, in threads or in processes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attacks.membership.pipeline import Pipeline, RunScores, score_run
from distillkit._utils.threads import create_thread_pool
from distillkit.locking import exit_with_parent

__all__ = ["BACKENDS", "Backend", "Job", "fit_first", "fit_shadows", "require_sendable"]

Backend = Literal["threads", "processes"]
BACKENDS = get_args(Backend)
"""Where shadows are fitted; see `run_shadows`."""


class Job(NamedTuple):
    """A shadow that is to be fitted: its number, who is in it, bool [N], and its seed."""

    number: int
    inside: Tensor
    seed: int


def fit_shadows(
    pipeline: Pipeline, jobs: Sequence[Job], workers: int, backend: Backend
) -> Iterator[tuple[int, RunScores]]:
    """Fit shadows and give them, by number, as they come.

    After one that fails, those under way still come, and then its error.

    Args:
        pipeline: what is run.
        jobs: the shadows.
        workers: how many at a time.
        where: see `run_shadows`.
    """
    if jobs and backend == "threads":
        first, *jobs = jobs
        found, drew = fit_first(pipeline, first)
        yield first.number, found
        if drew and workers > 1 and jobs:
            warnings.warn(
                "fit draws from torch's global generator, which several threads share: the shadows are sound, but not "
                "the same when they are made again. Draw from seed, or give backend='processes', or workers=1",
                UserWarning,
                stacklevel=3,
            )
    if not jobs:
        return
    failed: BaseException | None = None
    with _pool(pipeline, workers, backend) as pool:
        running = {_submitted(pool, pipeline, job, workers, backend): job.number for job in jobs}
        try:
            for done in as_completed(running):
                error = None if done.cancelled() else done.exception()
                if error is not None and failed is None:
                    failed = _noted(error, running[done])
                    for other in running:
                        other.cancel()
                elif error is None and not done.cancelled():
                    yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if failed is not None:
        raise failed


def fit_first(pipeline: Pipeline, job: Job) -> tuple[RunScores, bool]:
    """Fit one shadow in a thread as the others will have, and see whether it drew from the global generator.

    Args:
        pipeline: what is run.
        job: the shadow.
    """
    with _pool(pipeline, 1, "threads") as pool:
        try:
            return pool.submit(_watched, pipeline, job.inside, job.seed).result()
        except Exception as error:
            _noted(error, job.number)
            raise


def _noted(error: BaseException, number: int) -> BaseException:
    error.add_note(f"raised in shadow {number}")
    return error


def _submitted(pool: Executor, pipeline: Pipeline, job: Job, workers: int, backend: Backend) -> Future[RunScores]:
    if backend == "processes":
        return pool.submit(_there, job.inside.numpy(), job.seed)
    # torch's global generator can be lent to one thread at a time alone
    return pool.submit(_seeded if workers == 1 else score_run, pipeline, job.inside, job.seed)


def _pool(pipeline: Pipeline, workers: int, backend: Backend) -> Executor:
    if backend == "processes":
        return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(pipeline,))
    return create_thread_pool(workers, "shadow")


def _watched(pipeline: Pipeline, inside: Tensor, seed: int) -> tuple[RunScores, bool]:
    with torch.random.fork_rng(devices=[]):
        before = torch.default_generator.manual_seed(seed).get_state()
        found = score_run(pipeline, inside, seed)
        return found, not torch.equal(before, torch.default_generator.get_state())


def _seeded(pipeline: Pipeline, inside: Tensor, seed: int) -> RunScores:
    return _watched(pipeline, inside, seed)[0]


_theirs: list[Pipeline] = []


def _begin(pipeline: Pipeline) -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    _theirs[:] = [pipeline]


def _there(inside: object, seed: int) -> RunScores:
    return _seeded(_theirs[0], torch.as_tensor(inside), seed)


def require_sendable(pipeline: Pipeline) -> None:
    """Refuse a pipeline whose `fit` spawned processes could not import.

    Raises:
        ValueError: the message says what to give instead.
    """
    try:
        pickle.dumps(pipeline.fit)
    except Exception as error:
        raise ValueError(
            "backend='processes' needs a fit that can be sent there, a function of a module or an object of such a class "
            f"({str(error).splitlines()[0]}); give backend='threads' for closures and notebooks"
        ) from error
