from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit._utils.progress import bar
from distillkit.networks import RandomNetworks, build, split
from distillkit.privacy import (
    Ledger,
    PublicEmbedders,
    TrainedNetworks,
    class_sums,
    fit_to_means,
    gaussian_sigma,
)
from distillkit.privacy.condensation import condense_private as condense
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, train
from tests.distillkit.privacy.options import condensed

Factory = Callable[[], nn.Module]
SHORT = Protocol(epochs=2, batch=6, lr=0.1)


def doubled(network: nn.Module, generator: torch.Generator) -> None:
    """User-defined redraw."""
    for parameter in network.parameters():
        parameter.mul_(2)


def test_draw_is_the_network_that_the_set_trains(
    toy_set: LabeledImages, toy_network: Factory, global_rng_untouched: None
) -> None:
    networks = TrainedNetworks(toy_network, toy_set, SHORT)
    drawn = networks.draw(derive(0, 1))
    generator = derive(0, 1)
    expected = split(train(build(toy_network, generator), toy_set, SHORT, generator=generator))
    assert torch.equal(drawn(toy_set.images), expected(toy_set.images))
    assert not any(p.requires_grad for p in drawn.parameters())  # type: ignore[attr-defined]
    other = networks.draw(2)  # type: ignore[arg-type]
    assert networks.draw(derive(0, 1)) is drawn
    assert not torch.allclose(other.features(toy_set.images), drawn.features(toy_set.images))
    assert "12 images" in repr(networks)


def test_record_adds_one_to_the_sum_of_trained_embeddings(toy_set: LabeledImages, toy_network: Factory) -> None:
    images, labels = torch.randn(6, 1, 4, 4, generator=derive(1)).double(), torch.arange(6) % 3
    public = toy_set[:6].replace(images=images, labels=labels)
    networks = TrainedNetworks(toy_network, public, SHORT)
    embedders = PublicEmbedders(networks, 2, like=toy_set, centers=public.images)
    assert embedders.sensitivity == 1.0
    with_all = class_sums(*toy_set, embedders, num_classes=3)
    without = class_sums(*toy_set[1:], embedders, num_classes=3)
    moved = (with_all - without).norm(dim=2)
    torch.testing.assert_close(moved[:, 0], torch.ones(2, dtype=torch.float64))
    assert torch.equal(moved[:, 1:], torch.zeros(2, 2, dtype=torch.float64))


def test_every_pass_is_charged_and_all_together_cost_epsilon(toy_set: LabeledImages, toy_network: Factory) -> None:
    ledger = Ledger(budget=8.0)
    private = condensed(toy_set, toy_network, train=SHORT, count=3, ledger=ledger)
    _, first, *later = ledger.events
    assert [e.count for e in (first, *later)] == [2, 3, 3]
    spent = sum(e.count / e.sigma**2 for e in ledger.events)
    assert spent == pytest.approx(gaussian_sigma(8.0, 1e-5) ** -2)
    assert private.info["epsilon"] == pytest.approx(8.0)
    assert private.info["sigma"] == later[0].sigma == later[1].sigma
    assert (private.info["passes"], private.info["trained"]) == (3, True)


def test_no_training_shows_a_bar_without_progress(
    toy_set: LabeledImages, toy_network: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noted(total: int, what: str, *, progress: bool, **options: Any) -> Any:
        asked.append(progress)
        return bar(total, what, progress=progress, **options)

    monkeypatch.setattr("distillkit.training.bar", noted)
    condensed(toy_set, toy_network, train=SHORT, progress=False)
    assert asked
    assert not any(asked)


def test_networks_of_a_pass_are_trained_on_the_previous_passs_set(
    toy_set: LabeledImages, toy_network: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[PublicEmbedders, Tensor]] = []

    def told(start: Tensor, embedders: PublicEmbedders, targets: Tensor, **options: Any) -> Tensor:
        passes.append((embedders, fit_to_means(start, embedders, targets, **options)))
        return passes[-1][1]

    monkeypatch.setattr(condense, "fit_to_means", told)
    condensed(toy_set, toy_network, train=SHORT, count=3, networks=RandomNetworks(toy_network, doubled))
    assert len(passes) == 3
    for (_, before), (embedders, _) in pairwise(passes):
        shown = toy_set.replace(images=before, labels=torch.tensor([0, 0, 1, 1, 2, 2]))
        expected = TrainedNetworks(toy_network, shown, SHORT, redraw=doubled).draw(
            derive(embedders._seed, "network", 1)
        )
        assert torch.equal(embedders[1].network.features(before), expected.features(before))
        other = TrainedNetworks(toy_network, shown, SHORT).draw(derive(embedders._seed, "network", 1))
        assert not torch.equal(other.features(before), expected.features(before))
        torch.testing.assert_close(embedders[1].center, expected.features(before).mean(0))


def test_pass_without_noise_matches_the_clean_means(
    toy_set: LabeledImages, toy_network: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(start: Tensor, embedders: PublicEmbedders, targets: Tensor, **options: Any) -> Tensor:
        means = class_sums(*toy_set, embedders, num_classes=3) / 4
        torch.testing.assert_close(targets, means)
        return fit_to_means(start, embedders, means, **options)

    plain = condensed(toy_set, toy_network, train=SHORT, count=3, epsilon=math.inf)
    monkeypatch.setattr(condense, "fit_to_means", exact)
    assert torch.equal(condensed(toy_set, toy_network, train=SHORT, count=3, epsilon=math.inf).images, plain.images)


def test_untrainable_networks_are_refused(toy_set: LabeledImages, toy_network: Factory) -> None:
    ledger = Ledger()
    networks = TrainedNetworks(toy_network, toy_set, SHORT)
    with pytest.raises(ValueError, match=r"networks must be RandomNetworks\(factory\) if .* got TrainedNetworks"):
        condensed(toy_set, toy_network, train=SHORT, networks=networks, ledger=ledger)
    with pytest.raises(ValueError, match="count"):
        condensed(toy_set, toy_network, train=SHORT, count=1, ledger=ledger)
    assert not ledger.events
