"""Training of shadow models in threads, or by an executor."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.membership.pipeline import Pipeline, RunScores, score_run
from distillkit._utils.threads import create_thread_pool


class Job(NamedTuple):
    """Shadow model to train.

    Attributes:
        number: index of the shadow model.
        inside: whether each record is in its training set, bool [N].
        seed: seed of the training.
    """

    number: int
    inside: Tensor
    seed: int


def fit_shadows(
    pipeline: Pipeline, jobs: Sequence[Job], workers: int, executor: Executor | None
) -> Iterator[tuple[int, RunScores]]:
    """Train shadow models in parallel, and yield a pair of index and scores for each model as soon as it is finished.

    If the training of a model fails, the models in progress are finished and yielded, and then the error is raised.

    Args:
        pipeline: pipeline that trains a model on some of its records.
        jobs: shadow models to train.
        workers: number of threads that train models at the same time.
        executor: executor that trains the models instead of threads; see `run_shadows`.
    """
    if jobs and executor is None:
        first, *jobs = jobs
        found, drew = fit_first(pipeline, first)
        yield first.number, found
        if drew and workers > 1 and jobs:
            warnings.warn(
                "fit draws from torch's global generator, which several threads share: the shadows are valid but not "
                "reproducible. Draw from seed, or use an executor or workers=1",
                UserWarning,
                stacklevel=3,
            )
    if not jobs:
        return
    failed: BaseException | None = None
    pool = executor or create_thread_pool(workers, "shadow")
    # only a single thread can use torch's seeded global generator
    fit = _fit_in_worker if executor is not None else _fit_seeded if workers == 1 else score_run
    running = {pool.submit(fit, pipeline, job.inside, job.seed): job.number for job in jobs}
    try:
        for done in as_completed(running):
            error = None if done.cancelled() else done.exception()
            if error is not None and failed is None:
                failed = _add_note(error, running[done])
                for other in running:
                    other.cancel()
            elif error is None and not done.cancelled():
                yield running[done], done.result()
    finally:
        for future in running:
            future.cancel()
        if executor is None:
            pool.shutdown()
    if failed is not None:
        raise failed


def fit_first(pipeline: Pipeline, job: Job) -> tuple[RunScores, bool]:
    """Train one shadow model in a thread, and detect whether the training draws from torch's global generator.

    Args:
        pipeline: pipeline that trains a model on some of its records.
        job: shadow model to train.

    Returns:
        The scores of the records under the trained model, and whether the global generator was used.
    """
    with create_thread_pool(1, "shadow") as pool:
        try:
            return pool.submit(_fit_and_detect_draws, pipeline, job.inside, job.seed).result()
        except Exception as error:
            _add_note(error, job.number)
            raise


def _add_note(error: BaseException, number: int) -> BaseException:
    error.add_note(f"raised in shadow {number}")
    return error


def _fit_and_detect_draws(pipeline: Pipeline, inside: Tensor, seed: int) -> tuple[RunScores, bool]:
    with torch.random.fork_rng(devices=[]):
        before = torch.default_generator.manual_seed(seed).get_state()
        found = score_run(pipeline, inside, seed)
        return found, not torch.equal(before, torch.default_generator.get_state())


def _fit_seeded(pipeline: Pipeline, inside: Tensor, seed: int) -> RunScores:
    return _fit_and_detect_draws(pipeline, inside, seed)[0]


def _fit_in_worker(pipeline: Pipeline, inside: Tensor, seed: int) -> RunScores:
    torch.set_num_threads(1)
    return _fit_seeded(pipeline, inside, seed)


def require_sendable(pipeline: Pipeline) -> None:
    """Check that the pipeline's function `fit` can be pickled, so that it can be sent to other processes.

    Raises:
        ValueError: `fit` cannot be pickled. The message explains what to pass instead.
    """
    try:
        pickle.dumps(pipeline.fit)
    except Exception as error:
        raise ValueError(
            "executor needs a picklable fit, a function of a module or an instance of a module's class "
            f"({str(error).splitlines()[0]}); leave executor out for closures and notebooks"
        ) from error
