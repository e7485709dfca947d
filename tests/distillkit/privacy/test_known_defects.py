"""Defects of published code for private data, each with a test that this package does not have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks import build
from distillkit.networks.samplers import RandomNetworks
from distillkit.normalization import ZCA, Normalization
from distillkit.privacy import (
    BatchStatistics,
    Event,
    Ledger,
    NotAccountable,
    PrivateGradient,
    PrivateInitialization,
    PrivateStatistics,
    PublicEmbedders,
    Secret,
    compose,
    condense_private,
    fit_to_means,
    image_sgd,
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


def test_psg_runs_as_many_steps_as_are_charged(toy_set: LabeledImages, toy_network: Factory) -> None:
    """PSG runs one iteration more than it accounts for."""
    ledger, seen = Ledger(), []
    options: dict[str, Any] = {
        "size": 12,
        "sigma": 1.0,
        "networks": RandomNetworks(toy_network),
        "ipc": 1,
        "steps": 3,
        "clip": 1.0,
    }
    image_sgd(toy_set, ledger=ledger, callback=lambda step, g: seen.append(step), **options)
    assert seen == [0, 1, 2]
    assert sum(e.count for e in ledger.events) == 3


def test_psg_and_dosser_output_contains_no_counts_or_statistics(
    toy_set: LabeledImages, toy_network: Factory, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "epsilon": 2.0,
        "networks": RandomNetworks(toy_network),
        "num_networks": 2,
        "ipc": 1,
        "steps": 1,
    }
    infos = []
    for data in (toy_set, toy_set[:5]):
        private = condense_private(data, **options)
        infos.append((private.info, private.mean, private.std, private.labels.tolist()))
    assert infos[0] == infos[1]
    assert capsys.readouterr().out == ""


def test_dp_kip_real_images_and_private_whitening_are_refused(toy_set: LabeledImages, toy_network: Factory) -> None:
    with pytest.raises(PrivateInitialization):
        condense_private(toy_set, epsilon=1.0, networks=RandomNetworks(toy_network), init="real")
    whitened = toy_set.replace(normalization=Normalization((0.5,), (0.25,), ZCA.fit(toy_set.images)))
    with pytest.raises(PrivateStatistics):
        condense_private(whitened, epsilon=1.0, networks=RandomNetworks(toy_network))


def test_dp_kip_shuffled_batches_have_no_poisson_accountant() -> None:
    with pytest.raises(NotAccountable, match="one event of rate 1"):
        Event("dp_kip", 1.0, 0.05, sampling="shuffled")


def test_flower_605_epsilon_is_not_added_over_clients() -> None:
    ledger = Ledger()
    for client in range(10):
        ledger.spend(Event("dp_sgd", 1.0, 0.05, 100, client=client))
    assert ledger.epsilon() == ledger.epsilon(0) == compose([(1.0, 0.05, 100)], 1e-5).epsilon


@pytest.mark.parametrize("issue", ["opacus 688", "opacus 608", "opacus 636"])
def test_opacus_training_again_keeps_hooks_and_budget(toy_set: LabeledImages, issue: str) -> None:
    model = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), 0)
    ledger = Ledger()
    for _ in range(3):
        train_private(model, toy_set, size=12, sigma=1.0, rate=0.5, steps=2, ledger=ledger)
    assert sum(e.count for e in ledger.events) == 6
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())


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


def test_opacus_wrapped_network_has_current_weights(toy_set: LabeledImages, toy_network: Factory) -> None:
    """A network in the closure of a wrapped module is deep-copied once and never receives later weights."""
    seen: list[Tensor] = []
    options: dict[str, Any] = {"size": 12, "sigma": 0.0, "rate": 1.0, "clip": 1.0, "ipc": 1, "lr": 1e-300, "steps": 2}
    image_sgd(toy_set, networks=RandomNetworks(toy_network), callback=lambda step, g: seen.append(g.clone()), **options)
    assert not torch.allclose(seen[0], seen[1], rtol=1e-2)


def test_feddm_class_rate_is_the_rate_of_its_records() -> None:
    """256 of the 500 records of a class are a rate of one half, whatever other records the client has."""
    claimed = compose([(1.0, 256 / 5000, 1000)], 1e-5, accountant="rdp").epsilon
    real = compose([(1.0, 256 / 500, 1000)], 1e-5, accountant="rdp").epsilon
    assert claimed == pytest.approx(12.3, rel=0.01)
    assert real == pytest.approx(237, rel=0.01)


def test_feddm_epsilon_is_that_of_the_run_not_of_one_round() -> None:
    event = Event("image_sgd", 3.0, 0.0512, 1000)
    ledger = Ledger()
    for round in range(20):
        ledger.spend(replace(event, round=round))
    assert ledger.epsilon() == pytest.approx(13.13, rel=0.01)


def test_feddm_epsilon_is_not_that_of_the_theorem() -> None:
    """q = 0.1, 1,000 steps, sigma = 1.073: the theorem allows epsilon 20, the mechanism costs more than 22."""
    assert compose([(1.073, 0.1, 1000)], 1e-5).epsilon > 22.0


def test_feddm_sends_absent_classes_too(toy_set: LabeledImages, toy_network: Factory) -> None:
    options: dict[str, Any] = {"size": 12, "sigma": 1.0, "networks": RandomNetworks(toy_network), "ipc": 2, "steps": 1}
    for data in (toy_set, toy_set[toy_set.labels == 1], toy_set[:0]):
        assert image_sgd(data, **options).counts().tolist() == [2, 2, 2]


def test_batch_norm_that_mixes_records_is_refused(toy_set: LabeledImages) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()

    with pytest.raises(BatchStatistics):
        image_sgd(toy_set, size=12, sigma=1.0, networks=RandomNetworks(factory))
