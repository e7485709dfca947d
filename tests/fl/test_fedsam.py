"""FedSAM against its formula in NumPy, and side effects of its second pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl import FedAvg, Run, simulate
from fl.addons import FedProx, FedSAM
from fl.averaging.addon import AddOn
from fl.batches import Phase
from fl.networks import Networks
from tests.fl import quadratic
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import network


@pytest.mark.golden("FedSAM", source="Qu et al., ICML 2022, Algorithm 1")
@pytest.mark.golden("FedProx", source="Li et al., MLSys 2020, Eq. 2")
@pytest.mark.parametrize("rho", [0.3, 0.0])
def test_rounds_of_two_weights_follow_the_formula(rho: float) -> None:
    """FedProx's pull is part of the perturbed loss: its gradient is also evaluated at the perturbed weights."""
    mu = 0.4
    run = quadratic.run(FedSAM(rho), FedProx(mu), rounds=3, participation=2, batch=1, momentum=0.9)
    w = quadratic.START.copy()
    for row in run.rows:
        n, deltas = [quadratic.COUNTS[i] for i in row["drawn"]], []
        for i, steps in zip(row["drawn"], n):
            here, buffer = w.copy(), np.zeros(2)
            for _ in range(steps):
                g = quadratic.gradient(i, here) + mu * (here - w)
                there = here + rho * g / np.linalg.norm(g)
                buffer = 0.9 * buffer + quadratic.gradient(i, there) + mu * (there - w)
                here -= 0.1 * buffer
            deltas.append(here - w)
        w = w + sum(k * d for k, d in zip(n, deltas)) / sum(n)
    assert quadratic.weights(run) == pytest.approx(w, abs=1e-6)


def play(*addons: AddOn, rounds: int = 1, **options: Any) -> Run:
    method = FedAvg(*addons, **{"factory": network, "lr": 0.1, "batch": 6, **options})
    return simulate(method, federation()[:2], rounds=rounds, progress=False)


@pytest.mark.parametrize("drop", [nn.Dropout, nn.Dropout2d])
def test_tiny_radius_equals_sgd_with_the_same_dropout_and_statistics(drop: Any) -> None:
    def dropping(outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), drop(0.5), nn.Flatten(), nn.Linear(16, outputs)
        )

    base, near = (play(*a, rounds=2, factory=dropping).server.state[FedAvg.model] for a in ((), (FedSAM(1e-7),)))
    for name, value in base.items():
        assert torch.allclose(value.double(), near[name].double(), atol=1e-5), name


def test_statistics_update_once_a_step_at_the_unperturbed_weights() -> None:
    base, far = (play(*a, phases=[Phase(steps=1)]).server.state[FedAvg.model] for a in ((), (FedSAM(2.0),)))
    for name in ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"):
        assert torch.equal(base[name], far[name]), name
    assert not torch.allclose(base["classifier.weight"], far["classifier.weight"], atol=1e-3)


def test_weights_are_restored_bitwise() -> None:
    class Still(AddOn):
        """Sets the gradient to zero, so no weight may change."""

        def correct_gradient(self, step: Any, grads: Any) -> None:
            for name in grads:
                grads[name] = torch.zeros_like(grads[name])

    run = play(FedSAM(3.0), Still(), factory=Tiny)
    start = Networks(Tiny).first("", 3, 0)
    assert all(torch.equal(t, start[n]) for n, t in run.server.state[FedAvg.model].items())


def test_only_trained_parameters_are_perturbed() -> None:
    """With frozen features the norm is the classifier's alone."""
    seen: list[float] = []

    class Zoom(AddOn):
        def loss(self, step: Any) -> None:
            moved = [
                (p.detach() - step.local.start[n]).square().sum() for n, p in step.local.shared_parameters().items()
            ]
            seen.append(float(torch.stack(moved).sum().sqrt()))

    play(FedSAM(0.5), Zoom(), phases=[Phase(steps=1, train="classifier.*")], lr=1e-9)
    assert seen == [pytest.approx(x, abs=1e-5) for x in (0, 0.5, 0, 0.5)]


def test_zero_gradient_means_no_perturbation() -> None:
    run = play(FedSAM(0.5), objective=lambda logits, labels: 0.0 * logits.sum())
    assert torch.isfinite(run.server.state[FedAvg.model]["classifier.weight"]).all()
