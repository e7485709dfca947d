"""Studies of federated methods that stop after a number of seconds, in this process and in worker processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from distillkit.data import load, partition
from distillkit.study import Records, Study, Task, grid
from fl import FedAvg
from fl.methods import FedDM
from fl.study import Federated

TASK = Task(
    "digits", partial(load, "digits", size=8), partial(partition.iid, clients=2), rounds=3,
    factory_options={"width": 4, "depth": 1},
)  # fmt: skip
CANDIDATES = {
    "FedAvg": Federated(FedAvg, search=grid(lr=[0.1, 0.2]), settings={"steps": 1}),
    "FedDM": Federated(FedDM, search=grid(lr=[0.5, 1.0]), settings={"ipc": 1, "steps": 1, "server_epochs": 1}),
}


def study(folder: Path) -> Study:
    return Study(folder, TASK, CANDIDATES, seeds=(0,), tune_seeds=(5,))


def rounds_of(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("history.jsonl"))


@pytest.mark.slow
def test_study_in_pieces_equals_a_study_in_one_call(tmp_path: Path) -> None:
    """With no time left, every call makes one round, and the call that ends the search makes one of each phase."""
    whole = study(tmp_path / "whole").run(trial=False, progress=False)
    pieces, rounds = study(tmp_path / "pieces"), 0
    while len(found := pieces.run(trial=False, progress=False, seconds=1e-6)) < len(whole):
        rounds += 1
        assert rounds <= rounds_of(tmp_path / "pieces") <= rounds + 1
    assert rounds == 3 * 6 - 2
    assert not found.missing
    assert hashes(found) == hashes(whole)


@pytest.mark.slow
def test_worker_processes_stop_and_continue(tmp_path: Path) -> None:
    whole = study(tmp_path / "whole").run(trial=False, progress=False)
    pieces = study(tmp_path / "pieces")
    assert pieces.run(trial=False, progress=False, processes=2, seconds=1e-6).missing
    assert 2 <= rounds_of(tmp_path / "pieces") < 3 * 6
    assert hashes(pieces.run(trial=False, progress=False)) == hashes(whole)


def hashes(records: Records) -> list[tuple[str, str]]:
    return [(record.method, record.line["hash"]) for record in records]
