"""Defaults of `FedAvg` and of the papers' compositions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillkit.data import clients, load, partition
from distillkit.networks import ConvNet
from distillkit.rng import derive
from fl import FedAvg, simulate
from fl.methods import FedRep, SingleImage
from tests.fl.federations import Tiny
from tests.refused import refused


def test_fedavg_learns_with_its_defaults() -> None:
    """Ten clients of digits, Dirichlet(0.1), five rounds."""
    train, test = load("digits")
    held = clients(train, partition.dirichlet(train.labels, 10, 0.1, generator=0))
    method = FedAvg(factory=lambda k: ConvNet((1, 8, 8), k, width=16, depth=2))
    run = simulate(method, held, rounds=5, test=test, progress=False)
    assert run.accuracy_last is not None
    assert run.accuracy_last > 0.55


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adam", 0.001)])
def test_default_learning_rate_is_the_optimizers(optimizer: Any, lr: float) -> None:
    assert FedAvg(factory=Tiny, optimizer=optimizer).settings.lr == lr
    assert FedAvg(factory=Tiny, optimizer=optimizer, lr=0.5).settings.lr == 0.5


def test_unsupported_momentum_of_adam_is_refused() -> None:
    FedAvg(factory=Tiny, optimizer="adam", momentum=0.0)
    with pytest.raises(ValueError, match=r"With optimizer='adam' give momentum=0, got momentum=0\.9"):
        FedAvg(factory=Tiny, optimizer="adam", momentum=0.9)
    picture = torch.rand(1, 8, 8, generator=derive(0))
    refused(lambda: SingleImage(picture, factory=Tiny, momentum=0.9), ValueError, r"got momentum=0\.9")
    refused(lambda: FedRep(factory=Tiny, optimizer="adam"), ValueError, r"got momentum=0\.5")
    assert FedRep(factory=Tiny, optimizer="adam", momentum=0.0).settings.optimizer.name == "adam"
