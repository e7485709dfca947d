"""FedReg against its steps in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl import FedAvg, simulate
from fl.addon import AddOn
from fl.addons import SAM, FedReg, Nova, Proximal, Scaffold
from tests.fl import linear
from tests.fl.laws import assert_lawful
from tests.fl.small import Tiny, federation


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(x: Any, targets: Any, w: Any) -> float:
    return float(-(targets * np.log(softmax(x @ w))).sum(1).mean())


def lowered(x: Any, targets: Any, w: Any, eta: float, iterations: int) -> Any:
    low, high = x.min(), x.max()
    for _ in range(iterations):
        x = np.clip(x - eta * np.sign((softmax(x @ w) - targets) @ w.T), low, high)
    return x


def local(k: int, start: Any, steps: int, gamma: float, eta: float, lr: float) -> Any:
    x, hard = linear.XS[k], np.eye(2)[linear.YS[k]]
    pseudo, perturbed = lowered(x, hard, start, eta, 3), lowered(x, hard, start, eta / 100, 3)
    soft, w = softmax(pseudo @ start), start.copy()
    for _ in range(steps):
        w = w - lr * linear.slope(lambda v: linear.base_loss(k, v), gamma * w + (1 - gamma) * start)
        middle, rest = 0.5 * (w + start), w - start
        for images, targets in ((pseudo, soft), (perturbed, hard)):
            g = linear.slope(lambda v, i=images, t=targets: cross_entropy(i, t, v), middle)  # type: ignore[misc]
            rest = rest - max(0.0, (rest * g).sum() / (g * g).sum()) * g
        w = start + rest
    return w


@pytest.mark.golden("FedReg")
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_rounds_follow_the_steps(gamma: float) -> None:
    result = linear.run(FedReg(gamma, eta=0.2, iterations=3), rounds=3, epochs=3, lr=0.3)
    base = linear.run(rounds=3, epochs=3, lr=0.3)
    w = linear.START
    for _ in range(3):
        w = linear.average([local(k, w, 3, gamma, 0.2, 0.3) for k in range(3)])
    assert linear.weights(result) == pytest.approx(w, abs=1e-4)
    assert np.abs(linear.weights(base) - w).max() > 0.01


def test_the_drift_does_not_raise_the_loss_on_pseudo_images() -> None:
    """To first order, after each step."""
    angles = []

    class Peek(FedReg):
        def after(self, step: Any) -> None:
            super().after(step)
            local, net = step.local, step.local.of(self)["copy"]
            images, targets = step.local.of(self)["batches"][local.steps % len(step.local.of(self)["batches"])][2:]
            loss = torch.nn.functional.cross_entropy(net(images), targets)
            grads = torch.autograd.grad(loss, list(net.parameters()))
            drift = [p.detach() - local.start[n] for n, p in local.params().items()]
            angles.append(float(sum((d * g).sum() for d, g in zip(drift, grads))))

    simulate(FedAvg(Peek(), network=Tiny, lr=0.1, epochs=2), federation(), rounds=2, progress=False)
    assert angles
    assert max(angles) < 1e-5


@pytest.mark.parametrize("others", [(), (Proximal(0.1),)])
def test_laws(tmp_path: Path, others: tuple[AddOn, ...]) -> None:
    assert_lawful(lambda: [FedReg(iterations=2), *others], tmp_path, momentum=0.0)


def test_nothing_more_than_fedavg_travels_and_statistics_move_once_a_step() -> None:
    rows, states = [], []
    for addons in ((), (FedReg(iterations=1),)):
        run = simulate(
            FedAvg(*addons, network=lambda k: Tiny(k, norm=True), batch=6), federation(), rounds=1, progress=False
        )
        rows.append(run.rows[0])
        states.append(run.server.state[FedAvg.model])
    assert (rows[0]["up"], rows[0]["down"]) == (rows[1]["up"], rows[1]["down"])
    assert torch.equal(states[0]["body.1.num_batches_tracked"], states[1]["body.1.num_batches_tracked"])


def test_refusals() -> None:
    for option, value in {"gamma": 1.5, "eta": 0.0, "eta_perturbed": -1.0, "iterations": 0}.items():
        with pytest.raises(ValueError, match=option):
            FedReg(**{option: value})  # type: ignore[arg-type]
    for options in ({"momentum": 0.9}, {"optimizer": "adam"}):
        with pytest.raises(ValueError, match="plain SGD"):
            FedAvg(FedReg(), network=Tiny, **options)
    for addon in (Scaffold(), Nova()):
        with pytest.raises(ValueError, match=f"FedReg cannot be combined with {addon.name}"):
            FedAvg(FedReg(), addon, network=Tiny)
    with pytest.raises(ValueError, match="both fill the slot 'gradient'"):
        FedAvg(FedReg(), SAM(), network=Tiny)
