"""Fine-tuning: evaluation of tuned models, and no stored state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl import ClientData, FedAvg, simulate
from fl.addons import FineTune
from tests.fl import linear
from tests.fl.federations import Tiny, federation, images


class Seen(FineTune):
    """Records the tuned models."""

    found: dict[tuple[int, int], Any] = {}  # noqa: RUF012

    def personal_model(self, local: Any) -> Any:
        tuned = super().personal_model(local)
        self.found[local.round, local.client.id] = tuned
        return tuned


@pytest.mark.golden(
    "FineTune", source="Wang et al., 2019: train the global model on the client before its test; no formula is printed"
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_new_global_model_is_fine_tuned_before_evaluation(momentum: float) -> None:
    clients = [ClientData(c, c) for c in linear.clients()]
    start = {"w.weight": torch.tensor(linear.START, dtype=torch.float32)}
    options: dict[str, Any] = {"factory": linear.FourWeights, "objective": linear.squares, "initial": start}
    method = FedAvg(Seen(steps=3), lr=0.1, batch=8, momentum=momentum, epochs=2, **options)
    simulate(method, clients, rounds=2, progress=False)
    w = linear.START
    for number in (1, 2):
        losses = [lambda v, k=k: linear.base_loss(k, v) for k in range(3)]
        w = linear.average([linear.descend(f, w, 2, momentum=momentum) for f in losses])
        for k, f in enumerate(losses):
            tuned = linear.descend(f, w, 3, momentum=momentum)
            assert Seen.found[number, k]["w.weight"].double().numpy() == pytest.approx(tuned, abs=2e-6)


def test_layers_that_are_not_tuned_are_unchanged() -> None:
    clients = [ClientData(c, images(20, 50 + k)) for k, c in enumerate(federation())]
    method = FedAvg(Seen(epochs=2, train="classifier.*"), factory=Tiny, lr=0.1)
    model = simulate(method, clients, rounds=2, progress=False).server.state[FedAvg.model]
    assert all(torch.equal(Seen.found[2, k]["body.0.weight"], model["body.0.weight"]) for k in range(5))
    assert not torch.equal(Seen.found[2, 0]["classifier.weight"], model["classifier.weight"])


def test_client_with_test_images_only_evaluates_the_global_model() -> None:
    empty = images(4, 0)[:0]
    clients = [ClientData(images(20, 1)), ClientData(empty, images(20, 2))]
    run = simulate(FedAvg(FineTune(), factory=Tiny), clients, rounds=1, evaluate="all", progress=False)
    assert run.rows[0]["accuracy_personal"] == run.rows[0]["accuracy_clients"]
