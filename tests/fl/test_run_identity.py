"""Identity of a run: resuming with other data or another network is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distillkit import LabeledImages
from distillkit.fingerprint import set_fingerprint
from fl import ClientData, FedAvg, FedDM, Filtered, simulate
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


def play(out: Path | None = None, method: Any = None, clients: Any = None, **how: Any) -> Any:
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
        said.append(json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8")))
        assert len((tmp_path / name / "checkpoint" / "identity.key").read_bytes()) == 32
    assert said[0]["data"] != said[1]["data"]
    plain = [set_fingerprint(data) for h in client_data() for data in (h.train, h.test) if data is not None]
    assert not any(text in json.dumps(said[0]) for text in [*plain, set_fingerprint(images(20, 77))])
    play(tmp_path / "a", made(), secret=1, rounds=3, resume=True)
    with pytest.raises(CheckpointError, match="data: was"):
        play(tmp_path / "a", made(), secret=1, rounds=3, resume=True, **other_train())
    (tmp_path / "b" / "checkpoint" / "identity.key").unlink()
    with pytest.raises(CheckpointError, match="the data cannot be compared"):
        play(tmp_path / "b", made(), secret=1, rounds=3, resume=True)


def test_without_a_folder_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError

    monkeypatch.setattr("fl.engine._run_record.set_fingerprint", never)
    play()
