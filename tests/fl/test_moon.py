"""MOON against its loss in NumPy, with rounds in which clients are and are not drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl import FedAvg, simulate
from fl.addons import MOON
from fl.averaging.addon import AddOn
from tests.fl import linear
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same
from tests.refused import refused


def contrast(client: int, w: Any, start: Any, previous: Any, temperature: float) -> float:
    """Return Eq. 3, the mean over the client's images."""
    z, glob, prev = (linear.XS[client] @ v for v in (w, start, previous))

    def cos(a: Any, b: Any) -> Any:
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    near, far = np.exp(cos(z, glob) / temperature), np.exp(cos(z, prev) / temperature)
    return float(-np.log(near / (near + far)).mean())


@pytest.mark.golden("MOON", source="Li et al., CVPR 2021, Eq. 3")
@pytest.mark.parametrize(("momentum", "participation"), [(0.0, 1.0), (0.9, 2)])
def test_rounds_follow_equation_3(momentum: float, participation: float | int) -> None:
    mu, temperature, rounds = 0.8, 0.4, 5
    result = linear.run(
        MOON(mu, temperature), rounds=rounds, momentum=momentum, epochs=3, how={"participation": participation}
    )
    w = linear.START
    previous: dict[int, Any] = {}
    for row in result.rows:
        trained = []
        for k in row["drawn"]:
            before = previous.get(k)

            def loss(v: Any, k: int = k, w: Any = w, away: Any = before) -> float:
                term = 0.0 if away is None else mu * contrast(k, v, w, away, temperature)
                return linear.base_loss(k, v) + term

            trained.append(linear.descend(loss, w, 3, momentum=momentum))
        previous |= dict(zip(row["drawn"], trained))
        w = linear.average(trained, row["drawn"])
    assert linear.weights(result) == pytest.approx(w, abs=2e-6)
    base = linear.run(rounds=rounds, momentum=momentum, epochs=3, how={"participation": participation})
    assert np.abs(linear.weights(base) - w).max() > 1e-3


def test_first_round_and_weight_zero_equal_the_base() -> None:
    clients = federation()
    options: dict[str, Any] = {"factory": lambda k: Tiny(k, norm=True), "lr": 0.1, "batch": 6}

    def play(*addons: AddOn, rounds: int = 1) -> Any:
        return simulate(FedAvg(*addons, **options), clients, rounds=rounds, progress=False)

    for addons, rounds in (([MOON(5.0)], 1), ([MOON(0.0)], 3)):
        assert_same(play(*addons, rounds=rounds), play(rounds=rounds))
    near, base = play(MOON(1e-9), rounds=3), play(rounds=3)
    for name, value in base.server.state[FedAvg.model].items():
        assert torch.allclose(near.server.state[FedAvg.model][name], value, atol=1e-6)


def test_sends_nothing_more_than_fedavg() -> None:
    plain, moon = (
        simulate(FedAvg(*a, factory=Tiny), federation(), rounds=2, progress=False).rows for a in ((), (MOON(),))
    )
    for one, other in zip(plain, moon):
        assert (one["up"], one["down"]) == (other["up"], other["down"])


def test_frozen_models_do_not_update_batch_statistics() -> None:
    """Both frozen models run in eval mode: counters count the steps of one network."""
    clients = federation()
    run = simulate(FedAvg(MOON(), factory=lambda k: Tiny(k, norm=True), batch=6), clients, rounds=2, progress=False)
    steps = max(-(-len(c) // 6) for c in clients)
    assert int(run.server.state[FedAvg.model]["body.1.num_batches_tracked"]) == 2 * steps


def test_refusals() -> None:
    refused(lambda: MOON(-1.0), ValueError, "mu must be at least 0")
    refused(lambda: MOON(temperature=1e-300), ValueError, "temperature must be at least 1e-06")
