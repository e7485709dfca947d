"""Studies whose number of rounds is raised in the same folder: they equal studies that had it from the start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distillkit.data import load, partition
from distillkit.study import Condense, Job, Records, Study, Task, grid
from distillkit.training import Protocol
from fl import FedAvg
from fl.addons import FedCOG, LocalAccuracy
from fl.engine.store import OtherSettings
from fl.methods import FedDM
from fl.study import Federated, repeat
from fl.study import load as load_run
from tests.scripts import load_script

LONG = {"FedAvg, 3 rounds": Federated(FedAvg, settings={"rounds": 3, "steps": 1}, like="FedAvg")}
CANDIDATES = {
    "FedAvg": Federated(FedAvg, search=grid(lr=[0.5, 0.003]), settings={"steps": 1}),
    "FedDM": Federated(FedDM, search=grid(lr=[0.5, 1.0]), settings={"ipc": 1, "steps": 1, "server_epochs": 1}),
    **LONG,
}  # fmt: skip


def task(rounds: int) -> Task:
    return Task(
        "digits", partial(load, "digits", size=8), partial(partition.iid, clients=2), rounds=rounds,
        factory_options={"width": 4, "depth": 1}, server_share=0.1,
    )  # fmt: skip


def study(folder: Path, rounds: int, candidates: Any = None, **options: Any) -> Study:
    return Study(folder, task(rounds), candidates or CANDIDATES, **{"seeds": (0,), "tune_seeds": (5,), **options})


def run(study: Study, **options: Any) -> Records:
    return study.run(trial=False, progress=False, **options)


def facts(records: Records) -> list[tuple[str, int, int, Any, str]]:
    return [(r.method, r.seed, r.line["rounds"], r.line["settings"], r.line["hash"]) for r in records]


def test_raised_study_equals_a_study_with_this_number_of_rounds_from_the_start(tmp_path: Path) -> None:
    """All tuning runs are continued, too, and the choice is made again."""
    whole = run(study(tmp_path / "whole", 3))
    run(study(tmp_path / "raised", 1))
    raised = run(study(tmp_path / "raised", 3))
    assert [r.line["rounds"] for r in raised] == [3, 3, 3]
    assert facts(raised) == facts(whole)
    for name in ("choice.json", "study.json"):
        text, wanted = ((tmp_path / place / name).read_text(encoding="utf-8") for place in ("raised", "whole"))
        assert text == wanted


def test_raised_runs_continue_from_their_checkpoints(tmp_path: Path) -> None:
    run(study(tmp_path, 2))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("history.jsonl"))}
    assert len(before) == 4 + 3
    run(study(tmp_path, 3))
    for path, text in before.items():
        assert path.read_bytes().startswith(text)  # with the seconds of the first call
        assert len(path.read_bytes().splitlines()) == 3


def test_interrupted_raise_has_no_records_of_shorter_runs(tmp_path: Path) -> None:
    whole = run(study(tmp_path / "whole", 3))
    pieces, calls = tmp_path / "pieces", 0
    run(study(pieces, 1))
    while (found := run(study(pieces, 3), seconds=1e-6)).missing:
        calls += 1
        assert all(record.line["rounds"] == 3 for record in found)
        assert calls < 20
    assert calls > 5
    assert facts(found) == facts(whole)


@dataclass(frozen=True)
class Turning(Federated):
    """Federated candidate whose larger rate has the lower validation score after one round, and the higher later."""

    def run(self, built: Any, job: Job) -> dict[str, Any]:
        line = super().run(built, job)
        score = 0.5 + job.settings["lr"] * (line["rounds"] - 1.5) / 10
        return {**line, "accuracy_last": score} if job.validation else line


def test_final_run_of_a_choice_that_changed_is_replaced_and_kept_apart(tmp_path: Path) -> None:
    candidates = {"FedAvg": Turning(FedAvg, search=grid(lr=[0.01, 0.5]), settings={"steps": 1})}
    [first] = run(study(tmp_path / "raised", 1, candidates))
    raised = run(study(tmp_path / "raised", 2, candidates))
    assert [r.line["settings"]["lr"] for r in (first, *raised)] == [0.01, 0.5]
    assert facts(raised) == facts(run(study(tmp_path / "whole", 2, candidates)))
    replaced = load_run(tmp_path / "raised" / "replaced" / "digits-fedavg-0-1")
    assert len(replaced.rows) == 1
    assert replaced.hash == first.line["hash"]


def test_candidates_without_rounds_or_with_their_own_are_not_repeated(tmp_path: Path) -> None:
    def small(factory: Any, lr: float = 1.0) -> Any:
        from distillkit.condense import random_subset

        return partial(random_subset, ipc=1)

    candidates = {"FedAvg": Federated(FedAvg, settings={"steps": 1}), **LONG}
    candidates |= {"Random": Condense(small, num_networks=1, protocol=Protocol(epochs=1))}  # type: ignore[dict-item]
    run(study(tmp_path, 1, candidates))
    summaries = {name: tmp_path / f"digits-{name}-0" / "summary.json" for name in ("fedavg-3-rounds", "random")}
    before = {name: path.stat().st_mtime_ns for name, path in summaries.items()}
    assert [r.line["rounds"] for r in run(study(tmp_path, 2, candidates))] == [2, 3, None]
    assert {name: path.stat().st_mtime_ns for name, path in summaries.items()} == before


def test_repetition_of_a_raised_run_has_all_of_its_rounds(tmp_path: Path) -> None:
    candidates = {"FedAvg": Federated(FedAvg, settings={"steps": 1})}
    run(study(tmp_path, 1, candidates))
    [record] = run(study(tmp_path, 3, candidates))
    assert load_run(str(record.folder)).task.rounds == 3
    again = repeat(str(record.folder), progress=False)
    assert (len(again.rows), again.hash) == (3, record.line["hash"])


def of_task(factory: Any, task: Task, lr: float = 0.1) -> FedAvg:
    return FedAvg(LocalAccuracy("proxy", every=task.rounds), factory=factory, lr=lr, steps=1)


@pytest.mark.parametrize("rounds", [3, 1])
def test_methods_that_depend_on_the_number_of_rounds_are_refused_by_name(tmp_path: Path, rounds: int) -> None:
    """The finished runs stay as they are."""
    candidates: dict[str, Any] = {"Tested": Federated(of_task)}
    finished = facts(run(study(tmp_path, 2, candidates)))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    error, why = (OtherSettings, "every=2.*every=3") if rounds == 3 else (ValueError, "rounds: was 2, now 1")
    with pytest.raises(error, match=why):
        run(study(tmp_path, rounds, candidates))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before
    assert facts(run(study(tmp_path, 2, candidates))) == finished


def test_settings_that_depend_on_the_number_of_rounds_are_refused_by_name(tmp_path: Path) -> None:
    def candidates(start: int) -> dict[str, Any]:
        def made(factory: Any, start_round: int) -> FedAvg:
            return FedAvg(FedCOG(start_round=start_round, steps=1, images=10), factory=factory, steps=1)

        return {"FedCOG": Federated(made, settings={"start_round": start})}

    run(study(tmp_path, 1, candidates(1)))
    with pytest.raises(ValueError, match=r"names FedCOG \(settings.start_round: was 1, now 2\)"):
        run(study(tmp_path, 2, candidates(2)))


def test_rounds_cannot_be_raised_for_some_of_the_candidates(tmp_path: Path) -> None:
    run(study(tmp_path, 1))
    with pytest.raises(ValueError, match="rounds of digits cannot be raised without FedDM"):
        run(study(tmp_path, 2, {name: c for name, c in CANDIDATES.items() if name != "FedDM"}))


def test_example_with_more_rounds_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("examples/vhl.py")

    def hashes(out: str, *rounds: int) -> list[str]:
        for number in rounds:
            script.main(["--preset", "smoke", "--pair", "--steps", "1", "--workers", "1", "--rounds", str(number),
                         "--out", str(tmp_path / out)])  # fmt: skip
        return [line["hash"] for line in json.loads((tmp_path / out / "summary.json").read_text(encoding="utf-8"))]

    assert hashes("raised", 1, 2) == hashes("whole", 2)
