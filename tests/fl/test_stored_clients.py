"""Clients and a test set stored in files: equal to a run in memory, with few reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from distillkit import LabeledImages, Normalization
from distillkit.condense import random_subset
from distillkit.data import clients, load_folder, open_folder, partition
from distillkit.privacy import Ledger
from distillkit.sets import StoredImages
from distillkit.sets._stored import PixelFile
from distillkit.study import Condense, Study, Task
from distillkit.training import Protocol
from fl import ClientData, ClientDP, FedAvg, Filtered, Run, simulate
from fl.study import Federated
from tests.fl.federations import Tiny

HALF = Normalization([0.5], [0.5])
METHOD = FedAvg(factory=Tiny, steps=2, batch=4, lr=0.05)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "noise"
    rng = np.random.default_rng(0)
    for name in "abc":
        (path / name).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(rng.integers(0, 256, (4, 4), dtype=np.uint8)).save(path / name / f"{i}.png")
    return path


def stored(source: Path, tmp_path: Path) -> tuple[list[ClientData], StoredImages]:
    """Return four clients with own test sets, and the test set."""
    train, test = open_folder(source, cache=tmp_path / "cache", normalization=HALF)
    held = clients(train, partition.iid(train.labels, 4))
    return [ClientData(data[:8], data[8:]) for data in held], test


def in_memory(held: list[ClientData]) -> list[ClientData]:
    return [ClientData(*client.read()) for client in held]


def messages(run: Run) -> list[Any]:
    kept = ("accuracy", "loss", "accuracy_clients", "bytes_up", "drawn", "failed", "empty")
    return [[row.get(name) for name in kept] for row in run.rows]


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.flatten() for p in run.models[""].parameters()])


def test_stored_run_equals_the_run_in_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fl.method", "fl.engine._evaluation"):
        monkeypatch.setattr(f"{module}.evaluation_batch_size", lambda shape, device: 5)
    held, test = stored(source, tmp_path)
    test = test[:11]  # the last of three parts has one image
    options: dict[str, Any] = {"rounds": 2, "participation": 0.5, "evaluate": "all", "progress": False}
    run = simulate(METHOD, held, test=test, workers=2, **options)
    other = simulate(METHOD, in_memory(held), test=test.read(), **options)
    assert messages(run) == messages(other)
    assert run.rows[-1]["accuracy_clients"] is not None
    assert torch.equal(weights(run), weights(other))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the rows of every later read."""
    found: list[torch.Tensor] = []
    read = PixelFile.read

    def counted(file: PixelFile, rows: torch.Tensor) -> torch.Tensor:
        found.append(rows)
        return read(file, rows)

    monkeypatch.setattr(PixelFile, "read", counted)
    return found


def test_only_drawn_clients_are_read_and_the_test_set_in_batches(
    source: Path, tmp_path: Path, reads: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, test = stored(source, tmp_path)
    how: dict[str, Any] = {"evaluate": "none", "progress": False, "out": tmp_path / "run"}
    run = simulate(METHOD, held, test=test, rounds=1, participation=1 / 4, **how)
    [drawn] = run.rows[0]["drawn"]
    pictures = [rows for rows in reads if len(rows)]
    train, own = held[drawn].train, held[drawn].test
    assert isinstance(train, StoredImages)
    assert isinstance(own, StoredImages)
    assert [len(rows) for rows in pictures] == [len(train), len(own), len(test)]
    monkeypatch.setattr("fl.engine._evaluation.evaluation_batch_size", lambda shape, device: 5)
    reads.clear()
    again = simulate(METHOD, held, test=test, rounds=2, participation=1 / 4, resume=True, **how)
    assert [len(rows) for rows in reads if len(rows)][2:] == [5, 5, 2]
    assert (len(again.rows), len(reads) - sum(1 for rows in reads if not len(rows))) == (2, 5)


def test_config_of_a_run_identifies_its_images(source: Path, tmp_path: Path) -> None:
    def config(name: str, change: Callable[[list[ClientData]], Any]) -> dict[str, Any]:
        held, test = stored(source, tmp_path / name)  # each with a cache of its own
        simulate(METHOD, change(held), test=test, rounds=1, progress=False, out=tmp_path / name / "run")
        return json.loads((tmp_path / name / "run" / "config.json").read_text(encoding="utf-8"))

    whole = config("one", list)
    assert config("two", list) == whole
    other = config("three", lambda held: [ClientData(held[0].train[1:], held[0].test), *held[1:]])
    assert other["data"] != whole["data"]
    assert other["test"] == whole["test"] == [12, whole["test"][1]]


def test_clients_with_shared_images_are_found_without_reading(source: Path, tmp_path: Path, reads: Any) -> None:
    held, _ = stored(source, tmp_path)
    parts = [client.train.replace(info={}, classes_given=True) for client in held]
    method = FedAvg(factory=Tiny, steps=2, batch=4, lr=0.05, weights="uniform")
    private = Filtered(method, ClientDP(1.0, 0.5, 1.0))
    with pytest.warns(UserWarning, match="clients 1 and 3 have the same images"):
        simulate(private, [*parts[:3], parts[1]], rounds=1, ledger=Ledger(), secret=0, progress=False)
    assert sum(len(rows) for rows in reads) <= sum(map(len, parts))  # of the clients drawn


def test_invalid_clients_are_refused_before_anything_is_read(source: Path, tmp_path: Path, reads: Any) -> None:
    held, test = stored(source, tmp_path)
    data = held[0].train
    assert isinstance(data, StoredImages)
    go = partial(simulate, METHOD, rounds=1, progress=False)
    with pytest.raises(ValueError, match=r"clients\[1\] does not fit.*normalizations"):
        go([data, data.replace(normalization=Normalization([0.1], [0.2]))])
    with pytest.raises(ValueError, match=r"test does not fit.*normalizations"):
        go([data], test=test.replace(normalization=Normalization([0.1], [0.2])))
    with pytest.raises(TypeError, match=r"clients must be a sequence of sets, one for each client, got StoredImages"):
        go(data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"server_data\['proxy'\] must be in memory.*data.read\(indices\)"):
        go([data], server_data={"proxy": test})  # type: ignore[dict-item]
    mixed: list[LabeledImages | StoredImages] = [data.read(), data]
    assert [len(rows) for rows in reads if len(rows)] == [len(data)]  # for the line above
    assert go(mixed).rows[0]["failed"] == {}


def test_study_of_a_stored_folder_equals_one_in_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal = partial(partition.iid, clients=4)
    how: dict[str, Any] = {"rounds": 1, "own_tests": 0.25, "server_share": 0.2, "participation": 2}
    read = {"normalization": HALF}
    data = {
        "loaded": partial(load_folder, str(source), **read),
        "opened": partial(open_folder, str(source), cache=str(tmp_path / "cache"), **read),
    }
    ways = {
        "FedAvg": Federated(FedAvg, settings={"steps": 1, "batch": 4, "lr": 0.05}),
        "Subset": Condense(subset, num_networks=1, protocol=Protocol(epochs=1)),
    }
    found = []
    for name, images in data.items():
        task = Task("noise", images, deal, Tiny, **how)
        study = Study(tmp_path / name, task, ways, seeds=(0,))
        study.run(trial=False, progress=False)
        found.append({record.method: record.line for record in study.records()})
    loaded, opened = found
    for way, line in loaded.items():
        assert opened[way]["hash"] == line["hash"]
        assert opened[way]["accuracy_last"] == line["accuracy_last"]
    assert loaded["FedAvg"]["accuracy_own"] is not None


def subset(factory: Any) -> Any:
    return partial(random_subset, ipc=2)
