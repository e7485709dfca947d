"""SCAFFOLD against its equations in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fl import ClientOptimizer, FedAvg, Run, simulate
from fl.addons import SCAFFOLD, FedProx
from fl.averaging.addon import AddOn
from fl.batches import Batch, Phase
from tests.fl import quadratic
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import network


class Zapped(AddOn):
    """The reply of one client in one round is lost after training."""

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        if (local.round, local.client.id) == (2, 2):
            raise RuntimeError("lost")


def variates(run: Run) -> Any:
    return run.server.state[SCAFFOLD.control]["w"].double().numpy()


def effective_lr(steps: int, lr: float, momentum: float) -> float:
    """sum_k lr (1 - rho^(tau - k)) / (1 - rho)."""
    return sum(lr * (1 - momentum ** (steps - k)) / (1 - momentum) for k in range(steps))


@pytest.mark.golden("SCAFFOLD", source="Karimireddy et al., ICML 2020, Algorithm 1, option II")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("addons", [(), (Zapped(),)])
def test_rounds_of_two_weights_follow_algorithm_1(momentum: float, addons: tuple[AddOn, ...]) -> None:
    """Two of three clients a round, 3, 1 and 5 steps, weighted by samples, decaying rates, one lost reply."""
    run = quadratic.run(
        SCAFFOLD(), *addons, rounds=5, participation=2, batch=1, momentum=momentum,
        optimizer=ClientOptimizer(lr_decay=0.9),
    )  # fmt: skip
    w, c, own = quadratic.START.copy(), np.zeros(2), np.zeros((3, 2))
    for t, row in enumerate(run.rows):
        lr, total, step, change = 0.1 * 0.9**t, 0, np.zeros(2), np.zeros(2)
        for i in row["drawn"]:
            if addons and (t + 1, i) == (2, 2):
                assert row["failed"]["2"].startswith("raised RuntimeError: lost (line ")
                assert len(row["failed"]) == 1
                continue
            n = quadratic.COUNTS[i]
            delta = quadratic.train(i, w, n, lr, momentum, shift=c - own[i])
            new = own[i] - c - delta / effective_lr(n, lr, momentum)
            change += new - own[i]
            own[i] = new
            step += n * delta
            total += n
        w, c = w + step / total, c + change / 3
    assert quadratic.weights(run) == pytest.approx(w, abs=1e-6)
    assert variates(run) == pytest.approx(c, abs=1e-6)
    assert c == pytest.approx(own.mean(0))
    assert any(row["failed"] for row in run.rows) == bool(addons)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.8, 0.3)])
def test_control_variate_of_a_constant_gradient_is_that_gradient(momentum: float, mu: float) -> None:
    """20 steps of gradient (1, 1): dividing by K lr would give 6.05 instead of 1 at momentum 0.9."""

    class Constant(AddOn):
        def correct_gradient(self, step: Any, grads: Any) -> None:
            pull = mu * (step.trained["w"] - step.local.start["w"])
            grads["w"] = torch.ones(2) + pull.detach()

    run = quadratic.run(Constant(), FedProx(mu), SCAFFOLD(), rounds=1, steps=20, momentum=momentum)
    assert variates(run) == pytest.approx([1.0, 1.0], abs=1e-5)


def test_variates_travel_for_parameters_and_double_the_traffic() -> None:
    """Parameters: 27 + 3 (convolution), 3 + 3 (batch norm), 144 + 3; no variate for the statistics."""
    run = simulate(FedAvg(SCAFFOLD(), factory=network), federation(), rounds=2, participation=2, progress=False)
    size = 4 * (30 + 6 + 147)
    assert [row["up"]["SCAFFOLD.drift"] for row in run.rows] == [2 * size] * 2
    assert [row["down"]["SCAFFOLD.control"] for row in run.rows] == [0, 2 * size]
    assert run.rows[1]["up"]["FedAvg.update"] == 2 * size


def test_personal_parameters_have_no_variate_and_frozen_ones_keep_it() -> None:
    phases = [Phase(epochs=2, train="classifier.*"), Phase(epochs=1, train="body.*")]
    method = FedAvg(SCAFFOLD(), factory=Tiny, personal="classifier.*", phases=phases)
    run = simulate(method, federation(), rounds=2, progress=False)
    assert set(run.server.state[SCAFFOLD.control]) == {"body.0.weight", "body.0.bias"}
    method = FedAvg(SCAFFOLD(), factory=Tiny, phases=phases[:1])
    run = simulate(method, federation(), rounds=2, progress=False)
    assert not run.server.state[SCAFFOLD.control]["body.0.weight"].any()
    assert run.server.state[SCAFFOLD.control]["classifier.weight"].any()


def test_client_without_a_step_keeps_its_variate() -> None:
    class Lazy(AddOn):
        """Client 0 trains only in the first round."""

        def batches(self, local: Any, data: Any, phase: Any) -> Iterator[Batch]:
            if local.client.id or local.round == 1:
                yield from local.batches(data, phase, "lazy")

    run = quadratic.run(Lazy(), SCAFFOLD(), rounds=2)
    first = [-quadratic.train(i, quadratic.START, 1, 0.1) / 0.1 for i in range(3)]
    w = quadratic.weights(quadratic.run(Lazy(), SCAFFOLD(), rounds=1))
    second = [quadratic.gradient(i, w) for i in (1, 2)]
    assert variates(run) == pytest.approx((first[0] + sum(second)) / 3, abs=1e-5)


def test_named_architecture_has_variates_too() -> None:
    alone = simulate(FedAvg(SCAFFOLD(), factory=Tiny), federation(), rounds=3, progress=False)
    named = simulate(FedAvg(SCAFFOLD(), factory={"tiny": Tiny}), federation(), rounds=3, progress=False)
    assert set(named.server.state[SCAFFOLD.control]) == {f"tiny/{n}" for n in alone.server.state[SCAFFOLD.control]}
