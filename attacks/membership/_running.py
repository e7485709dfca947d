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

from attacks.membership.pipeline import Fitted, Pipeline, fit_once
from distillkit._utils.threads import create_thread_pool
from distillkit.locking import exit_with_parent

__all__ = ["PLACES", "Job", "Place", "alone", "fitted", "require_sendable"]

Place = Literal["threads", "processes"]
PLACES = get_args(Place)
"""Where shadows are fitted; see `shadows`."""


class Job(NamedTuple):
    """A shadow that is to be fitted: its number, who is in it, bool [N], and its seed."""

    number: int
    inside: Tensor
    seed: int


def fitted(pipeline: Pipeline, jobs: Sequence[Job], workers: int, where: Place) -> Iterator[tuple[int, Fitted]]:
    """Fit shadows and give them, by number, as they come.

    After one that fails, those under way still come, and then its error.

    Args:
        pipeline: what is run.
        jobs: the shadows.
        workers: how many at a time.
        where: see `shadows`.
    """
    if jobs and where == "threads":
        first, *jobs = jobs
        found, drew = alone(pipeline, first)
        yield first.number, found
        if drew and workers > 1 and jobs:
            warnings.warn(
                "fit draws from torch's global generator, which several threads share: the shadows are sound, but not "
                "the same when they are made again. Draw from seed, or give where='processes', or workers=1",
                UserWarning,
                stacklevel=3,
            )
    if not jobs:
        return
    failed: BaseException | None = None
    with _pool(pipeline, workers, where) as pool:
        running = {_submitted(pool, pipeline, job, workers, where): job.number for job in jobs}
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


def alone(pipeline: Pipeline, job: Job) -> tuple[Fitted, bool]:
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


def _submitted(pool: Executor, pipeline: Pipeline, job: Job, workers: int, where: Place) -> Future[Fitted]:
    if where == "processes":
        return pool.submit(_there, job.inside.numpy(), job.seed)
    # torch's global generator can be lent to one thread at a time alone
    return pool.submit(_seeded if workers == 1 else fit_once, pipeline, job.inside, job.seed)


def _pool(pipeline: Pipeline, workers: int, where: Place) -> Executor:
    if where == "processes":
        return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(pipeline,))
    return create_thread_pool(workers, "shadow")


def _watched(pipeline: Pipeline, inside: Tensor, seed: int) -> tuple[Fitted, bool]:
    with torch.random.fork_rng(devices=[]):
        before = torch.default_generator.manual_seed(seed).get_state()
        found = fit_once(pipeline, inside, seed)
        return found, not torch.equal(before, torch.default_generator.get_state())


def _seeded(pipeline: Pipeline, inside: Tensor, seed: int) -> Fitted:
    return _watched(pipeline, inside, seed)[0]


_theirs: list[Pipeline] = []


def _begin(pipeline: Pipeline) -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    _theirs[:] = [pipeline]


def _there(inside: object, seed: int) -> Fitted:
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
            "where='processes' needs a fit that can be sent there, a function of a module or an object of such a class "
            f"({str(error).splitlines()[0]}); give where='threads' for closures and notebooks"
        ) from error
