"""Runs of a study on executors: claims, lost workers, several calls on one folder, Dask and submitit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from distillkit.condense import distribution_matching, random_subset
from distillkit.data import Split
from distillkit.locking import InUse, locked
from distillkit.networks.samplers import RandomNetworks
from distillkit.study import Candidate, Condense, Cost, Job, Study, grid, worker_pool
from distillkit.study._execution import _SPLITS, RunSpec, WorkerKilled, set_aside
from distillkit.study._records import write_json
from distillkit.training import Protocol
from tests.distillkit.study.test_study import Number, images, task
from tests.distillkit.test_locking import HOLD, start  # noqa: F401
from tests.refused import refused

QUIET: dict[str, Any] = {"trial": False, "progress": False}


@dataclass(frozen=True)
class Steps(Candidate):
    """Candidate of four steps that continues where it was killed, and writes a line to `log` for each step.

    The process of the run `kills` is killed in its third step, as often as `times` says.
    """

    log: str = ""
    kills: str = ""
    times: int = 1

    def run(self, made: Number, job: Job) -> dict[str, Any]:
        state = job.folder / "state"
        for step in range(int(state.read_text() if state.exists() else 0), 4):
            if made.value < 0:
                raise FloatingPointError("it diverged")
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"{job.run} {step} {os.getpid()}\n")
            if job.run == self.kills and step == 2 and len(list(job.folder.glob("killed*"))) < self.times:
                (job.folder / f"killed{time.time_ns()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if job.seed == job.settings.get("slow"):
                time.sleep(0.5)
            state.write_text(str(step + 1))
            job.check_deadline()
        return {"accuracy_last": made.value / 100 + job.seed / 1e4, "rounds": None}

    def trial(self, made: Number, job: Job) -> Cost:
        return Cost(made.value)


def number(factory: Any, value: float = 1.0, slow: int = -1) -> Number:
    return Number(value)


def steps(folder: Path, **options: Any) -> Steps:
    return Steps(number, log=str(folder / "log"), **options)


def logged(folder: Path) -> list[str]:
    """Return the run and the step of each line of the log."""
    return [line.rpartition(" ")[0] for line in (folder / "log").read_text(encoding="utf-8").splitlines()]


class Later:
    """Call of `Jobs`: a future with `done` and `result` alone, as those of submitit."""

    def __init__(self, call: Any) -> None:
        self.call, self.asked = call, 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def result(self) -> Any:
        with contextlib.chdir("/"):  # a worker may be anywhere
            return self.call()


class Jobs:
    """Executor that is no `concurrent.futures.Executor`, and loses the calls whose index is in `lost`."""

    def __init__(self, *lost: int) -> None:
        self.lost, self.count, self.keys = lost, 0, list[Any]()

    def submit(self, function: Any, *arguments: Any) -> Later:
        self.count += 1
        self.keys.append(arguments)
        lost = self.count - 1 in self.lost
        return Later(partial(self.lose, self.count) if lost else partial(function, *arguments))

    def lose(self, call: int) -> Any:
        raise RuntimeError(f"the node of call {call} is gone")


def lines(study: Study) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.line.items() if "seconds" not in k and k != "commit"} for r in study.records()]


def test_any_executor_gives_the_records_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    candidates = {"A": steps(tmp_path, search=grid(value=[1.0, 2.0])), "B": steps(tmp_path, search=grid(value=[3, 4]))}
    studies = {name: Study(name, task(), candidates, seeds=(0, 1)) for name in ("here", "jobs", "threads")}
    jobs = Jobs(1, 5)
    seen: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        for name, executor in (("here", None), ("jobs", jobs), ("threads", threads)):
            studies[name].run(executor=executor, on_run=lambda line: seen.append(line["run"]), **QUIET)
        assert threads.submit(int).result() == 0  # it is still open
    assert lines(studies["here"]) == lines(studies["jobs"]) == lines(studies["threads"])
    assert str(studies["here"].table()) == str(studies["jobs"].table())
    assert sorted(seen) == sorted(3 * [f"made-{name}-{seed}" for name in "ab" for seed in (0, 1)])
    assert jobs.count == 4 + 4 + 2  # tuning runs, final runs, and those of the lost nodes
    assert len({repr(one) for one in jobs.keys}) == jobs.count  # Dask answers an equal call from memory


class CountsTests(Steps):
    """Candidate whose accuracy shows the number of test images."""

    def run(self, made: Number, job: Job) -> dict[str, Any]:
        assert (job.settings, torch.get_num_threads()) == ({"slow": (1, 2)}, 1)
        return {"accuracy_last": len(job.split.test) / 100, "rounds": None}


def test_a_worker_uses_the_images_of_each_task(tmp_path: Path) -> None:
    tasks = [task(), task("other", data=Split(images(40, 0), images(30, 2), ("a", "b")))]
    threads = torch.get_num_threads()
    for folder, given in (("a", tasks), ("b", [replace(tasks[1], name="made")])):
        study = Study(tmp_path / folder, given, {"A": CountsTests(number, settings={"slow": (1, 2)})}, seeds=(0, 1))
        torch.set_num_threads(2)
        study.run(executor=Jobs(), **QUIET)
        counts = {one.name: len(one.load().test) / 100 for one in given}
        assert [r.line["accuracy_last"] for r in study.records()] == [counts[r.task] for r in study.records()]
        found = {(r.line["task"], r.line["accuracy_last"]) for r in study.records()}
        assert found == ({("made", 0.2), ("other", 0.3)} if folder == "a" else {("made", 0.3)})
        assert len(_SPLITS) == 1
    torch.set_num_threads(threads)


class Claimed(Jobs):
    """Executor whose lost calls find that another process executes the run."""

    def lose(self, call: int) -> Any:
        return InUse("in use", 1)


def test_run_that_was_claimed_before_its_worker_began_is_tried_again(tmp_path: Path) -> None:
    study, jobs = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1)), Claimed(0, 2)
    study.run(executor=jobs, **QUIET)
    assert (len(study.records()), jobs.count) == (2, 4)


def test_run_that_is_lost_twice_is_named_and_all_others_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1, 2))
    with pytest.raises(
        WorkerKilled, match=r"workers of made-a-1 were killed.*RuntimeError: the node of call 4 is gone"
    ) as lost:
        study.run(executor=Jobs(1, 3), **QUIET)
    assert isinstance(lost.value.__cause__, RuntimeError)
    assert [record.line["run"] for record in study.records()] == ["made-a-0", "made-a-2"]
    study.run(executor=Jobs(0), **QUIET)
    assert len(study.records()) == 3

    class Broken:
        error: type[Exception] = BrokenProcessPool

        def submit(self, *_: Any) -> Any:
            raise self.error("it ended")

    other = Study(tmp_path / "other", task(), {"A": steps(tmp_path)}, seeds=(0, 1))
    refused(lambda: other.run(executor=Broken(), **QUIET), WorkerKilled, "made-a-0, made-a-1 were .*it ended")
    Broken.error = OSError
    refused(lambda: other.run(executor=Broken(), **QUIET), WorkerKilled, "made-a-0, made-a-1 were .*it ended")
    monkeypatch.setattr("distillkit.study._execution.PreparedRun.serialize", lambda *_: 1 / 0)
    refused(lambda: other.run(executor=Broken(), **QUIET), ZeroDivisionError, "division")
    monkeypatch.undo()
    monkeypatch.setattr("distillkit.study._execution.SerializedRun._prepare", lambda *_: 1 / 0)
    refused(lambda: other.run(executor=Jobs(), **QUIET), ZeroDivisionError, "division")  # of the run, not a lost one


@pytest.mark.parametrize("files", [("config",), ("summary",), ("config", "summary"), ()])
def test_only_a_run_with_other_settings_is_set_aside(files: tuple[str, ...], tmp_path: Path) -> None:
    """The summary has the last word on the settings; every run has its own numbers in `replaced`."""
    for name in ("a", "b", "a"):
        spec = RunSpec(name, name, "task", "method", 0, {"lr": 0.1})
        (tmp_path / name).mkdir(exist_ok=True)
        for file in files:
            settings = {"lr": 0.1 if (file, len(files)) == ("config", 2) else 0.2}
            content = {"settings": settings} if file == "summary" else {"notes": {"settings": settings}}
            write_json(tmp_path / name / f"{file}.json", content)
        set_aside(tmp_path, spec)
        set_aside(tmp_path, replace(spec, settings={"lr": 0.2}))  # nothing is left, or it is asked for
    found = sorted(path.name for path in tmp_path.glob("replaced/*"))
    assert found == (["a-1", "a-2", "b-1"] if files else [])


def test_error_of_a_run_is_raised_with_its_traceback_and_not_repeated(tmp_path: Path) -> None:
    jobs = Jobs()
    study = Study(tmp_path, task(), {"A": steps(tmp_path, settings={"value": -1.0})}, seeds=(0, 1))
    with pytest.raises(FloatingPointError, match="it diverged") as raised:
        study.run(executor=jobs, **QUIET)
    assert "in run\n" in raised.value.__notes__[0]
    assert jobs.count == 2
    assert not list(tmp_path.glob("*/summary.json"))


def test_calls_that_share_a_folder_execute_each_run_once(tmp_path: Path) -> None:
    candidates = {"A": steps(tmp_path, search=grid(value=[1.0, 2.0]))}
    found: list[Any] = []

    def work(executor: Any) -> None:
        study = Study(tmp_path, task(), candidates, seeds=range(6), tune_seeds=(7, 8))
        found.append(study.run(executor=executor, **QUIET))

    with ThreadPoolExecutor(2) as pool:
        both = [threading.Thread(target=work, args=(one,)) for one in (None, pool)]
        for thread in both:
            thread.start()
            while not (tmp_path / "log").exists():  # one thread at a time writes study.json
                time.sleep(0.001)
        for thread in both:
            thread.join()
    assert len(logged(tmp_path)) == len(set(logged(tmp_path))) == 4 * (2 * 2 + 6)
    assert [len(records) for records in found] == [6, 6]
    assert not found[0].missing


def test_claimed_run_is_left_to_its_owner_until_that_ends(tmp_path: Path, start: Any) -> None:  # noqa: F811
    study, jobs = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1, 2)), Jobs()
    claim, seen = tmp_path / ".claims" / "made-a-0.lock", list[str]()
    holder = start(HOLD, claim)
    assert holder.stdout.readline()
    one = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0,))
    assert len(one.run(seconds=0.2, **QUIET).missing) == 1  # the deadline ends the wait
    assert not (tmp_path / "log").exists()

    def note(line: Any) -> None:
        seen.append(line["run"])
        if len(seen) == 2:
            assert jobs.count == 2  # the claimed run is not even submitted
            holder.kill()

    assert not study.run(executor=jobs, on_run=note, **QUIET).missing
    assert seen == ["made-a-1", "made-a-2", "made-a-0"]
    with locked(claim, "the run"):
        assert not study.run(**QUIET).missing


def test_claimed_run_with_former_settings_is_not_moved(tmp_path: Path, start: Any) -> None:  # noqa: F811
    Study(tmp_path, task(), {"A": steps(tmp_path, search=grid(value=[1.0, 0.5]))}, seeds=(0,)).run(**QUIET)
    study = Study(tmp_path, task(), {"A": steps(tmp_path, search=grid(value=[1.0, 0.5, 2.0]))}, seeds=(0,))
    holder = start(HOLD, tmp_path / ".claims" / "made-a-0.lock")
    assert holder.stdout.readline()
    refused(lambda: study.run(**QUIET), RuntimeError, f"run made-a-0 is in use by process {holder.pid}")
    assert (tmp_path / "made-a-0" / "summary.json").exists()
    holder.kill()
    holder.wait()
    study.run(**QUIET)
    assert [path.name for path in (tmp_path / "replaced").iterdir()] == ["made-a-0-1"]


@pytest.mark.parametrize("wrong", [3, "dask", ThreadPoolExecutor])
def test_wrong_executor_is_refused(tmp_path: Path, wrong: Any) -> None:
    study = Study(tmp_path / "new", task(), {"A": steps(tmp_path)})
    for call in (study.run, study.tune, study.estimate):
        refused(lambda call=call: call(executor=wrong), TypeError, "executor must be a concurrent.futures.Executor")  # type: ignore[misc]
    refused(lambda: study.run(processes=0, executor=Jobs()), ValueError, "processes")
    assert not (tmp_path / "new").exists()


def test_estimate_makes_its_trials_on_the_executor(tmp_path: Path) -> None:
    study, jobs = Study(tmp_path, task(), {"A": steps(tmp_path, settings={"value": 6.0})}, seeds=(0, 1)), Jobs()
    assert study.estimate(executor=jobs, processes=3).seconds == pytest.approx(2 * 6.0 / 3)
    assert jobs.count == 1


def test_deadline_waits_until_all_runs_have_saved_their_states(tmp_path: Path) -> None:
    study = Study(tmp_path, task(), {"A": steps(tmp_path, settings={"slow": 1})}, seeds=(0, 1, 2))
    with ThreadPoolExecutor(2) as pool:
        assert len(study.run(executor=pool, seconds=1e-6, **QUIET).missing) == 3
        assert {path.parent.name for path in tmp_path.glob("made-*/state")} >= {"made-a-0", "made-a-1"}
        assert not study.run(executor=pool, **QUIET).missing
    assert len(logged(tmp_path)) == 3 * 4


def test_processes_are_a_pool_that_ends_with_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(count)

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            made.append((wait, cancel_futures))
            super().shutdown(wait, cancel_futures=cancel_futures)

    monkeypatch.setattr("distillkit.study.study.worker_pool", Pool)
    study = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1))
    study.run(progress=False)
    assert not made
    study = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1, 2))
    study.estimate(processes=3)
    study.run(processes=2, **QUIET)
    assert made == [3, (False, True), 2, (False, True)]


def test_interrupt_cancels_what_has_not_begun(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distillkit.study._execution.time.sleep", stop)
        later = [Future[Any]() for _ in range(3)]
        rest = iter(later)
        pool = SimpleNamespace(submit=lambda *_: next(rest))
        study = Study(tmp_path, task(), {"A": steps(tmp_path)}, seeds=(0, 1, 2))
        with pytest.raises(KeyboardInterrupt):
            study.run(executor=pool, **QUIET)
    assert all(future.cancelled() for future in later)


def dead() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_their_pool() -> None:
    pool = worker_pool(1)
    pid = pool.submit(os.getpid).result()
    pool.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_killed_worker_of_a_pool_fails_only_its_call() -> None:
    with worker_pool(2) as pool:
        slow, broken = pool.submit(time.sleep, 1.0), pool.submit(dead)
        assert isinstance(broken.exception(), BrokenProcessPool)
        assert slow.exception() is None
        pids = {pool.submit(os.getpid).result() for _ in range(4)}
        assert os.getpid() not in pids
        assert len(pids) <= 2


def killed_once(real: LabeledImages, *, folder: str, generator: Any) -> LabeledImages:
    if len(list(Path(folder).glob("killed-*"))) < 1:
        (Path(folder) / f"killed-{os.getpid()}").touch()
        dead()
    return random_subset(real, ipc=1, generator=generator)


def comparison(folder: Path, log: Path, kills: str) -> Study:
    """Return a study of 24 runs; a worker is killed twice if `kills` names a run."""
    log.mkdir(exist_ok=True)
    short: dict[str, Any] = {"num_networks": 1, "protocol": Protocol(epochs=1)}
    if not kills:
        (log / "killed-never").touch()
    candidates: dict[str, Candidate] = {
        "DM": Condense(
            lambda factory, lr: partial(
                distribution_matching, networks=RandomNetworks(factory), ipc=1, steps=2, lr=lr, batch_real=8
            ),
            search=grid(lr=[0.1, 0.5]), **short,
        ),
        "fragile": Condense(
            lambda factory, x: partial(killed_once, folder=str(log)), search=grid(x=[0, 1]),
            **short,
        ),
        "steps": steps(log, kills=kills, search=grid(value=[1.0, 2.0])),
    }  # fmt: skip
    return Study(folder, task(), candidates, seeds=range(6))


def assert_continued(tmp_path: Path, study: Study) -> None:
    """Assert that the killed run was continued, and that all records are those of one process."""
    steps = [line for line in logged(tmp_path / "log") if line.startswith("made-steps-3")]
    assert steps == [f"made-steps-3 {step}" for step in (0, 1, 2, 2, 3)]
    alone = comparison(tmp_path / "alone", tmp_path / "other", "")
    alone.run(**QUIET)
    assert lines(study) == lines(alone)
    assert str(study.table()) == str(alone.table())
    assert [[r.line[k] for k in ("run", "accuracy_last")] for r in study.records()] == [
        [r.line[k] for k in ("run", "accuracy_last")] for r in alone.records()
    ]
    assert {r.line["run"]: r.line.get("hash") for r in study.records()} == {
        r.line["run"]: r.line.get("hash") for r in alone.records()
    }


@pytest.mark.slow
def test_processes_continue_the_runs_of_killed_workers(tmp_path: Path) -> None:
    study = comparison(tmp_path / "study", tmp_path / "log", "made-steps-3")
    study.run(processes=2, **QUIET)
    assert_continued(tmp_path, study)


@pytest.mark.slow
def test_dask_cluster_with_a_killed_worker_gives_the_same_table(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    study = comparison(tmp_path / "study", tmp_path / "log", "made-steps-3")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        study.run(executor=client.get_executor(), **QUIET)
    assert len(list((tmp_path / "log").glob("killed-*"))) == 1
    assert_continued(tmp_path, study)


@pytest.mark.slow
def test_submitit_continues_the_run_of_a_killed_job(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    candidates = {"steps": steps(tmp_path, kills="made-steps-1")}
    study = Study(tmp_path / "study", task(), candidates, seeds=(0, 1, 2))
    study.run(executor=submitit.LocalExecutor(folder=tmp_path / "jobs"), **QUIET)
    every = [f"made-steps-{seed} {step}" for seed in range(3) for step in range(4)]
    assert sorted(logged(tmp_path)) == sorted([*every, "made-steps-1 2"])
    alone = Study(tmp_path / "alone", task(), {"steps": steps(tmp_path)}, seeds=(0, 1, 2))
    alone.run(**QUIET)
    assert str(study.table()) == str(alone.table())
