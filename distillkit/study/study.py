"""Comparing ways fairly: equal tries on a validation split, several seeds, complete records, tables made from them."""

from __future__ import annotations

import json
import multiprocessing
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from distillkit import check
from distillkit.data import Split
from distillkit.files import write_atomically
from distillkit.owner import owned
from distillkit.owner import processes as worker_processes
from distillkit.progress import bar
from distillkit.provenance import VERSION, git_commit
from distillkit.recipes import recipe
from distillkit.study import choice, tuning
from distillkit.study.estimate import Estimate, Expected
from distillkit.study.perform import Order, Said, attempt, attempt_far, perform, perform_far, read_line, said
from distillkit.study.pictures import curves
from distillkit.study.records import STUDY, Records, read_records
from distillkit.study.tables import summary_table
from distillkit.study.task import Task
from distillkit.study.text import Table
from distillkit.study.way import Way

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Study"]


class Study:
    """Tasks x ways x seeds in one folder: settings chosen fairly, runs that can be repeated, tables from their records.

    `run` does what is not done yet, so it is simply called again after an interruption, whatever it was. Every way
    first tries its settings, as many as every other way, on the validation part of the task, with seeds that no table
    has; the best by a stated rule are kept (`choice.json`), and each way then runs with them, once for every task and
    seed, tested on the test set. Whatever a table says is read from the folder, so tables can be made later too.

        study = Study("runs/hospitals", task, {"FedAvg": Federated(FedAvg, tries=grid(lr=[0.03, 0.1]))})
        study.run()
        print(study.table())

    Tasks, ways and seeds may be added to a study that was run; one that has changed is refused.

    Args:
        out: the folder; `distillkit.study.records` says what lies in it.
        tasks: one or several, of different names.
        ways: what is compared, by name. All that have tries of their own have equally many.
        seeds: of the runs in the tables.
        tune_seeds: of the tries; none of `seeds`.
        tune_on: the task on which settings are tried for all tasks: for private data, where every try on the data
            itself would have to be paid for. Default: each task for itself.
        rule: by what the best try is chosen, as a mean over `tune_seeds`: the accuracy after the "last" round, or on
            the clients' "own" tests. Of equals the first. A way may have its own rule.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, a name is given twice, or numbers of tries differ.
    """

    def __init__(
        self,
        out: str | Path,
        tasks: Task | Sequence[Task],
        ways: Mapping[str, Way],
        *,
        seeds: Sequence[int] = (0, 1, 2),
        tune_seeds: Sequence[int] = (100,),
        tune_on: Task | None = None,
        rule: Literal["last", "own"] = "last",
    ) -> None:
        self.out = Path(out)
        self.tasks, self.ways = _tasks(tasks), _ways(ways)
        self.seeds, self.tune_seeds = _seeds(seeds, "seeds"), _seeds(tune_seeds, "tune_seeds")
        if both := sorted(set(self.seeds) & set(self.tune_seeds)):
            raise ValueError(f"tune_seeds must be none of seeds, but {both} are in both")
        if tune_on is not None and not isinstance(tune_on, Task):
            raise TypeError(f"tune_on must be a Task, got {type(tune_on).__name__}")
        self.tune_on, self.rule = tune_on, check.one_of(rule, "rule", tuple(choice.RULES))
        self._splits: dict[str, Split] = {}
        self._built: dict[str, Any] = {}

    @property
    def tries(self) -> int:
        """How many settings each way tries; 1: nothing is tuned."""
        return max(len(way.tries) for way in self.ways.values())

    def __repr__(self) -> str:
        size = f"{len(self.tasks)} tasks x {len(self.ways)} ways x {len(self.seeds)} seeds"
        return f"Study({str(self.out)!r}, {size}, {self.tries} tries a way)"

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
            distillkit.recipes.NotRecorded: a task, or with several processes a way, cannot be written down.
            ValueError: the folder holds another study; no try of a way has a score.
            distillkit.owner.InUse: another process runs in the folder; it is named.
        """
        processes, options = self._options(processes, workers, device)
        if on_run is not None:
            check.callable_with(on_run, "on_run", ["line"], "print, called with a finished run's line")
        with self._owned():
            self._begin()
            seconds: dict[tuple[str, str], float] = {}
            if check.switch(trial, "trial"):
                expected = self._estimate(options, processes)
                seconds = {(row.task, row.method): row.cost.seconds for row in expected.rows}
                if check.switch(progress, "progress") and expected.rows:
                    print(expected, flush=True)
            options |= {"commit": git_commit()}
            trying = [order for tries in self._trying().values() for runs in tries for order in runs]
            self._do(trying, "tries", processes, options, seconds, progress)
            self._do(self._running(self._choose()), "runs", processes, options, seconds, progress, on_run)
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
        return owned(self.out / ".owner.lock", f"the study in {self.out}")

    def _begin(self) -> None:
        """Write down what is asked for, if nothing that was asked for before is another thing now."""
        store, path = self.out / "data", self.out / "study.json"
        asked: dict[str, Any] = {
            "format": STUDY,
            "rule": self.rule,
            "tune_seeds": list(self.tune_seeds),
            "tune_on": None if self.tune_on is None else recipe(self.tune_on, store=store, name="tune_on"),
            "tasks": {n: recipe(task, store=store, name=f"tasks[{n!r}]") for n, task in self.tasks.items()},
            "ways": {name: self._way_said(name, way) for name, way in self.ways.items()},
            "seeds": list(self.seeds),
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
        versions = {"distillkit": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
        write_atomically(path, json.dumps({**asked, "versions": versions}, indent=1) + "\n")

    def _way_said(self, name: str, way: Way) -> dict[str, Any]:
        store = self.out / "arguments"
        parts = {"way": way.bare(), "settings": dict(way.settings), "tries": [dict(t) for t in way.tries]}
        said = {key: recipe(part, store=store, name=f"ways[{name!r}].{key}") for key, part in parts.items()}
        return {**said, "like": way.like, "rule": way.rule}

    # What is to be done.

    def _trying(self) -> dict[tuple[str, str], list[list[Order]]]:
        """By task and way, for each try its runs; nothing for ways that take another's settings."""
        if self.tries == 1:
            return {}
        return {
            (task, method): [
                [
                    Order(
                        name := f"{task}-{_slug(method)}-{k}-{seed}",
                        f"tries/{name}",
                        task,
                        method,
                        seed,
                        settings,
                        True,
                    )
                    for seed in self.tune_seeds
                ]
                for k, settings in enumerate(_all_settings(way))
            ]
            for task in self._tuned_tasks()
            for method, way in self.ways.items()
            if way.like is None
        }

    def _running(self, chosen: Mapping[tuple[str, str], int]) -> list[Order]:
        """The runs of the tables, a seed of everything before the next seed.

        Args:
            chosen: by task and way, the number of the try whose settings a run has.
        """
        orders = []
        for seed in self.seeds:
            for task in self.tasks:
                tuned = task if self.tune_on is None else self.tune_on.name
                for method, way in self.ways.items():
                    source = way.like or method
                    settings = _all_settings(self.ways[source])[chosen.get((tuned, source), 0)] | dict(way.settings)
                    name = f"{task}-{_slug(method)}-{seed}"
                    orders.append(Order(name, name, task, method, seed, settings))
        return orders

    def _tuned_tasks(self) -> dict[str, Task]:
        return self.tasks if self.tune_on is None else {self.tune_on.name: self.tune_on}

    def _choose(self) -> dict[tuple[str, str], int]:
        """Choose among the tries, and write the choice down with all that it rests on."""
        chosen: dict[tuple[str, str], int] = {}
        said: dict[str, dict[str, Any]] = {task: {} for task in self._tuned_tasks()}
        for (task, method), tries in self._trying().items():
            rule = self.ways[method].rule or self.rule
            scored = [
                choice.scored([read_line(self.out / o.folder / "summary.json") for o in runs], rule) for runs in tries
            ]
            chosen[task, method] = choice.chosen(scored, f"ways[{method!r}] on {task}")
            said[task][method] = {"tries": scored, "chosen": chosen[task, method], "like": None, "rule": rule}
        for task in said:
            for method, way in self.ways.items():
                said[task].setdefault(method, {"tries": [], "chosen": None if way.like else 0, "like": way.like})
        path = self.out / "choice.json"
        before = json.loads(path.read_text())["tasks"] if path.exists() else {}
        said = {task: {**before.get(task, {}), **said.get(task, {})} for task in {**before, **said}}
        found = {"format": tuning.FORMAT, "rule": self.rule, "seeds": list(self.tune_seeds), "tasks": said}
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
                task, way = self._task(order.task), self.ways[order.method]
                yield order, perform(order, task, self._split(task), way, self._made(order), self.out, **options)
            return
        wanted = [(order, self._said(order)) for order in orders]
        with worker_processes(processes) as pool:
            futures = {pool.submit(perform_far, said, self.out, options): order for order, said in wanted}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _task(self, name: str) -> Task:
        return self.tasks[name] if name in self.tasks else self._tuned_tasks()[name]

    def _split(self, task: Task) -> Split:
        """The images of a task, read once; those of the task before are let go."""
        if task.name not in self._splits:
            self._splits = {task.name: task.load()}
        return self._splits[task.name]

    def _made(self, order: Order) -> Any:
        task = self._task(order.task)
        try:
            return self.ways[order.method].made(task, self._split(task), order.settings)
        except TypeError as error:
            raise TypeError(f"ways[{order.method!r}] cannot be made with {dict(order.settings)}: {error}") from error

    def _said(self, order: Order) -> Said:
        return said(order, self._task(order.task), self.ways[order.method], self._made(order), self.out)

    def _summarise(self) -> None:
        lines = [record.line for record in read_records(self.out)]
        write_atomically(self.out / "summary.json", json.dumps(lines, indent=1) + "\n")

    def _estimate(self, options: Mapping[str, Any], processes: int) -> Estimate:
        rows = []
        tries = [order for runs in self._trying().values() for one in runs for order in one]
        for task, method in dict.fromkeys((o.task, o.method) for o in [*tries, *self._running({})]):
            own = [o for o in [*tries, *self._running({})] if (o.task, o.method) == (task, method)]
            left = [o for o in own if not (self.out / o.folder / "summary.json").exists()]
            if left and processes == 1:
                parts = self._task(task), self._split(self._task(task)), self.ways[method], self._made(left[0])
                rows.append(Expected(task, method, len(left), *attempt(left[0], *parts, **options)))
            elif left:
                with worker_processes(1) as pool:
                    found = pool.submit(attempt_far, self._said(left[0]), self.out, options).result()
                rows.append(Expected(task, method, len(left), *found))
        return Estimate(tuple(rows), processes)

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


