"""Ditto against its algorithm in NumPy, and its side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl import FedAvg, simulate
from fl.addons import Ditto
from fl.averaging.addon import AddOn
from tests.fl import linear
from tests.fl.federations import Tiny, federation


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


def test_memory_has_batch_statistics_of_its_own() -> None:
    peek = Peek()
    method = FedAvg(Ditto(), peek, factory=lambda k: Tiny(k, norm=True), batch=6)
    run = simulate(method, federation(), rounds=1, progress=False)
    own = peek.seen[1, 0]
    assert own.keys() == run.server.state[FedAvg.model].keys()
    assert not torch.equal(own["body.1.running_mean"], run.server.state[FedAvg.model]["body.1.running_mean"])
