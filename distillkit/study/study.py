"""Comparing ways fairly: equal tries on a validation split, several seeds, complete records, tables made from them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.progress import bar
from distillkit._utils.provenance import git_commit, versions
from distillkit.data import Split
from distillkit.locking import locked, worker_pool
from distillkit.serialization import to_config
from distillkit.study import _selection, tuning
from distillkit.study._execution import Order, Said, attempt, attempt_far, perform, perform_far, read_line, said
from distillkit.study._plan import planned
from distillkit.study.candidate import Candidate, Cost
from distillkit.study.cost_estimate import Estimate, expected
from distillkit.study.figures import curves
from distillkit.study.formatting import Table
from distillkit.study.records import STUDY, Records, read_json, read_records
from distillkit.study.tables import summary_table
from distillkit.study.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Study"]


class Study:
    """Tasks x ways x seeds in one folder: settings chosen fairly, runs that can be repeated, tables from their records.

    `run` does what is not done yet, so it is simply called again after an interruption, whatever it was. Every way
    first tries its settings, as many as every other way, on the validation part of the task, with seeds that no table
    has; the best by a stated rule are kept (`choice.json`), and each way then runs with them, once for every task and
    seed, tested on the test set. Whatever a table says is read from the folder, so tables can be made later too.

        study = Study("runs/hospitals", task, {"FedAvg": Federated(FedAvg, search=grid(lr=[0.03, 0.1]))})
        study.run()
        print(study.table())

    Tasks, ways and seeds may be added to a study that was run; one that has changed is refused.

    Args:
        out: the folder; `distillkit.study.records` says what lies in it.
        tasks: one or several, of different names.
        candidates: what is compared, by name. All that have tries of their own have equally many.
        seeds: of the runs in the tables.
        tune_seeds: of the tries; none of `seeds`.
        tune_on: the task on which settings are tried for all tasks: for private data, where every try on the data
            itself would have to be paid for. Default: each task for itself.
        rule: by what the best try is chosen, as a mean over `tune_seeds`: the accuracy after the "last" round, or on
            the clients' "own" tests. Of equals the first. A way may have its own rule.

    Attributes:
        out: the folder.
        design: the tasks, ways and seeds, and which runs these make.
        rule: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, a name is given twice, or numbers of tries differ.
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
        rule: Literal["last", "own"] = "last",
    ) -> None:
        self.out = Path(out)
        self.design = planned(tasks, candidates, seeds, tune_seeds, tune_on)
        self.rule = check.one_of(rule, "rule", tuple(_selection.RULES))
        self._read: dict[str, Split] = {}

    @property
    def num_configurations(self) -> int:
        """How many settings each way tries; 1: nothing is tuned."""
        return self.design.num_configurations

    def __repr__(self) -> str:
        design = self.design
        size = f"{len(design.tasks)} tasks x {len(design.candidates)} ways x {len(design.seeds)} seeds"
        return f"Study({str(self.out)!r}, {size}, {self.num_configurations} configurations each)"

    # Running.

    def run(
        self, *, processes: int = 1, workers: int = 1, device: str = "cpu", trial: bool = True, progress: bool = True,
        on_run: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> Records:  # fmt: skip
        """Do all runs that are not done yet; one that was interrupted goes on where it was.

        Args:
            processes: runs at a time; more than one each in a process of its own, for which a script needs its
                `if __name__ == "__main__":`. No result depends on it.
            workers: threads of each run that run clients. No result depends on it.
            device: where to compute, "cpu" or "cuda".
            trial: first do a moment of each way and say what all will take, see `estimate`.
            progress: show that, and a bar with the time left.
            on_run: called with the line of each run of the tables as soon as it ends, to print it, say. Runs that were
                done before are not told again, nor are tries.

        Returns:
            The records of the runs (not of the tries).

        Raises:
            distillkit.serialization.SerializationError: a task, or with several processes a way, has no JSON form.
            ValueError: the folder holds another study; no try of a way has a score.
            distillkit.locking.InUse: another process runs in the folder; it is named.
        """
        processes, options = self._options(processes, workers, device)
        if on_run is not None:
            check.callable_with(on_run, "on_run", ["line"], "print, called with a finished run's line")
        with self._owned():
            self._begin()
            seconds: dict[tuple[str, str], float] = {}
            if check.boolean(trial, "trial"):
                found = self._estimate(options, processes)
                seconds = {(row.task, row.method): row.cost.seconds for row in found.rows}
                if check.boolean(progress, "progress") and found.rows:
                    print(found, end="\n\n", flush=True)
            options |= {"commit": git_commit()}
            trying = [order for tries in self.design.tuning_runs().values() for runs in tries for order in runs]
            self._do(trying, "tries", processes, options, seconds, progress)
            self._do(self.design.final_runs(self._choose()), "runs", processes, options, seconds, progress, on_run)
            return self.records()

    def estimate(self, *, processes: int = 1, workers: int = 1, device: str = "cpu") -> Estimate:
        """Do a moment of each way on each task, and say what all runs that are not done yet will take.

        The trial of a way is its first two rounds, or some steps, with its first try. It writes nothing, and its
        results are thrown away.

        Args:
            processes, workers, device: see `run`.

        Returns:
            Seconds, bytes and memory by task and way; `print` it.
        """
        processes, options = self._options(processes, workers, device)
        with self._owned():
            return self._estimate(options, processes)

    def _options(self, processes: int, workers: int, device: str) -> tuple[int, dict[str, Any]]:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "a worker process of this study imports the script that started it, and came to the study again: put "
                "the call under `if __name__ == '__main__':`"
            )
        options = {"workers": check.positive_int(workers, "workers"), "device": str(check.device(device))}
        return check.positive_int(processes, "processes"), options

    def _owned(self) -> AbstractContextManager[None]:
        return locked(self.out / ".owner.lock", f"the study in {self.out}")

    def _begin(self) -> None:
        """Write down what is asked for, if nothing that was asked for before is another thing now."""
        store, path = self.out / "data", self.out / "study.json"
        asked: dict[str, Any] = {
            "format": STUDY,
            "rule": self.rule,
            "tune_seeds": list(self.design.tune_seeds),
            "tune_on": None
            if self.design.tune_on is None
            else to_config(self.design.tune_on, store=store, name="tune_on"),
            "tasks": {n: to_config(task, store=store, name=f"tasks[{n!r}]") for n, task in self.design.tasks.items()},
            "ways": {name: self._way_said(name, way) for name, way in self.design.candidates.items()},
            "seeds": list(self.design.seeds),
            "parts": self.design.parts,
        }
        before = _read_study(path) or asked
        for key in ("rule", "tune_seeds", "tune_on"):
            if before[key] != asked[key]:
                raise ValueError(f"{path} has another {key}, {before[key]}, than {asked[key]}: give another folder")
        for key in ("tasks", "ways"):
            both = [name for name in asked[key] if name in before[key]]
            if changed := [name for name in both if before[key][name] != asked[key][name]]:
                raise ValueError(
                    f"{path} has other {key} of the names {', '.join(changed)}: give these another name, or another "
                    "folder"
                )
            asked[key] = {**before[key], **asked[key]}
        others = {name: part for name, part in before.get("parts", {}).items() if name not in self.design.candidates}
        asked["parts"] = {**others, **asked["parts"]}
        write_atomically(path, json.dumps({**asked, "versions": versions()}, indent=1) + "\n")

    def _way_said(self, name: str, way: Candidate) -> dict[str, Any]:
        store = self.out / "arguments"
        parts = {"way": way.for_record(), "settings": dict(way.settings), "tries": [dict(t) for t in way.search]}
        said = {key: to_config(part, store=store, name=f"candidates[{name!r}].{key}") for key, part in parts.items()}
        options = said["way"]["with"]  # by the names of the first records, so that older studies can be continued
        said["way"]["with"] = {way.old_options.get(option, option): value for option, value in options.items()}
        return {**said, "like": way.like, "rule": way.rule}

    def _choose(self) -> dict[tuple[str, str], int]:
        """Choose among the tries, and write the choice down with all that it rests on."""
        chosen: dict[tuple[str, str], int] = {}
        said: dict[str, dict[str, Any]] = {task: {} for task in self.design.tuned_tasks}
        for (task, method), tries in self.design.tuning_runs().items():
            rule = self.design.candidates[method].rule or self.rule
            scored = [
                _selection.scored([read_line(self.out / o.folder / "summary.json") for o in runs], rule)
                for runs in tries
            ]
            chosen[task, method] = _selection.chosen(scored, f"candidates[{method!r}] on {task}")
            said[task][method] = {"tries": scored, "chosen": chosen[task, method], "like": None, "rule": rule}
        for task in said:
            for method, way in self.design.candidates.items():
                if self.design.has(task, method):
                    said[task].setdefault(method, {"tries": [], "chosen": None if way.like else 0, "like": way.like})
        path = self.out / "choice.json"
        before = read_json(path)["tasks"] if path.exists() else {}
        said = {task: {**before.get(task, {}), **said.get(task, {})} for task in {**before, **said}}
        found = {"format": tuning.FORMAT, "rule": self.rule, "seeds": list(self.design.tune_seeds), "tasks": said}
        write_atomically(path, json.dumps(found, indent=1) + "\n")
        return chosen

    # Doing it.

    def _do(
        self, orders: Sequence[Order], unit: str, processes: int, options: Mapping[str, Any],
        seconds: Mapping[tuple[str, str], float], progress: bool,
        on_run: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:  # fmt: skip
        """Do what is not done of some orders, with a bar that counts expected seconds where they are known."""
        left = [order for order in orders if not (self.out / order.folder / "summary.json").exists()]
        weights = {order.run: max(1, round(seconds.get((order.task, order.method), 1.0))) for order in left}
        with bar(sum(weights.values()), f"{len(left)} {unit}", unit="s", progress=progress) as shown:
            for order, line in self._done(left, processes, {**options, "progress": False}):
                shown.update(weights[order.run])
                if line["accuracy_last"] is not None:
                    shown.set_postfix_str(f"{order.run}: {100 * line['accuracy_last']:.1f} %")
                if not order.validation:
                    self._summarise()
                if on_run is not None:
                    shown.clear()
                    on_run(line)

    def _done(
        self, orders: Sequence[Order], processes: int, options: Mapping[str, Any]
    ) -> Iterator[tuple[Order, dict[str, Any]]]:
        if processes == 1:
            for order in orders:
                task, way = self.design.task(order.task), self.design.candidates[order.method]
                yield order, perform(order, task, self._split(task), way, self._made(order), self.out, **options)
            return
        wanted = [(order, self._said(order)) for order in orders]
        with worker_pool(processes) as pool:
            futures = {pool.submit(perform_far, said, self.out, options): order for order, said in wanted}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _split(self, task: Task) -> Split:
        """The images of a task, read once for all tasks with the same; others that were read before are let go."""
        key = json.dumps(to_config(task.data, store=self.out / "data", name=f"tasks[{task.name!r}].data"))
        if key not in self._read:
            self._read = {key: task.load()}
        return self._read[key]

    def _made(self, order: Order) -> Any:
        task = self.design.task(order.task)
        try:
            return self.design.candidates[order.method].build(task, self._split(task), order.settings)
        except TypeError as error:
            raise TypeError(
                f"candidates[{order.method!r}] cannot be made with {dict(order.settings)}: {error}"
            ) from error

    def _said(self, order: Order) -> Said:
        return said(
            order, self.design.task(order.task), self.design.candidates[order.method], self._made(order), self.out
        )

    def _summarise(self) -> None:
        lines = [record.line for record in read_records(self.out)]
        write_atomically(self.out / "summary.json", json.dumps(lines, indent=1) + "\n")

    def _estimate(self, options: Mapping[str, Any], processes: int) -> Estimate:
        def attempted(order: Order) -> tuple[Cost, int | None]:
            if processes > 1:
                with worker_pool(1) as pool:
                    return pool.submit(attempt_far, self._said(order), self.out, options).result()
            task = self.design.task(order.task)
            return attempt(
                order, task, self._split(task), self.design.candidates[order.method], self._made(order), **options
            )

        return Estimate(expected(self.design, self.out, attempted), processes)

    # What came of it.

    def records(self) -> Records:
        """The records of all runs that are done so far (not of the tries)."""
        return read_records(self.out)

    def table(self, *, columns: Sequence[str] = ()) -> Table:
        """By task and way the accuracy after the last round, the best one, and what else is asked for.

        Args:
            columns: further columns of the records, as "bytes_up"; see `summary_table`.
        """
        return summary_table(self.records(), columns=columns)

    def curves(self, **options: Any) -> Figure:
        """The ways' accuracies over rounds, mean and spread over seeds.

        Args:
            options: as of `distillkit.study.curves`, `by="bytes"` say.
        """
        return curves(self.records(), **options)


def _read_study(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): give another folder") from error
    if not isinstance(found, dict) or found.get("format") != STUDY:
        said = found.get("format") if isinstance(found, dict) else None
        raise ValueError(f"{path} is of the format {said!r}, this version reads {STUDY!r}: give another folder")
    return found