def _all_settings(way: Way) -> list[dict[str, Any]]:
    """The settings of each try of a way, with those that all of them have."""
    return [{**way.settings, **settings} for settings in way.tries]


def _slug(name: str) -> str:
    """A way's name as part of a folder's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _tasks(given: Task | Sequence[Task]) -> dict[str, Task]:
    tasks = [given] if isinstance(given, Task) else list(check.several(given, "tasks", "tasks"))
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{number}] must be a Task, got {type(task).__name__}")
    names = [task.name for task in tasks]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tasks must be at least one, of different names, got {names}")
    return dict(zip(names, tasks))


def _ways(given: Mapping[str, Way]) -> dict[str, Way]:
    ways = dict(check.mapping(given, "ways"))
    if not ways:
        raise ValueError("ways must name at least one, as {'FedAvg': Federated(FedAvg)}")
    for name, way in ways.items():
        if not isinstance(way, Way):
            raise TypeError(
                f"ways[{name!r}] must be a way, as Federated(...) or Condense(...), got {type(way).__name__}"
            )
        if way.make is None:
            raise ValueError(f"ways[{name!r}] was read from a record and has no make: give the way itself")
        source = ways.get(way.like) if way.like is not None else way
        if source is None or source.like is not None:
            raise ValueError(f"ways[{name!r}].like must name a way with tries of its own, got {way.like!r}")
    slugs = [_slug(name) for name in ways]
    if "" in slugs or len(set(slugs)) != len(slugs):
        raise ValueError(f"ways must have names that differ in their letters and digits, got {list(ways)}")
    counts = {name: len(way.tries) for name, way in ways.items() if way.like is None}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"all ways must have as many tries, for a fair comparison, got {said}; like= takes another's")
    return ways


def _seeds(given: Sequence[int], name: str) -> tuple[int, ...]:
    seeds = tuple(
        check.positive_int(s, f"{name}[{i}]", least=0) for i, s in enumerate(check.several(given, name, "seeds"))
    )
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"{name} must be at least one, each once, got {list(seeds)}")
    return seeds


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
