"""Momentum kept across rounds, as in VHL's release, which never clears the optimizer of a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fl
from distillkit.augment import DSA
from fl import ClientOptimizer, FedAvg, simulate
from fl.addons import SCAFFOLD, Ditto, FedDecorr, FedExP, FedNova, FedProx
from fl.averaging.optimizer import load_state, saved_state
from fl.batches import Phase
from tests.fl import linear
from tests.fl.federations import Tiny, federation


@pytest.mark.parametrize("participation", [1.0, 2])
def test_momentum_continues_from_the_clients_last_round(participation: float | int) -> None:
    """Follow VHL's release, which never clears a client's optimiser when all are instantiated.

    See lines 133-138 of algorithms_standalone/basePS/client.py: v = .9 v + g over rounds, whatever the weights were set
    to meanwhile.
    """
    how = {"participation": participation}
    result = linear.run(
        rounds=4, how=how, epochs=2, lr=0.1, momentum=0.9, optimizer=ClientOptimizer(lr_decay=0.8, state="client")
    )
    w, velocity = linear.START, {k: np.zeros_like(linear.START) for k in range(3)}
    for t, row in enumerate(result.rows):
        trained = []
        for k in row["drawn"]:
            here = w.copy()
            for _ in range(2):
                velocity[k] = 0.9 * velocity[k] + linear.numerical_gradient(lambda v, k=k: linear.base_loss(k, v), here)  # type: ignore[misc]
                here = here - 0.1 * 0.8**t * velocity[k]
            trained.append(here)
        w = linear.average(trained, row["drawn"])
    assert linear.weights(result) == pytest.approx(w, abs=2e-5)
    forgetful = linear.run(rounds=4, how=how, epochs=2, lr=0.1, momentum=0.9, optimizer=ClientOptimizer(lr_decay=0.8))
    assert np.abs(linear.weights(forgetful) - w).max() > 0.01


Optimizers = Callable[[Tiny], Sequence[torch.optim.Optimizer]]


@pytest.mark.parametrize(
    ("options", "optimizers"),
    [
        ({"momentum": 0.9}, lambda net: [torch.optim.SGD(net.parameters(), 0.05, 0.9)]),
        ({"kind": "adam"}, lambda net: [torch.optim.Adam(net.parameters(), 0.05)]),
        (
            {"momentum": 0.5, "phases": [Phase(steps=2, train="classifier.*"), Phase(steps=1)]},
            lambda net: [*[torch.optim.SGD(net.classifier.parameters(), 0.05, 0.5)] * 2,
                         torch.optim.SGD(net.parameters(), 0.05, 0.5)],
        ),
    ],
    ids=["sgd", "adam", "phases"],
)  # fmt: skip
def test_single_client_trains_as_if_without_rounds(options: dict[str, Any], optimizers: Optimizers) -> None:
    """Every phase has its own state: here the first trains the head, the second everything."""
    data = federation()[0]
    start = {n: t.clone() for n, t in Tiny(3).state_dict().items()}
    optimizer = ClientOptimizer(options.get("kind", "sgd"), state="client")
    given = {name: value for name, value in options.items() if name != "kind"}
    method = FedAvg(factory=Tiny, initial=start, lr=0.05, batch=len(data), optimizer=optimizer, **given)
    run = simulate(method, [data], rounds=4, progress=False)
    net = Tiny(3)
    net.load_state_dict(start)
    for stepper in list(optimizers(net)) * 4:
        net.zero_grad()
        F.cross_entropy(net(data.images), data.labels).backward()
        stepper.step()
    for name, value in net.state_dict().items():
        assert torch.allclose(run.server.state[FedAvg.model][name], value, atol=1e-5), name


def test_refusals() -> None:
    with pytest.raises(ValueError, match="keeps momentum between rounds, but momentum is 0"):
        FedAvg(factory=Tiny, optimizer=ClientOptimizer(state="client"))
    for addon in (SCAFFOLD(), FedNova()):
        with pytest.raises(ValueError, match=rf"{addon.name} needs ClientOptimizer\(state='round'\)"):
            FedAvg(addon, factory=Tiny, momentum=0.9, optimizer=ClientOptimizer(state="client"))


@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_saved_state_is_a_copy(kind: Any) -> None:
    """Neither the optimiser that was saved nor one that loads the state changes what was saved."""
    names, steppers = ["a", "b"], [kind([torch.zeros(2), torch.ones(3)]) for _ in range(2)]

    def step(stepper: torch.optim.Optimizer) -> None:
        for point in stepper.param_groups[0]["params"]:
            point.grad = torch.ones_like(point)
        stepper.step()

    step(steppers[0])
    saved = saved_state(steppers[0], names)
    kept = {name: value.clone() for name, value in saved.items()}
    load_state(steppers[1], names, saved)
    for stepper in steppers:
        step(stepper)
    first, second = (saved_state(stepper, names) for stepper in steppers)
    assert saved.keys() == kept.keys() == first.keys()
    assert all(torch.equal(value, kept[name]) for name, value in saved.items())
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "optimizer": ClientOptimizer(state="client")},
        {"optimizer": ClientOptimizer("adam", weight_decay=0.1, lr_decay=0.9), "steps": 3, "weights": "uniform"},
        {"phases": [Phase(steps=2, train="classifier.*"), Phase()], "predict": "all", "buffers": "drop"},
        {"max_samples": 50.0, "max_update_norm": 5.0, "batch": 7, "lr": 0.3, "augment": DSA("flip")},
    ],
)
@pytest.mark.parametrize("addons", [(), (FedProx(0.3),), (Ditto(lam=0.2, steps=3), FedExP(), FedDecorr(0.2))])
def test_what_a_repr_shows_can_be_passed_to_the_constructor(options: dict[str, Any], addons: tuple[Any, ...]) -> None:
    method = FedAvg(*addons, factory=Tiny, **options)
    names = {**vars(fl), **vars(fl.addons), "DSA": DSA, "Tiny": Tiny}
    again = eval(f"{repr(method)[:-1]}, factory=Tiny)", names)
    assert repr(again) == repr(method)
    assert {**vars(again.settings), "networks": method.networks} == vars(method.settings)
    assert [vars(a) for a in again.addons] == [vars(a) for a in method.addons]
