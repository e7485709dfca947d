"""Ditto against its algorithm in NumPy, and its side effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl import ClientData, FedAvg, simulate
from fl.addons import MOON, Ditto, FineTune
from fl.averaging.addon import AddOn
from tests.fl import linear
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.refused import refused


class Peek(AddOn):
    """Records the personal models after Ditto's training."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Any] = {}

    key = "Z"

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        self.seen[local.round, local.client.id] = local.memory[Ditto.own]


@pytest.mark.golden("Ditto", source="Li et al., ICML 2021, Algorithm 1")
@pytest.mark.parametrize(("momentum", "participation"), [(0.0, 1.0), (0.9, 2)])
def test_personal_models_follow_algorithm_1(momentum: float, participation: float | int) -> None:
    lam, peek = 0.7, Peek()
    result = linear.run(
        Ditto(lam, steps=3), peek, rounds=4, momentum=momentum, epochs=2, how={"participation": participation}
    )
    w = linear.START
    own: dict[int, Any] = {}
    for row in result.rows:
        trained = []
        for k in row["drawn"]:

            def near(v: Any, k: int = k, w: Any = w) -> float:
                return linear.base_loss(k, v) + lam / 2 * float(((v - w) ** 2).sum())

            def base(v: Any, k: int = k) -> float:
                return linear.base_loss(k, v)

            own[k] = linear.descend(near, own.get(k, w), 3, momentum=momentum)
            trained.append(linear.descend(base, w, 2, momentum=momentum))
            found = peek.seen[row["round"], k]["w.weight"].double().numpy()
            assert found == pytest.approx(own[k], abs=2e-6)
        w = linear.average(trained, row["drawn"])
    assert linear.weights(result) == pytest.approx(w, abs=2e-6)


def client_data() -> list[ClientData]:
    return [ClientData(c, images(20, 50 + k)) for k, c in enumerate(federation())]


def test_global_model_is_bitwise_unchanged() -> None:
    def play(*addons: AddOn) -> Any:
        method = FedAvg(*addons, factory=lambda k: Tiny(k, norm=True), lr=0.1, batch=6)
        return simulate(method, client_data(), rounds=3, progress=False)

    base, ditto = play(MOON()), play(Ditto(0.3, epochs=2), MOON())
    assert_same(base, ditto)
    for one, other in zip(base.rows, ditto.rows):
        assert (one["up"], one["down"]) == (other["up"], other["down"])
        assert one["accuracy_clients"] == other["accuracy_clients"]


def test_strong_pull_gives_the_global_model_and_no_pull_local_training() -> None:
    peek = Peek()
    result = linear.run(Ditto(9.0, steps=200), peek, rounds=1, epochs=1)
    assert np.abs(peek.seen[1, 0]["w.weight"].double().numpy() - linear.START).max() < 0.08
    peek = Peek()
    linear.run(Ditto(0.0, steps=4), peek, rounds=2)
    for k in range(3):
        alone = linear.descend(lambda v, k=k: linear.base_loss(k, v), linear.START, 8)  # type: ignore[misc]
        assert peek.seen[2, k]["w.weight"].double().numpy() == pytest.approx(alone, abs=2e-6)
    assert result.rows[0]["round"] == 1


def test_personal_models_are_bitwise_equal_with_workers_and_resumed(tmp_path: Path) -> None:
    def play(rounds: int = 4, **how: Any) -> list[Any]:
        method = FedAvg(Ditto(0.5), factory=lambda k: Tiny(k, norm=True), lr=0.1, batch=6)
        run = simulate(method, client_data(), rounds=rounds, participation=2, evaluate="all", progress=False, **how)
        return [row["accuracy_personal"] for row in run.rows]

    whole = play()
    assert play(workers=3) == whole
    play(rounds=2, out=tmp_path / "run")
    assert play(out=tmp_path / "run", resume=True) == whole


def test_personal_models_beat_the_global_one_with_conflicting_labels() -> None:
    """Clients label the same images differently, so one model cannot fit all of them."""
    clients = []
    for k in range(3):
        train, test = images(40, k), images(60, 70 + k)
        clients.append(
            ClientData(*(s.replace(labels=(s.labels + k) % 3) for s in (train, test)))
        )  # fmt: skip
    run = simulate(FedAvg(Ditto(0.01, epochs=3), factory=Tiny, lr=0.1), clients, rounds=6, progress=False)
    last = run.rows[-1]
    assert last["accuracy_personal"]["mean"] > 0.8 > 0.6 > last["accuracy_clients"]["mean"]


def test_refusals() -> None:
    refused(lambda: Ditto(-0.1), ValueError, "lam must be at least 0")
    refused(lambda: Ditto(steps=0), ValueError, "steps must be")
    refused(lambda: FedAvg(Ditto(), factory=Tiny, personal="classifier.*"), ValueError, "Ditto needs whole models")
    refused(lambda: FedAvg(Ditto(), FineTune(), factory=Tiny), ValueError, "both fill the slot 'personal_model'")


def test_memory_has_batch_statistics_of_its_own() -> None:
    peek = Peek()
    method = FedAvg(Ditto(), peek, factory=lambda k: Tiny(k, norm=True), batch=6)
    run = simulate(method, federation(), rounds=1, progress=False)
    own = peek.seen[1, 0]
    assert own.keys() == run.server.state[FedAvg.model].keys()
    assert not torch.equal(own["body.1.running_mean"], run.server.state[FedAvg.model]["body.1.running_mean"])
