"""Execution of several runs of a study, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from distillkit._utils.processes import worker_pool
from distillkit.study._execution import PreparedRun, RunSpec
from distillkit.study.candidate import OutOfTime

__all__ = ["WorkerKilled", "run_all"]


class WorkerKilled(RuntimeError):
    """Error for a run whose worker process was killed. The message names the run; all other runs are finished."""


def run_all(
    specs: Sequence[RunSpec], prepare: Callable[[RunSpec], PreparedRun], out: Path, processes: int,
    options: Mapping[str, Any],
) -> Iterator[tuple[RunSpec, dict[str, Any]]]:  # fmt: skip
    """Execute runs, and yield the specification and the summary of each run when it ends.

    Args:
        specs: specifications of the runs.
        prepare: function that builds the objects of a run.
        out: the study's folder.
        processes: number of concurrent runs. With more than one, each runs in a worker process.
        options: options of `PreparedRun.execute`.

    Raises:
        WorkerKilled: the process of a run was killed; all other runs are finished.
        OutOfTime: the deadline in `options` has passed before all runs were finished.
    """
    if processes == 1:
        for index, spec in enumerate(specs):
            if index and options["deadline"] is not None and time.time() >= options["deadline"]:
                raise OutOfTime(f"{spec.run} was not started, because the deadline has passed")
            yield spec, prepare(spec).execute(out, **options)
        return
    waiting = {spec.folder: (spec, prepare(spec).serialize(out)) for spec in specs}
    with contextlib.suppress(BrokenProcessPool), worker_pool(processes) as pool:
        futures = {pool.submit(run.execute, options): spec for spec, run in waiting.values()}
        try:
            for future in as_completed(futures):
                summary = future.result()
                del waiting[futures[future].folder]
                yield futures[future], summary
        except OutOfTime:
            pool.shutdown(wait=True, cancel_futures=True)  # wait until the other runs have saved their states
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    killed = []
    for spec, run in waiting.values():  # a killed worker breaks its pool, so the remaining runs get one process each
        try:
            with worker_pool(1) as pool:
                summary = pool.submit(run.execute, options).result()
        except BrokenProcessPool:
            killed.append(spec.run)
        else:
            yield spec, summary
    if killed:
        raise WorkerKilled(
            f"the processes of {', '.join(killed)} were killed, perhaps for lack of memory; all other runs are "
            "finished. Let them use less memory (fewer workers, a smaller batch or chunk), and run the study again"
        )
