"""Private condensation with `parametrize=Tiles(f)`: gradients through decoding, unchanged releases, initial images."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import (
    Account,
    Ledger,
    Passes,
    PrivacyError,
    PrivateInitialization,
    PublicEmbedders,
    Secret,
    condense_private,
    fit_to_means,
    train_private,
)
from distillkit.privacy.condensation import condense_private as module
from distillkit.rng import derive
from distillkit.sets import LabeledImages, TiledImages, Tiles
from tests.distillkit.privacy.options import embedded_sizes
from tests.refused import refused

Factory = Callable[[], nn.Module]
TILES = Tiles(2)


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=derive(seed), dtype=torch.float64)


def embedders_of(toy_set: LabeledImages, toy_network: Factory) -> PublicEmbedders:
    return PublicEmbedders(RandomNetworks(toy_network), 2, like=toy_set)


def condensed(toy_set: LabeledImages, toy_network: Factory, **options: Any) -> LabeledImages:
    account = Account(Ledger(delta=1e-3), secret=Secret(seed=4))
    given = {"epsilon": 1.0, "delta": 1e-3, "ipc": 2, "num_networks": 2, "steps": 3, "lr": 5.0, "ledger": account}
    given["passes"] = Passes(first_num_networks=1, first_steps=2)
    return condense_private(toy_set, networks=RandomNetworks(toy_network), progress=False, **given | options)


@pytest.mark.parametrize(
    ("tiles", "chunk", "batch"), [(None, 1, 2), (None, 5, 4), (None, None, 6), (TILES, 15, 8), (TILES, 16, 16)]
)
def test_fit_equals_sgd(
    toy_set: LabeledImages,
    toy_network: Factory,
    tiles: Tiles | None,
    chunk: int | None,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the decoding of tiles, if there are any; with as many whole classes at once as a chunk allows."""
    embedders, targets = embedders_of(toy_set, toy_network), torch.randn(2, 3, 16, generator=derive(2)).double()
    start, before = noise(6).requires_grad_(), targets.clone()
    fit = partial(fit_to_means, start, embedders, before, lr=2.0, parametrize=tiles, chunk=chunk)
    sizes = embedded_sizes("__call__", monkeypatch)
    found, stored = fit(steps=5, momentum=0.3), noise(6).requires_grad_()
    assert not found.requires_grad
    assert max(sizes) == batch
    optimizer = torch.optim.SGD([stored], lr=1.0, momentum=0.3)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 2.0 * 0.5 * (1 + math.cos(math.pi * step / 5))
        optimizer.zero_grad()
        means = embedders[step % 2](tiles.decode(stored) if tiles else stored).view(3, -1, 16).mean(1)
        (targets[step % 2] - means).square().sum().backward()
        optimizer.step()
    assert torch.allclose(found, stored.detach(), rtol=0, atol=1e-10)
    assert torch.equal(before, targets)
    assert torch.equal(fit(steps=0), noise(6))


def test_one_tile_gives_the_bits_of_no_tiles(toy_set: LabeledImages, toy_network: Factory) -> None:
    plain, one = (condensed(toy_set, toy_network, parametrize=p) for p in (None, Tiles(1)))
    assert isinstance(one, TiledImages)
    assert torch.equal(plain.images, one.images)
    assert torch.equal(plain.labels, one.labels)
    assert not isinstance(plain, TiledImages)


def test_public_images_are_shrunk_and_a_tiled_set_is_used_as_it_is(
    toy_set: LabeledImages, toy_network: Factory
) -> None:
    labels = torch.arange(24) % 3
    public = toy_set.replace(images=noise(24, 5), labels=labels)
    options: dict[str, Any] = {"parametrize": TILES, "steps": 0, "passes": module.Passes(first_share=0.0)}
    made = condensed(toy_set, toy_network, init=public, **options)
    assert isinstance(made, TiledImages)
    assert torch.equal(made.stored, TILES.encode(public.images[labels.argsort(stable=True)]))
    tiled = partial(TiledImages, tiles=TILES, num_classes=3, normalization=toy_set.normalization)
    turned = tiled(made.stored.flip(0), made.labels.flip(0))
    again = condensed(toy_set, toy_network, init=turned, **options)
    assert isinstance(again, TiledImages)
    assert torch.equal(again.stored, made.stored[[1, 0, 3, 2, 5, 4]])
    refused(lambda: condensed(turned, toy_network), PrivacyError, "must not be a TiledImages: one stored image")
    call = partial(train_private, nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), turned, size=9, sigma=1.0)
    refused(call, PrivacyError, "must not be a TiledImages: one stored image")
    whole = condensed(toy_set, toy_network, init=made.replace(info={}), ipc=8, **options | {"parametrize": Tiles(1)})
    assert torch.equal(whole.images, made.images)  # of other tiles
    with pytest.raises(ValueError, match="init must hold 8 images of each of 3 classes"):
        condensed(toy_set, toy_network, init=public[:6], **options)
    with pytest.raises(ValueError, match="single class in each stored image"):
        condensed(toy_set, toy_network, init=tiled(made.stored, made.labels.roll(-1)), **options)
    copied = public.replace(images=torch.cat([public.images[:23], 2 * toy_set.images[3:4] + 1]))
    hidden = tiled(torch.cat([2 * toy_set.images[:1] + 1, noise(5)]), made.labels)
    black = toy_set.replace(images=0 * toy_set.images)
    dark = public.replace(images=torch.cat([public.images[:23], black.images[:1]]))
    for real, init in ((toy_set, copied), (toy_set, hidden), (black, dark)):
        call = partial(condensed, real, toy_network, init=init, **options)
        refused(call, PrivateInitialization, "init holds an image of the private set")


def test_wrong_tiles_are_named(toy_set: LabeledImages, toy_network: Factory) -> None:
    refused(lambda: condensed(toy_set, toy_network, parametrize=2), TypeError, "parametrize must be a Tiles")
    options: dict[str, Any] = {"parametrize": Tiles(3), "ledger": (ledger := Ledger(delta=1e-3))}
    refused(lambda: condensed(toy_set, toy_network, **options), ValueError, "divisible by 3, got 4x4")
    assert ledger.events == ()
    fit = partial(fit_to_means, noise(3), embedders_of(toy_set, toy_network), torch.zeros(2, 3, 16))
    refused(lambda: fit(parametrize=2), TypeError, "parametrize must be a Tiles")  # type: ignore[arg-type]
