"""Fair comparison of methods: equally large hyperparameter searches on validation data, and several seeds."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distillkit._utils import check
from distillkit._utils.processes import worker_pool
from distillkit._utils.progress import bar
from distillkit._utils.provenance import git_commit
from distillkit._utils.tables import Table
from distillkit.data import Split
from distillkit.locking import locked
from distillkit.privacy import Guarantee
from distillkit.serialization import to_config
from distillkit.study._design import Estimate, estimate_rows, make_design
from distillkit.study._execution import PreparedRun, RunSpec, run_all, set_aside
from distillkit.study._guarantee import study_guarantee
from distillkit.study._records import Records, read_records, write_json, write_study
from distillkit.study._tables import summary_table
from distillkit.study._tuning import TuningResult, choose, read_choice
from distillkit.study.candidate import RULES, Candidate, Cost, OutOfTime
from distillkit.study.figures import curves
from distillkit.study.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study:
    """Comparison of candidates on tasks with several seeds, with all records in one folder.

    `run` executes all runs that are not finished, so call it again after any interruption. First, tuning runs compare
    each candidate's configurations (values of its settings) on validation data of the task, with seeds that are not
    used in any table. All candidates have the same number of configurations. The best configuration according to `rule`
    is recorded in `choice.json`. Each candidate then runs with its best configuration, once per task and seed, and is
    tested on the test set. All tables are made from the folder, so you can also make them later.

        study = Study("runs/hospitals", task, {"FedAvg": Federated(FedAvg, search=grid(lr=[0.03, 0.1]))})
        study.run()
        print(study.table())

    You may add tasks, candidates, seeds, and configurations at the end of all searches to an existing study. Runs with
    a configuration that is no longer the best are moved to the folder `replaced`. A changed task or candidate with an
    existing name is refused.

    Args:
        out: path of the study's folder.
        tasks: one task, or several tasks with different names.
        candidates: candidates by name. All searches must have the same number of configurations.
        seeds: seeds of the final runs.
        tune_seeds: seeds of the tuning runs; disjoint from `seeds`.
        tune_on: task on which configurations are compared. The best configuration is then used on all tasks. If the
            data of the study are private, pass a task with public data, because every tuning run on private data uses
            up privacy budget. Default: configurations are compared on each task separately.
        rule: criterion for the best configuration, averaged over `tune_seeds`: "last" for the accuracy after the last
            round, "late" for the mean accuracy over late rounds, or "own" for the mean accuracy of the clients, each on
            its own test set (see `Task.own_tests`). In a tie, the first configuration is chosen. The option `rule` of a
            candidate takes precedence. The accuracy after one round with one seed is noisy: prefer "late" with at least
            two `tune_seeds`.
        late_rounds: number of last rounds whose mean accuracy is the column `accuracy_late` and the criterion of the
            rule "late". Default: the second half of the rounds.

    Attributes:
        out: path of the study's folder.
        design: tasks, candidates and seeds, and the list of runs that follows from them.
        rule, late_rounds: arguments of the constructor.

    Raises:
        TypeError, ValueError: an argument is invalid, a name is used twice, or the candidates' searches differ in size.
    """

    def __init__(
        self,
        out: str | Path,
        tasks: Task | Sequence[Task],
        candidates: Mapping[str, Candidate],
        *,
        seeds: Sequence[int] = (0, 1, 2),
        tune_seeds: Sequence[int] = (100,),
        tune_on: Task | None = None,
        rule: Literal["last", "late", "own"] = "last",
        late_rounds: int | None = None,
    ) -> None:
        self.out = check.folder(out, "out")
        self.design = make_design(tasks, candidates, seeds, tune_seeds, tune_on)
        check.one_of(rule, "rule", tuple(RULES))
        self.rule: Literal["last", "late", "own"] = rule
        self.design.require_rules(self.rule)
        self.late_rounds = None if late_rounds is None else check.positive_int(late_rounds, "late_rounds")
        self._splits: dict[str, Split] = {}

    @property
    def num_configurations(self) -> int:
        """Number of configurations that tuning compares for each candidate; 1 if nothing is tuned."""
        return self.design.num_configurations

    def __repr__(self) -> str:
        design = self.design
        size = f"{len(design.tasks)} tasks x {len(design.candidates)} candidates x {len(design.seeds)} seeds"
        return f"Study({str(self.out)!r}, {size}, {self.num_configurations} configurations each)"

    def run(
        self, *, processes: int = 1, executor: Any = None, workers: int = 1, device: str = "cpu", trial: bool = True,
        progress: bool = True, seconds: float | None = None,
        on_run: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> Records:  # fmt: skip
        """Execute all runs that are not finished, and resume interrupted runs.

        Several calls, also on several machines, may share a folder: each run is executed by one of them. If a worker
        is killed, another continues its run from the last saved state.

        Args:
            processes: number of concurrent runs. With more than one, each run has its own process, and a script needs
                `if __name__ == "__main__":`. Results do not depend on this number.
            executor: executor of the runs: a `concurrent.futures.Executor`, such as `client.get_executor()` of Dask,
                or an object with such a method `submit`, as those of `submitit`. Its workers must see the study's
                folder under the same path, and import the modules that tasks and candidates use. `processes` is then
                the number of runs that it executes at a time, for the estimate.
            workers: number of threads in which each run trains and tests its clients. It does not affect the results.
            device: device to compute on, "cpu" or "cuda".
            trial: whether to estimate the total cost first, from a short trial run of each candidate; see `estimate`.
            progress: whether to show the estimate, and a bar with the remaining time.
            seconds: wall time after which the call stops, as soon as the current round or condensation step is finished
                and saved. At least one round or step is executed. `missing` of the returned records lists the
                unfinished runs; the next call continues them. Default: no limit.
            on_run: function that is called with the summary of each run when the run ends. It is not called for
                tuning runs (which choose the configurations), nor for runs that were already finished.

        Returns:
            The records of all finished runs except tuning runs.

        Raises:
            distillkit.serialization.SerializationError: a task has no JSON form; or a candidate has none, and
                its run is sent to another process.
            ValueError: the folder contains runs of another study, or all configurations of a candidate failed.
            distillkit.locking.InUse: another process executes a run whose settings have changed.
            WorkerKilled: the workers of a run were killed twice; all other runs are finished.
        """
        if on_run is not None:
            check.callable_with(on_run, "on_run", ["line"], "print, called with a finished run's summary")
        with self._begin(processes, executor, workers, device, trial, progress, seconds) as how:
            final = self.design.final_runs(self._tune(**how))
            for spec in final:
                set_aside(self.out, spec)
            self._execute(final, "runs", **how, on_run=on_run)
        if any(self.out.glob("*/summary.json")):
            found = self.records()
            write_json(
                self.out / "summary.json", [record.line for record in found]
            )  # an interruption may have left it out
            return found
        return Records([], [(spec.task, spec.method, spec.seed) for spec in self.design.final_runs({})])

    def tune(
        self, *, processes: int = 1, executor: Any = None, workers: int = 1, device: str = "cpu", trial: bool = True,
        progress: bool = True, seconds: float | None = None,
    ) -> list[TuningResult]:  # fmt: skip
        """Execute the tuning runs that are not finished, but no final runs, for example to extend a search first.

        Args:
            processes, executor, workers, device, trial, progress, seconds: arguments of `run`.

        Returns:
            The scores and the choice of each task and candidate, as `read_choice` returns them; empty if `seconds` have
            passed before the tuning runs were finished.
        """
        with self._begin(processes, executor, workers, device, trial, progress, seconds) as how:
            self._tune(**how)
            return read_choice(self.out)[0]
        return []

    def estimate(self, *, processes: int = 1, executor: Any = None, workers: int = 1, device: str = "cpu") -> Estimate:
        """Estimate the cost of all unfinished runs from a short trial run of each candidate on each task.

        A trial run executes the candidate's first configuration for a short time: two rounds of a federated method, or
        some steps of a condensation. The results of trial runs are discarded.

        Args:
            processes, executor, workers, device: arguments of `run`.

        Returns:
            The estimated wall time, bytes sent to and from the server, and peak memory, by task and candidate; `print`
            the estimate to see a table.
        """
        processes, options = _checked(processes, executor, workers, device)
        with _workers(processes, executor) as pool:
            return self._estimate(pool, processes, options)

    def records(self) -> Records:
        """Return the records of all finished runs, except the tuning runs."""
        return read_records(self.out)

    def frame(self) -> Any:
        """Return the summaries of all finished runs as a `pandas.DataFrame`; see `Records.frame`."""
        return self.records().frame()

    def table(self, *, columns: Sequence[str] = ()) -> Table:
        """Return a table of the accuracies after the last and the best round, by task and candidate.

        Args:
            columns: names of further columns of the records, such as "bytes_up"; see `summary_table`.
        """
        table, by_data = summary_table(self.records(), columns=columns), dict[str, list[str]]()
        for name, task in self.design.every_task.items():
            by_data.setdefault(self._data(task), []).append(name)
        totals = {" and ".join(names): study_guarantee(self.out, data) for data, names in by_data.items()}
        notes = [f"All runs on {names} that read private images: {g}." for names, g in totals.items() if g is not None]
        return replace(table, notes=(*table.notes, *notes))

    def guarantee(self, task: str) -> Guarantee:
        """Return the privacy guarantee of all runs of this study that read the images of a task.

        The releases of tuning runs, failed runs and runs on other tasks with the same images are included. Images are
        the same if the tasks have equal `data`; a remark counts the private runs on other images. Runs that protect
        whole clients have no joint guarantee over several tasks or seeds, whose clients can be other people. The
        accuracies of tuning runs, and the choice of settings by them, are exact and not covered, as a remark of the
        guarantee states. With `tune_on=` other images, or one configuration per candidate, there are none.

        Args:
            task: name of the task.

        Raises:
            ValueError: the study has no such task, or no run on the task's images recorded its
                releases in a privacy ledger.
        """
        data = self._data(self.design.every_task[check.one_of(task, "task", tuple(self.design.every_task))])
        if (total := study_guarantee(self.out, data)) is None:
            raise ValueError(f"task must be one whose images a private method has read; {task!r} has no ledger")
        return total

    def _config(self, task: Task) -> Any:
        return to_config(task, store=self.out / "data", name=f"tasks[{task.name!r}]")

    def _data(self, task: Task) -> str:
        """Return a text that is equal for tasks with equal images."""
        return json.dumps(self._config(task)["with"]["data"])

    def curves(self, **options: Any) -> Figure:
        """Draw the accuracy over rounds: the mean over seeds, and a band of one standard deviation.

        Args:
            options: options of `distillkit.study.curves`, for example `by="bytes"`.
        """
        return curves(self.records(), **options)

    @contextmanager
    def _begin(
        self, processes: int, executor: Any, workers: int, device: str, trial: bool, progress: bool,
        seconds: float | None,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Check the arguments of `run`, write `study.json`, and provide the arguments of `_execute`."""
        processes, options = _checked(processes, executor, workers, device)
        deadline = None if seconds is None else time.time() + check.real_number(seconds, "seconds", above=0.0)
        tune_on, facts = self.design.tune_on, {"rule": self.rule, "late_rounds": self.late_rounds}
        fixed = {**facts, "tune_seeds": list(self.design.tune_seeds), "tune_on": tune_on and self._config(tune_on)}
        with locked(self.out / ".owner.lock", f"the study in {self.out}"):
            write_study(self.out, fixed, self.design.config(self.out))
        with _workers(processes, executor) as pool, contextlib.suppress(OutOfTime):
            if check.boolean(trial, "trial"):
                estimate = self._estimate(pool, processes, options)
                if check.boolean(progress, "progress") and estimate.rows:
                    print(estimate, end="\n\n", flush=True)
            options |= {"commit": git_commit(), "deadline": deadline}
            yield {"executor": pool, "options": options, "progress": progress}

    def _tune(self, **how: Any) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Execute the tuning runs with these arguments of `_execute`, and return the chosen settings."""
        runs = self.design.tuning_runs()
        self._execute([s for search in runs.values() for specs in search for s in specs], "tuning runs", **how)
        return choose(self.out, self.design, self.rule, self.late_rounds)

    def _execute(
        self, specs: Sequence[RunSpec], unit: str, executor: Any, options: Mapping[str, Any], progress: bool,
        on_run: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:  # fmt: skip
        """Execute the unfinished runs among `specs` with these options of `PreparedRun.execute`, and show a bar."""
        missing = [spec for spec in specs if not (self.out / spec.folder / "summary.json").exists()]
        with bar(len(missing), unit, unit="run", progress=progress) as shown:
            for spec, summary in run_all(missing, self._prepare, self.out, executor, {**options, "progress": False}):
                shown.update()
                if summary["accuracy_last"] is not None:
                    shown.set_postfix_str(f"{spec.run}: {100 * summary['accuracy_last']:.1f} %")
                if not spec.validation:
                    write_json(self.out / "summary.json", [record.line for record in self.records()])
                if on_run is not None:
                    shown.clear()
                    on_run(summary)

    def _prepare(self, spec: RunSpec) -> PreparedRun:
        task, candidate = self.design.every_task[spec.task], self.design.candidates[spec.method]
        data = self._data(task)
        if data not in self._splits:  # keep only the images of the last call, for tasks with the same data
            self._splits = {data: task.load()}
        try:
            built = candidate.build(task, self._splits[data], spec.settings)
        except TypeError as error:
            where = f"candidates[{spec.method!r}]"
            raise TypeError(f"{where} cannot be built with {dict(spec.settings)}: {error}") from error
        return PreparedRun(spec, task, self._splits[data], candidate, built)

    def _estimate(self, executor: Any, processes: int, options: Mapping[str, Any]) -> Estimate:
        def trial(spec: RunSpec) -> tuple[Cost, int | None]:
            run = self._prepare(spec)
            if executor is None:
                return run.trial(**options)
            cost: tuple[Cost, int | None] = executor.submit(run.serialize(self.out).trial, options).result()
            return cost

        return Estimate(estimate_rows(self.design, self.out, trial), processes)


def _checked(processes: int, executor: Any, workers: int, device: str) -> tuple[int, dict[str, Any]]:
    """Check the arguments of `Study.run`, and return the number of processes and the options of every run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a worker process of this study imports the script that started it, and would start the study again: put "
            "the call under `if __name__ == '__main__':`"
        )
    if executor is not None and (isinstance(executor, type) or not callable(getattr(executor, "submit", None))):
        raise TypeError(f"executor must be a concurrent.futures.Executor, got {executor!r:.60}")
    options = {"workers": check.positive_int(workers, "workers"), "device": str(check.device(device))}
    return check.positive_int(processes, "processes"), options


@contextmanager
def _workers(processes: int, executor: Any) -> Iterator[Any]:
    """Provide the `executor`, or one with worker processes if there are several; None to execute runs here."""
    if executor is not None or processes == 1:
        yield executor
        return
    pool = worker_pool(processes)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
