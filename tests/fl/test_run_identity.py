"""Identity of a run: resuming with other data or another network is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distillkit import LabeledImages
from distillkit._utils.provenance import RUN_FORMAT
from distillkit.fingerprint import set_fingerprint
from distillkit.privacy import Ledger
from fl import ClientData, FedAvg, FedDM, Filtered, RunFolder, simulate
from fl.engine.store import CheckpointError
from fl.filters.client_dp import ClientDP
from fl.methods import FedProto
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same


class Leaky(Tiny):
    """Network with the same parameters and names, but another activation."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.body[2] = nn.LeakyReLU(0.1)


class Wide(Tiny):
    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.body[0] = nn.Conv2d(1, 6, 3, padding=1)
        self.classifier = nn.Linear(96, outputs)


def client_data() -> list[ClientData]:
    return [ClientData(data, images(8, seed=50 + k)) for k, data in enumerate(federation())]


def play(out: Any = None, method: Any = None, clients: Any = None, **how: Any) -> Any:
    options = {"rounds": 2, "test": images(20, 77), "server_data": {"proxy": images(9, 78)}, "out": out, **how}
    return simulate(method or FedAvg(factory=Tiny), clients or client_data(), progress=False, **options)


def swapped(data: LabeledImages) -> LabeledImages:
    """Swap two pixels of one image; labels, counts and sums are unchanged."""
    pixels = data.images.clone()
    pixels[0, 0, 0, 0], pixels[0, 0, 3, 3] = data.images[0, 0, 3, 3], data.images[0, 0, 0, 0]
    return data.replace(images=pixels)


def other_train() -> dict[str, Any]:
    clients = client_data()
    return {"clients": [*clients[:4], ClientData(swapped(clients[4].train), clients[4].test)]}


def other_own_test() -> dict[str, Any]:
    clients = client_data()
    return {"clients": [*clients[:4], ClientData(clients[4].train, swapped(clients[4].test or clients[4].train))]}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_train, "data"),
        (other_own_test, "data"),
        (lambda: {"clients": client_data()[::-1]}, "data"),
        (lambda: {"test": swapped(images(20, 77))}, "test"),
        (lambda: {"server_data": {"proxy": swapped(images(9, 78))}}, "server_data"),
        (lambda: {"method": FedAvg(factory=Leaky)}, "network"),
        (lambda: {"method": FedAvg(factory=Wide)}, "network"),
        (lambda: {"method": FedAvg(factory=lambda k: Tiny(k, norm=True))}, "network"),
        (lambda: {"method": FedAvg(factory=lambda k: nn.Sequential(nn.Flatten(), nn.Linear(16, k)))}, "network"),
    ],
    ids=["a client", "its test", "order", "test", "server", "activation", "width", "norm", "class"],
)
def test_resuming_with_other_data_or_another_network_is_refused(
    change: Callable[[], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    play(tmp_path, rounds=1)
    differences = rf"({name}[\w.\[\]]*: was [^;]*, now [^;]*(; )?)+"
    with pytest.raises(CheckpointError, match=rf"holds a run with other settings \({differences}\);"):
        play(tmp_path, resume=True, **change())
    assert_same(play(tmp_path, resume=True), play())


NOTED: dict[str, Any] = {"participation": 3, "min_replies": 2, "evaluate": [1, 2], "seed": 5, "rounds": 1}


def config_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text(encoding="utf-8"))


def test_config_states_every_option_and_each_other_value_is_another_run(tmp_path: Path) -> None:
    play(RunFolder(tmp_path, notes={"why": "a test"}), server_threads=2, **NOTED)
    facts = {"task": "Classification(num_classes=3)", "clients": 5, "device": "cpu", "format": RUN_FORMAT}
    config, threads = config_of(tmp_path), {"client": 1, "server": 2}
    proxy, test = images(9, 78), images(20, 77)
    facts |= {"test": [20, set_fingerprint(test)], "server_data": {"proxy": [9, set_fingerprint(proxy)]}}
    stated = {**NOTED, **facts, "threads": threads, "notes": {"why": "a test"}}
    assert {name: config[name] for name in stated} == stated
    assert config.keys() - stated.keys() == {"method", "data", "network", "versions", "recipe", "labels", "images"}
    differing = {"participation": (2, "3, now 2"), "min_replies": (1, "2, now 1"), "seed": (6, "5, now 6")}
    differing |= {"evaluate": ([1, 3], "2, now 3"), "server_threads": (1, "2, now 1")}
    labels = {"evaluate": "evaluate[1]", "server_threads": "threads.server"}
    for name, (value, was) in differing.items():
        said = f"{tmp_path} holds a run with other settings ({labels.get(name, name)}: was {was}); give another folder"
        with pytest.raises(CheckpointError, match=f"^{re.escape(said)}$"):
            play(tmp_path, resume=True, **{"server_threads": 2, **NOTED, name: value})
    play(RunFolder(tmp_path, transcript=True), resume=True, server_threads=2, **NOTED)


@pytest.mark.parametrize("kind", [FedDM, FedProto])
def test_other_methods_check_their_network_too(kind: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if kind is FedProto else {"ipc": 1, "steps": 1, "server_epochs": 1, "batch_real": 4}
    play(tmp_path, kind(factory=Tiny, **options), rounds=1)
    with pytest.raises(CheckpointError, match="network.class: was .Tiny., now .Leaky"):
        play(tmp_path, kind(factory=Leaky, **options), resume=True)


def test_config_of_a_private_run_reveals_no_hash_of_the_data(tmp_path: Path) -> None:
    """Two runs on the same data have different salted hashes, and each recognizes its own data."""
    made = lambda: Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(sigma=4.0, rate=0.5, clip=1.0))  # noqa: E731
    said = []
    for name in ("a", "b"):
        play(tmp_path / name, made(), secret=1)
        said.append(config_of(tmp_path / name))
        assert len((tmp_path / name / "checkpoint" / "identity.key").read_bytes()) == 32
    assert said[0]["data"] != said[1]["data"]
    plain = [set_fingerprint(data) for h in client_data() for data in (h.train, h.test) if data is not None]
    assert not any(text in json.dumps(said[0]) for text in [*plain, set_fingerprint(images(20, 77))])
    play(tmp_path / "a", made(), secret=1, rounds=3, resume=True)
    with pytest.raises(CheckpointError, match="data: was"):
        play(tmp_path / "a", made(), secret=1, rounds=3, resume=True, **other_train())
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=1e-4, disjoint=False, budget=90.0)
    play(RunFolder(tmp_path, transcript=True), made(), secret=7, ledger=ledger)
    sees = "every message of every client in completed rounds; interrupted rounds are in folders of their own"
    stated = {"privacy": {"delta": 1e-4, "secret": 7, "disjoint": False}, "budget": 90.0}
    stated["transcript"] = {"adversary": "server", "sees": sees}
    assert {name: config_of(tmp_path)[name] for name in stated} == stated
    (tmp_path / "b" / "checkpoint" / "identity.key").unlink()
    with pytest.raises(CheckpointError, match="the data cannot be compared"):
        play(tmp_path / "b", made(), secret=1, rounds=3, resume=True)


def test_without_a_folder_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError

    monkeypatch.setattr("fl.engine._run_record.set_fingerprint", never)
    play()
