"""FedAvgM, FedAdagrad, FedAdam and FedYogi against their formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fl import FedAvg, Run, ServerAdaptive, simulate
from fl.addons import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fl.averaging.addon import AddOn
from tests.fl import quadratic
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import network, tensors
from tests.refused import refused

Vector = Any


def check_steps(addon: AddOn, step: Callable[[int, Vector], Vector]) -> None:
    """Check that the server's step is `step(round, mean change)` in five rounds of two of three clients."""
    run = quadratic.run(addon, rounds=5, participation=2, batch=1, momentum=0.5)
    w = quadratic.START.copy()
    for t, row in enumerate(run.rows):
        n = [quadratic.COUNTS[i] for i in row["drawn"]]
        deltas = [quadratic.train(i, w, k, 0.1, 0.5) for i, k in zip(row["drawn"], n)]
        w = w + step(t, sum(k * d for k, d in zip(n, deltas)) / sum(n))
    assert quadratic.weights(run) == pytest.approx(w, abs=2e-6)


@pytest.mark.golden("FedAvgM", source="Hsu et al., 2019, section 4.3; rui-ye/FedCOG: fedcog.py for 'fedcog'")
@pytest.mark.parametrize("beta", [0.9, 0.0])
@pytest.mark.parametrize("rule", ["heavy-ball", "nesterov", "fedcog"])
def test_momentum_follows_its_formula(rule: Any, beta: float) -> None:
    v = np.zeros(2)

    def step(t: int, delta: Vector) -> Vector:
        nonlocal v
        v = beta * v + delta
        return 0.7 * {"heavy-ball": v, "nesterov": delta + beta * v, "fedcog": v if t == 0 else v / (1 + beta)}[rule]

    check_steps(FedAvgM(beta, lr=0.7, rule=rule), step)


def adaptive(second: Callable[[Vector, Vector], Vector], beta1: float, tau: float, initial: float) -> Any:
    m, v = np.zeros(2), np.full(2, initial)

    def step(t: int, delta: Vector) -> Vector:
        nonlocal m, v
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta**2)
        return 0.05 * m / (np.sqrt(v) + tau)

    return step


@pytest.mark.golden("FedAdagrad", "FedAdam", "FedYogi", source="Reddi et al., ICLR 2021, Algorithm 2")
@pytest.mark.parametrize("initial", [None, 0.0, 0.3])
def test_adaptive_steps_follow_algorithm_2(initial: float | None) -> None:
    start = 0.02**2 if initial is None else initial
    options: dict[str, Any] = {"lr": 0.05, "tau": 0.02, "initial": initial}
    check_steps(FedAdagrad(**options), adaptive(lambda v, d: v + d, 0.0, 0.02, start))
    check_steps(FedAdam(beta1=0.8, beta2=0.7, **options), adaptive(lambda v, d: 0.7 * v + 0.3 * d, 0.8, 0.02, start))
    check_steps(
        FedYogi(beta1=0.8, beta2=0.7, **options),
        adaptive(lambda v, d: v - 0.3 * d * np.sign(v - d), 0.8, 0.02, start),
    )  # fmt: skip


def test_base_class_of_adaptive_steps_cannot_be_used() -> None:
    refused(ServerAdaptive, TypeError, "abstract class ServerAdaptive .*second")


def test_buffers_are_averaged() -> None:
    base, run = (
        simulate(FedAvg(*a, factory=network), federation(), rounds=1, progress=False)
        for a in ((), (FedAdam(),))
    )  # fmt: skip
    for name in ("body.1.running_var", "body.1.num_batches_tracked"):
        assert torch.equal(run.server.state[FedAvg.model][name], base.server.state[FedAvg.model][name])


@pytest.mark.parametrize("addon", [FedAvgM(), FedAdam()], ids=lambda a: a.name)
def test_architecture_of_no_drawn_client_is_unchanged(addon: AddOn) -> None:
    method = FedAvg(addon, factory={"a": Tiny, "b": network}, assign=lambda k: "b" if k == 4 else "a")

    def play(rounds: int) -> Run:
        return simulate(method, federation(), rounds=rounds, participation=2, seed=3, progress=False)

    drawn = [4 in row["drawn"] for row in play(9).rows]
    moved = next(t for t in range(1, 9) if drawn[t - 1] and not drawn[t])
    then, now = (tensors(play(t).server.state) for t in (moved, moved + 1))
    assert then.keys() == now.keys()
    for name in then:
        still = torch.equal(then[name], now[name])
        assert still if "/b/" in name else not still or name.endswith("tracked"), name


def test_decay_of_one_is_refused() -> None:
    refused(lambda: FedAdam(beta1=1.0), ValueError, "beta1 must be")
