"""Laws of whole mechanisms: what is charged, drawn and released, and what the data may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import Event, Ledger, PublicEmbedders, Secret, image_sgd
from distillkit.privacy.condensation import class_means
from distillkit.privacy.condensation import condense_private as condense_module
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.options import condensed, grouped

Factory = Callable[[], nn.Module]


def stepped(toy_set: LabeledImages, toy_network: Factory, **options: Any) -> LabeledImages:
    fixed = {
        "size": 12,
        "sigma": 1.0,
        "rate": 1.0,
        "clip": 1.0,
        "networks": RandomNetworks(toy_network),
        "ipc": 1,
        "steps": 4,
    }
    return image_sgd(toy_set, **grouped(**fixed | options))


def test_every_charge_draws_noise_once(toy_set: LabeledImages, toy_network: Factory) -> None:
    """There is one draw for the histogram and one for each of two releases, for any number of steps that read them."""
    ledger, secret = Ledger(), Secret()
    condensed(toy_set, toy_network, ledger=ledger, secret=secret)
    assert secret.draws == len(ledger.events) == 3


def test_every_step_is_charged(toy_set: LabeledImages, toy_network: Factory) -> None:
    ledger, secret = Ledger(), Secret()
    stepped(toy_set, toy_network, ledger=ledger, secret=secret)
    assert secret.draws == sum(e.count for e in ledger.events) == 4


def test_support_does_not_depend_on_the_data(toy_set: LabeledImages, toy_network: Factory) -> None:
    for data in (toy_set, toy_set[toy_set.labels != 2], toy_set[:0]):
        embedders = PublicEmbedders(RandomNetworks(toy_network), 2, like=data)
        sums = class_means.class_sums(data.images, data.labels, embedders, num_classes=3)
        released = class_means.release(sums, sigma=1.0, sensitivity=1.0, ledger=Ledger())
        assert released.shape == (2, 3, 16)
        assert float((released != 0).double().mean()) > 0.9  # one in 2^20 lies on the grid's 0
        assert condensed(data, toy_network).labels.tolist() == [0, 0, 1, 1, 2, 2]
        seen: list[Tensor] = []
        stepped(data, toy_network, callback=lambda step, g, seen=seen: seen.append(g.clone()))
        assert float((torch.stack(seen) != 0).double().mean()) > 0.9


def test_data_enter_only_through_the_released_sums(toy_set: LabeledImages, toy_network: Factory) -> None:
    """With fixed sums and public sizes, two datasets give bitwise equal images."""
    with pytest.MonkeyPatch.context() as patch:
        fixed = torch.randn(3, 3, 16, generator=derive(5), dtype=torch.float64)
        patch.setattr(condense_module, "class_sums", lambda x, y, embedders, **_: fixed[: len(embedders)].clone())
        sizes = torch.full((3,), 4.0)
        first, *others = (
            condensed(data, toy_network, size=sizes, secret=7)
            for data in (toy_set, toy_set[:5], toy_set[toy_set.labels != 2], toy_set[:0])
        )
        for other in others:
            assert torch.equal(first.images, other.images)


def test_one_record_changes_a_step_by_at_most_the_clip(toy_set: LabeledImages, toy_network: Factory) -> None:
    """In units of the added noise, so division by the drawn number is detected."""
    for count in (1, 2, 7):
        steps: list[Tensor] = []
        for data in (toy_set[:count], toy_set[: count - 1]):
            stepped(
                data, toy_network, sigma=0.0, clip=0.01, steps=1, callback=lambda _, g, out=steps: out.append(g.clone())
            )
        moved = (steps[0] - steps[1]).norm() * (1.0 * 12 / 3)
        assert 0.009 < float(moved) <= 0.01 * (1 + 1e-6)


def test_steps_use_their_own_network(toy_set: LabeledImages, toy_network: Factory) -> None:
    seen: list[Tensor] = []
    stepped(
        toy_set,
        toy_network,
        sigma=0.0,
        clip=float("inf"),
        lr=1e-300,  # the images stay where they are
        callback=lambda _, g: seen.append(g.clone()),
        steps=3,
    )
    seed = int(torch.randint(2**62, (), generator=derive(0)))
    start = torch.randn((3, 1, 4, 4), generator=derive(seed, "start"), dtype=torch.float64)
    for step in range(3):
        network = RandomNetworks(toy_network).draw(derive(seed, "network", step))
        leaf = start.clone().requires_grad_()

        def phi(x: Tensor, network: Any = network) -> Tensor:
            return torch.cat([network.features(x), network.classifier(network.features(x))], 1)

        real, own = phi(toy_set.images), phi(leaf)
        loss = sum((real[toy_set.labels == c].mean(0) - own[c]).square().sum() for c in range(3))
        torch.testing.assert_close(seen[step].flatten(0, 1), torch.autograd.grad(loss, leaf)[0])


def test_repeated_round_of_a_resumed_run_is_charged(tmp_path: Path) -> None:
    event = Event("dp_sgd", 1.0, 0.1, 10)
    first = Ledger(tmp_path / "ledger")
    for round in range(3):
        first.spend(replace(event, round=round))
    resumed = Ledger(tmp_path / "ledger")
    resumed.spend(replace(event, round=2))
    assert sum(e.count for e in Ledger(tmp_path / "ledger").events) == 40
