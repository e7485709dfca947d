"""FedDecorr against values computed by its release and its losses in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distillkit import LabeledImages
from fl import FedAvg, simulate
from fl.addons import FedDecorr
from tests.fl import linear
from tests.fl.federations import Tiny, federation
from tests.fl.reference_problems import FixedBatches, assert_released, wave, waves
from tests.fl.virtual_reference import Small


def collapse(client: int, w: Any, variant: str) -> float:
    """Return L_FedDecorr as printed, |K|_F^2 / d^2 of the correlation matrix, or loss.py's off-diagonal mean over N."""
    z = linear.XS[client] @ w
    n, d = z.shape
    if variant == "paper":
        return float((np.corrcoef(z.T) ** 2).sum() / d**2)
    z = (z - z.mean(0)) / z.std(0, ddof=1)
    gram = z.T @ z
    return float(((gram**2).sum() - (np.diag(gram) ** 2).sum()) / (d * (d - 1)) / n)


@pytest.mark.golden("FedDecorr", source="bytedance/FedDecorr at 973e4af, run: loss.py, FedDecorrLoss")
def test_a_round_equals_the_release_by_default() -> None:
    """One client, batches of 3, 3 and 1, two epochs, the default beta and variant.

    The numbers are of SGD at 0.1 on CE + 0.1 `FedDecorrLoss` (bytedance/FedDecorr at 973e4af, loss.py).
    """
    released = {
        "body.weight": [
            -0.02987337385099, 0.9923162993683, -0.2258356096956, -0.934120949518, 0.4960586670436, 0.7660750713104,
            -0.6934677773544, -0.5873760611435, 0.9251010780379, 0.3200656456967, -1.00757847056, -0.06042376869195,
        ],
        "body.bias": [0.4379442386291, 0.837707856256, -0.5853171288556],
        "classifier.weight": [
            0.850704405992, 0.4010554066421, -0.9529164434592, -0.2228438202103, 0.9706952334315, -0.1114937316567,
            -0.9477298343972, 0.3816470246725, 0.9324481529051,
        ],
        "classifier.bias": [0.8614362138478, 0.0246810170583, -0.929449000354],
    }  # fmt: skip
    client = LabeledImages(wave((7, 1, 2, 2), 0.3), torch.tensor([(2 * i) % 3 for i in range(7)]), num_classes=3)
    order = FixedBatches({7: [[3, 0, 6, 4, 1, 5, 2], [1, 4, 2, 6, 0, 3, 5]]})
    method = FedAvg(
        FedDecorr(), order, factory=lambda k: Small(k).double(), initial=waves(Small(3)), lr=0.1, epochs=2, batch=3
    )
    assert_released(simulate(method, [client], rounds=1, progress=False), released)


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


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batches_of_two_images_and_more_are_decorrelated(batch: int) -> None:
    client = federation()[0][:batch]
    runs = [
        simulate(FedAvg(*addons, factory=Tiny, lr=0.1, batch=batch), [client], rounds=1, progress=False)
        for addons in ((), (FedDecorr(1.0),))
    ]
    plain, moved = (run.server.state[FedAvg.model]["body.0.weight"] for run in runs)
    assert torch.equal(plain, moved) == (batch == 1)
