"""Defects of published code for private data, each with a test that this package does not have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from distillkit.networks import build
from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import (
    Event,
    Ledger,
    Passes,
    PrivateGradient,
    PublicEmbedders,
    Secret,
    compose,
    condense_private,
    fit_to_means,
    train_private,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages

Factory = Callable[[], nn.Module]


def test_dosser_noise_is_stored_and_not_drawn_at_each_read(toy_set: LabeledImages, toy_network: Factory) -> None:
    """Dosser caches clean sums and noises them at every read, but accounts for the sampling only."""
    embedders = PublicEmbedders(RandomNetworks(toy_network), 2, like=toy_set)
    cache = torch.randn(2, 3, 16, generator=derive(0), dtype=torch.float64)
    before = cache.clone()
    start = torch.randn(3, 1, 4, 4, generator=derive(1), dtype=torch.float64)
    first, second = (fit_to_means(start, embedders, cache, steps=7, lr=1.0) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(cache, before)
    claimed = compose([(4.2969, 0.01, 10_000)], 1e-5, accountant="rdp").epsilon
    assert claimed == pytest.approx(0.97, rel=0.03)
    real = compose([(4.2969 / 20**0.5, 0.01, 10_000)], 1e-5, accountant="rdp").epsilon
    assert real == pytest.approx(7.4, rel=0.03)


def test_psg_and_dosser_output_contains_no_counts_or_statistics(
    toy_set: LabeledImages, toy_network: Factory, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "epsilon": 2.0, "networks": RandomNetworks(toy_network), "num_networks": 2, "ipc": 1, "steps": 1,
        "passes": Passes(first_num_networks=1, first_steps=1),
    }  # fmt: skip
    infos = []
    for data in (toy_set, toy_set[:5]):
        private = condense_private(data, **options)
        infos.append((private.info, private.mean, private.std, private.labels.tolist()))
    assert infos[0] == infos[1]
    assert capsys.readouterr().out == ""


def test_opacus_empty_batches_are_noise(toy_set: LabeledImages) -> None:
    """opacus 161, 522, 534, 676, 743."""
    model = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), 0)
    before = model[1].weight.detach().clone()  # type: ignore[index]
    train_private(model, toy_set[:0], size=12, sigma=1.0, rate=0.01, steps=1)
    assert bool((model[1].weight != before).all())  # type: ignore[index]


def test_opacus_expected_batch_size_is_not_truncated() -> None:
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    gradient = PrivateGradient([parameter], sigma=0.0, clip=10.0, denominator=2.5, secret=Secret(0))
    gradient.add([torch.tensor([[5.0]], dtype=torch.float64)])
    assert gradient.take()[0].item() == pytest.approx(2.0)


def test_feddm_epsilon_is_that_of_the_run_not_of_one_round() -> None:
    event = Event("image_sgd", 3.0, 0.0512, 1000)
    ledger = Ledger()
    for round in range(20):
        ledger.spend(replace(event, round=round))
    assert ledger.epsilon() == pytest.approx(13.13, rel=0.01)


def test_feddm_epsilon_is_not_that_of_the_theorem() -> None:
    """q = 0.1, 1,000 steps, sigma = 1.073: the theorem allows epsilon 20, the mechanism costs more than 22."""
    assert compose([(1.073, 0.1, 1000)], 1e-5).epsilon > 22.0
