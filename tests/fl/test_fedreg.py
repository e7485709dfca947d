"""FedReg against values computed by its release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distillkit import LabeledImages
from fl import FedAvg, simulate
from fl.addons import FedReg
from fl.averaging.addon import AddOn
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same
from tests.fl.reference_problems import FixedBatches, assert_released, wave, waves
from tests.refused import refused

# The problem of two clients that the release was run on (Zoesgithub/FedReg at 34b081f: `step_func` of
# FedUtils/fed/fedreg.py with `Model` of FedUtils/models/mnist/cnn.py, its network and constants replaced by these, in
# float64 and with images that do not share memory, as on a GPU). SEEN are the orders in which the clients' loaders gave
# their images: first to generate from, then epoch by epoch.

SEEN = {
    5: [[3, 0, 4, 1, 2], [1, 4, 2, 0, 3], [2, 3, 1, 0, 4], [0, 1, 2, 3, 4]],
    4: [[2, 1, 0, 3], [3, 0, 1, 2], [1, 2, 3, 0], [0, 1, 2, 3]],
}
RELEASED = {
    "1.weight": [
        0.08095058682989, 1.240839470904, -0.458417658685, -1.11486279237, 0.2835409377524, 0.9005702956055,
        -0.5260267148766, -0.7680809045319, 1.237393558974, -0.2111288883777, -1.190517082342, 0.5578277038614,
    ],
    "1.bias": [0.5907678521578, 0.6295508746379, -0.6445430252568],
    "3.weight": [
        0.6613240570331, 0.5361084869242, -1.178795980746, 0.06908579687789, 0.8665687661314, -0.08152312315729,
        -1.050279102527, 0.3507204116905, 1.128357081692,
    ],
    "3.bias": [0.903394201185, -0.1799259026102, -0.7668000680227],
}  # fmt: skip


def two_layers(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


@pytest.mark.golden(
    "FedReg",
    source="Zoesgithub/FedReg at 34b081f, run: FedUtils/fed/fedreg.py, step_func; FedUtils/models/utils.py, FSGM",
)
def test_rounds_equal_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds, clients of several batches, three epochs, gamma 0.4, eta 0.1 and 0.001 in 3 iterations, rate 0.5."""
    monkeypatch.setattr(
        "fl.addons.fedreg.shuffled_indices",
        lambda count, batch, *_, like: iter(torch.tensor(SEEN[count][0]).split(batch)),
    )
    clients = [
        LabeledImages(wave((n, 1, 2, 2), phase), torch.tensor([(2 * i + k) % 3 for i in range(n)]), num_classes=3)
        for k, (n, phase) in enumerate([(5, 0.3), (4, 1.1)])
    ]
    method = FedAvg(
        FedReg(0.4, eta=0.1, iterations=3), FixedBatches({n: orders[1:] for n, orders in SEEN.items()}),
        factory=two_layers, initial=waves(two_layers(3)), lr=0.5, epochs=3, batch=2, weights="uniform",
    )  # fmt: skip
    assert_released(simulate(method, clients, rounds=2, progress=False), RELEASED)


def test_statistics_are_updated_once_a_step() -> None:
    states = []
    for addons in ((), (FedReg(iterations=1),)):
        method = FedAvg(*addons, factory=lambda k: Tiny(k, norm=True), batch=6)
        states.append(simulate(method, federation(), rounds=1, progress=False).server.state[FedAvg.model])
    assert torch.equal(states[0]["body.1.num_batches_tracked"], states[1]["body.1.num_batches_tracked"])


def test_gamma_is_a_share() -> None:
    refused(lambda: FedReg(gamma=1.5), ValueError, "gamma")


def test_options_and_generators_of_the_generated_images() -> None:
    """eta_perturbed is eta / 100 by default; images are generated in the method's batches; masks are the client's."""
    sizes: list[list[int]] = []

    class Peek(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            sizes.append([len(batch[3]) for batch in local.scratch(local.terms[0])["batches"]])

    def play(**options: Any) -> Any:
        factory = lambda k: nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, k))  # noqa: E731
        method = FedAvg(FedReg(eta=2.0, iterations=1, **options), Peek(), factory=factory, lr=0.3, batch=9, epochs=4)
        return simulate(method, federation()[:2], rounds=1, progress=False)

    default, same, other = play(), play(eta_perturbed=0.02), play(eta_perturbed=5.0)
    assert_same(default, same)
    assert not torch.equal(*(run.server.state[FedAvg.model]["2.weight"] for run in (default, other)))
    assert sizes[:2] == [[9, 3], [9, 6]]
