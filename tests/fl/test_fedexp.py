"""FedExP against its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fl import FedAvg, simulate
from fl.addons import FedExP
from tests.fl import quadratic
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import network


@pytest.mark.golden("FedExP", source="Jhunjhunwala et al., ICLR 2023, Algorithm 1")
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_of_two_weights_follow_the_formula(weights: str, momentum: float) -> None:
    """All clients, uneven steps; only some rounds extrapolate. The evaluated model is the mean of two iterates."""
    run = quadratic.run(FedExP(1e-4), rounds=12, batch=1, momentum=momentum, weights=weights)
    n = np.array(quadratic.COUNTS, float)
    p = n / n.sum() if weights == "samples" else np.full(3, 1 / 3)
    iterates, steps = [quadratic.START], []
    for row in run.rows:
        w = iterates[-1]
        deltas = [quadratic.train(i, w, k, 0.1, momentum) for i, k in enumerate(quadratic.COUNTS)]
        mean = sum(q * d for q, d in zip(p, deltas))
        steps.append(max(1.0, sum(q * d @ d for q, d in zip(p, deltas)) / (2 * (mean @ mean + 1e-4))))
        iterates.append(w + steps[-1] * mean)
        assert row["extrapolation"] == pytest.approx(steps[-1], rel=1e-4)
    assert quadratic.weights(run) == pytest.approx(iterates[-1], abs=1e-5)
    tested = run.models[""].w.detach().double().numpy()  # type: ignore[union-attr]
    assert tested == pytest.approx((iterates[-1] + iterates[-2]) / 2, abs=1e-5)
    assert min(steps) == 1
    assert max(steps) > 1.05


def test_accuracy_is_that_of_the_averaged_iterate_and_its_buffers() -> None:
    test = images(60, 9)
    run = simulate(FedAvg(FedExP(), factory=network, lr=0.1), federation(), rounds=3, test=test, progress=False)
    last, before = run.server.state[FedAvg.model], run.server.state[FedExP.before]
    net = Tiny(3, norm=True).eval()
    net.load_state_dict({n: (t + before[n]) / 2 if t.is_floating_point() else t for n, t in last.items()})
    assert run.accuracy_last == pytest.approx(float((net(test.images).argmax(1) == test.labels).float().mean()))
    assert not torch.equal(last["classifier.weight"], before["classifier.weight"])


def test_round_without_any_change_takes_no_step() -> None:
    run = quadratic.run(FedExP(0.0), rounds=2, lr=1e-30)
    assert run.rows[1]["extrapolation"] == 1
    assert np.isfinite(quadratic.weights(run)).all()


def test_tested_model_of_the_first_round_is_its_iterate() -> None:
    run = quadratic.run(FedExP(), rounds=1)
    assert run.models[""].w.tolist() == quadratic.weights(run).tolist()  # type: ignore[union-attr]
