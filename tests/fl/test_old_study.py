"""A study written before the renaming of candidates is read, continued and repeated.

`old_study/` was written at 3cb0f02, where candidates were ways and configurations were tries.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distillkit.condense import distribution_matching, random_subset
from distillkit.data import load as load_dataset
from distillkit.data import partition
from distillkit.networks import RandomNetworks
from distillkit.study import Candidate, Condense, Study, Task, equal_search_sizes, grid, read_choice, read_records
from distillkit.training import Protocol
from fl import FedAvg
from fl.study import Federated, load, repeat

OLD = Path(__file__).parent / "old_study"


def matched(factory: Callable[..., Any], lr: float) -> Callable[..., Any]:
    return partial(distribution_matching, networks=RandomNetworks(factory), ipc=1, steps=2, lr=lr)


def averaged(factory: Callable[..., Any], lr: float) -> FedAvg:
    return FedAvg(factory=factory, lr=lr)


def study(folder: Path, **options: Any) -> Study:
    data, two = partial(load_dataset, "digits", size=8), partial(partition.iid, clients=2)
    task = Task("digits", data, two, factory_options={"width": 4, "depth": 1}, rounds=1)
    evaluation: dict[str, Any] = {"num_networks": 1, "protocol": Protocol(epochs=1)}
    candidates: dict[str, Candidate] = {
        "DM": Condense(matched, grid(lr=[0.1, 1.0]), **evaluation),
        "Random": Condense(lambda factory, lr: partial(random_subset, ipc=1), like="DM", seeds=[0], **evaluation),
        "FedAvg": Federated(averaged, grid(lr=[0.01, 0.1])),
    }
    return Study(folder, task, candidates, tune_seeds=(100,), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "study"))


def test_records_and_choice_are_read() -> None:
    assert [(r.method, r.last("settings.lr")) for r in read_records(OLD)] == [
        ("DM", 0.1),
        ("Random", 0.1),
        ("FedAvg", 0.1),
    ]
    assert equal_search_sizes(OLD) == {"digits": 2}
    assert {t.method: len(t.configurations) for t in read_choice(OLD)[0]} == {"DM": 2, "Random": 0, "FedAvg": 2}


def test_study_continues_without_repeating_a_run(folder: Path) -> None:
    before = {path: path.read_text(encoding="utf-8") for path in folder.rglob("summary.json") if path.parent != folder}
    ran: list[str] = []
    study(folder, seeds=(0, 1)).run(trial=False, progress=False, on_run=lambda line: ran.append(line["run"]))
    assert sorted(ran) == ["digits-dm-1", "digits-fedavg-1"]
    assert {path: path.read_text(encoding="utf-8") for path in before} == before
    plans = [json.loads((where / "study.json").read_text(encoding="utf-8")) for where in (OLD, folder)]
    assert plans[0]["ways"] == plans[1]["ways"]


def test_federated_run_is_loaded_and_repeated(folder: Path) -> None:
    known = load(folder / "digits-fedavg-0")
    assert isinstance(known.candidate, Federated)
    assert (known.candidate.search, known.settings) == (({},), {"lr": 0.1})
    assert repeat(known.folder, progress=False).hash == known.hash
