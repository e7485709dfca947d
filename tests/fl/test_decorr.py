"""FedDecorr against its loss written in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl import FedAvg, simulate
from fl.addons import FedDecorr
from tests.fl import linear
from tests.fl.laws import assert_lawful, assert_same
from tests.fl.small import Tiny, federation


def collapse(client: int, w: Any, variant: str) -> float:
    """|K|_F^2 / d^2 of the correlation matrix; or the release's off-diagonal mean of (Z^T Z)^2, divided by N."""
    z = linear.XS[client] @ w
    n, d = z.shape
    if variant == "paper":
        return float((np.corrcoef(z.T) ** 2).sum() / d**2)
    z = (z - z.mean(0)) / z.std(0, ddof=1)
    gram = z.T @ z
    return float(((gram**2).sum() - (np.diag(gram) ** 2).sum()) / (d * (d - 1)) / n)


@pytest.mark.golden("FedDecorr")
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_follow_the_loss(variant: Any, momentum: float) -> None:
    beta, w = 0.4, linear.START
    result = linear.run(FedDecorr(beta, variant), rounds=3, momentum=momentum, epochs=2, lr=0.05)
    base = linear.run(rounds=3, momentum=momentum, epochs=2, lr=0.05)
    for _ in range(3):
        trained = []
        for k in range(3):

            def loss(v: Any, k: int = k) -> float:
                return linear.base_loss(k, v) + beta * collapse(k, v, variant)

            trained.append(linear.descend(loss, w, 2, lr=0.05, momentum=momentum))
        w = linear.average(trained)
    assert linear.weights(result) == pytest.approx(w, abs=2e-6)
    assert np.abs(linear.weights(base) - w).max() > 1e-3


def test_off_and_a_batch_of_one_are_the_base() -> None:
    def play(*addons: FedDecorr, **options: Any) -> Any:
        return simulate(FedAvg(*addons, network=Tiny, **options), federation(), rounds=2, progress=False)

    assert_same(play(FedDecorr(0.0)), play())
    assert_same(play(FedDecorr(9.0), batch=1), play(batch=1))
    near, base = play(FedDecorr(1e-9)), play()
    for name, value in base.server.state[FedAvg.model].items():
        assert torch.allclose(near.server.state[FedAvg.model][name], value, atol=1e-6)


def test_laws(tmp_path: Path) -> None:
    assert_lawful(lambda: [FedDecorr(0.5)], tmp_path)


def test_nothing_more_than_fedavg_travels() -> None:
    rows = [
        simulate(FedAvg(*a, network=Tiny), federation(), rounds=1, progress=False).rows for a in ((), (FedDecorr(),))
    ]
    assert (rows[0][0]["up"], rows[0][0]["down"]) == (rows[1][0]["up"], rows[1][0]["down"])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="beta must be at least 0"):
        FedDecorr(-1.0)
    with pytest.raises(ValueError, match="variant must be one of"):
        FedDecorr(variant="mine")  # type: ignore[arg-type]
