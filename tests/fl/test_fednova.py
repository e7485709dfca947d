"""FedNova against its equations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl import ClientOptimizer, FedAvg, simulate
from fl.addons import FedNova, FedProx
from fl.batches import Phase
from tests.fl import quadratic
from tests.fl.federations import Tiny, images
from tests.fl.invariances import network


def normalizer(steps: int, momentum: float, pull: float) -> float:
    """Return |a_i|_1 by the paper's formulas: momentum alone, or a proximal term alone (pull = lr mu)."""
    if momentum:
        return sum((1 - momentum ** (steps - k)) / (1 - momentum) for k in range(steps))
    return sum((1 - pull) ** k for k in range(steps))


@pytest.mark.golden(
    "FedNova", source="Wang et al., NeurIPS 2020, section 4: a_i of momentum and of a proximal term, tau_eff"
)
@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_rounds_of_two_weights_follow_the_paper(momentum: float, mu: float, weights: str) -> None:
    """Clients take 3, 1 and 5 steps; two of three are drawn; the rate falls."""
    run = quadratic.run(
        FedNova(), FedProx(mu), rounds=4, participation=2, batch=1, momentum=momentum,
        optimizer=ClientOptimizer(lr_decay=0.8), weights=weights,
    )  # fmt: skip
    w = quadratic.START.copy()
    for t, row in enumerate(run.rows):
        lr = 0.1 * 0.8**t
        n = np.array([quadratic.COUNTS[i] for i in row["drawn"]])
        p = n / n.sum() if weights == "samples" else np.full(len(n), 1 / len(n))
        a = np.array([normalizer(steps, momentum, lr * mu) for steps in n])
        deltas = []
        for i, steps in zip(row["drawn"], n):
            here, buffer = w.copy(), np.zeros(2)
            for _ in range(steps):
                buffer = momentum * buffer + quadratic.gradient(i, here) + mu * (here - w)
                here -= lr * buffer
            deltas.append(here - w)
        w = w + (p * a).sum() * sum(q * d / b for q, d, b in zip(p, deltas, a))
    assert quadratic.weights(run) == pytest.approx(w, abs=1e-6)


def test_equal_steps_give_plain_averaging() -> None:
    """This holds for all phases, for each architecture and for shared names, which are normalized apart."""
    clients = [images(12, seed=k) for k in range(4)]
    phases = [Phase(epochs=2, train="classifier.*"), Phase(epochs=1)]
    for options in (
        {"optimizer": "adam"},
        {"factory": network, "batch": 6, "momentum": 0.9, "buffers": "local"},
        {"phases": phases},
        {"phases": phases, "personal": "classifier.*"},
        {"factory": {"a": Tiny, "b": network}, "assign": lambda k: "ab"[k % 2]},
    ):
        options: dict[str, Any] = {"factory": Tiny, **options}
        runs = [simulate(FedAvg(*a, **options), clients, rounds=2, progress=False) for a in ((), (FedNova(),))]
        for name, value in runs[0].server.state[FedAvg.model].items():
            assert torch.allclose(value, runs[1].server.state[FedAvg.model][name], atol=1e-6), name
