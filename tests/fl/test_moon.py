"""MOON against its loss in NumPy, with rounds in which clients are and are not drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl import FedAvg, simulate
from fl.addons import MOON
from tests.fl import linear
from tests.fl.federations import Tiny, federation


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


def test_frozen_models_do_not_update_batch_statistics() -> None:
    """Both frozen models run in eval mode: counters count the steps of one network."""
    clients = federation()
    run = simulate(FedAvg(MOON(), factory=lambda k: Tiny(k, norm=True), batch=6), clients, rounds=2, progress=False)
    steps = max(-(-len(c) // 6) for c in clients)
    assert int(run.server.state[FedAvg.model]["body.1.num_batches_tracked"]) == 2 * steps
