"""FedRep against its algorithm box in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distillkit.rng import derive
from fl import ClientData, FedAvg, simulate
from fl.methods import FedRep
from tests.fl.federations import Tiny, federation, images


def descend(net: Tiny, names: str, data: Any, generator: torch.Generator, epochs: int, momentum: float) -> None:
    moved = [p for n, p in net.named_parameters() if n.startswith(names)]
    buffers = [torch.zeros_like(p) for p in moved]
    for _ in range(epochs):
        for index in torch.randperm(len(data), generator=generator).split(6):
            grads = torch.autograd.grad(F.cross_entropy(net(data.images[index]), data.labels[index]), moved)
            for p, b, g in zip(moved, buffers, grads):
                b.mul_(momentum).add_(g)
                p.data -= 0.1 * b


@pytest.mark.golden("FedRep", source="Collins et al., ICML 2021, Algorithm 1")
@pytest.mark.parametrize(("weights", "momentum"), [("uniform", 0.5), ("samples", 0.0)])
def test_rounds_follow_algorithm_1(weights: Any, momentum: float) -> None:
    """The head trains on the received features, then the features under the new head. Only features are averaged."""
    clients, start = federation()[:3], Tiny(3).state_dict()
    method = FedRep(
        factory=Tiny, head_epochs=2, body_epochs=1, weights=weights,
        initial=copy.deepcopy(start), lr=0.1, momentum=momentum, batch=6,
    )  # fmt: skip
    result = simulate(method, clients, rounds=4, participation=2, progress=False)
    body = {n: t for n, t in start.items() if n.startswith("body")}
    heads = [{n: t.clone() for n, t in start.items() if n.startswith("classifier")} for _ in clients]
    for row in result.rows:
        sums, total = {n: torch.zeros_like(t) for n, t in body.items()}, 0.0
        for k in row["drawn"]:
            net = Tiny(3)
            net.load_state_dict({**body, **heads[k]})
            descend(net, "classifier", clients[k], derive(0, row["round"], k, "batches0"), 2, momentum)
            descend(net, "body", clients[k], derive(0, row["round"], k, "batches1"), 1, momentum)
            state = {n: t.clone() for n, t in net.state_dict().items()}
            heads[k] = {n: t for n, t in state.items() if n.startswith("classifier")}
            weight = float(len(clients[k])) if weights == "samples" else 1.0
            total += weight
            for n in body:
                sums[n] += weight * state[n]
        body = {n: t / total for n, t in sums.items()}
    for n, t in body.items():
        assert torch.allclose(result.server.state[FedAvg.model][n], t, atol=2e-6), n


def play(*addons: Any, rounds: int = 4, **how: Any) -> Any:
    clients = [ClientData(c, images(20, 50 + k)) for k, c in enumerate(federation())]
    method = FedRep(*addons, factory=lambda k: Tiny(k, norm=True), head_epochs=2, lr=0.1, batch=6)
    return simulate(method, clients, rounds=rounds, participation=3, evaluate="all", progress=False, **how)


def test_heads_are_never_sent_and_accuracy_is_the_clients_mean() -> None:
    run = play(rounds=1)
    body = 4 * (3 * 9 + 3 + 6)
    row = run.rows[0]
    statistics = 4 * 6 + 8
    assert row["up"] == {
        "FedAvg.samples": 3 * 8, "FedAvg.update": 3 * body, "FedAvg.buffers": 3 * 24, "FedAvg.counters": 3 * 8
    }  # fmt: skip
    assert row["down"] == {"FedAvg.model": 3 * (body + statistics)}
    assert row["accuracy"] == row["accuracy_personal"]["mean"]
    assert run.models == {}
