"""Condensation with `parametrize=Tiles(f)`: descent on the stored images, initial images, resume and baselines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.condense import (
    InnerTraining,
    Progress,
    distribution_matching,
    gradient_matching,
    initial_images,
    loops_for,
    random_subset,
)
from distillkit.evaluate import evaluate
from distillkit.networks import FixedNetwork, RandomNetworks, split
from distillkit.sets import LabeledImages, TiledImages, Tiles
from distillkit.training import Protocol

TILES = Tiles(2)


def real(dtype: torch.dtype = torch.float32) -> LabeledImages:
    draws = torch.Generator().manual_seed(1)
    return LabeledImages(
        torch.randn(36, 1, 8, 8, generator=draws).to(dtype), torch.arange(36) % 3, num_classes=4, info={"dataset": "x"}
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def linear() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(2)))
    return net


def test_distribution_matching_descends_on_the_stored_images() -> None:
    """Three steps equal SGD with momentum 0.5 through `decode`, written with autograd."""
    data, start = real(torch.float64), None
    start = initial_images(data, 1, parametrize=TILES, generator=3)
    assert isinstance(start, TiledImages)
    net = linear()
    made = distribution_matching(
        data, networks=FixedNetwork(net), init=start, parametrize=TILES, steps=3, lr=0.7, progress=False
    )
    stored = start.stored.clone().requires_grad_()
    optimizer = torch.optim.SGD([stored], lr=0.7, momentum=0.5)
    features = split(net).features
    for _ in range(3):
        own = features(TILES.decode(stored)).view(3, 4, -1).mean(1)
        loss = sum((features(data.images[data.labels == c]).mean(0) - own[c]).square().sum() for c in range(3))
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert isinstance(made, TiledImages)
    assert torch.allclose(made.stored, stored.detach(), atol=1e-10)
    assert torch.equal(made.images, TILES.decode(made.stored))
    assert made.counts().tolist() == [4, 4, 4, 0]
    assert made.info["parametrize"] == "Tiles(factor=2)"


def condense(kind: str, **options: Any) -> LabeledImages:
    given: dict[str, Any] = {"networks": RandomNetworks(network), "ipc": 2, "parametrize": TILES, "progress": False}
    given |= {"augment": DSA("flip_crop"), "lr": 0.1, **options}
    if kind == "dm":
        return distribution_matching(real(), **{"steps": 4} | given)
    inner = InnerTraining(loops=(2, 1), batch=8)
    return gradient_matching(real(), **{"iterations": 4, "inner": inner, "init": "real"} | given)


@pytest.mark.parametrize("kind", ["dm", "dc"])
def test_a_resumed_condensation_gives_equal_bits_and_moves_every_stored_image(kind: str) -> None:
    states = []

    def keep(progress: Progress) -> None:
        if progress.step == 2:
            states.append(progress.state())

    whole = condense(kind, callback=keep)
    again = condense(kind, resume=states[0])
    start = condense(kind, **{"steps" if kind == "dm" else "iterations": 0})
    assert isinstance(whole, TiledImages)
    assert isinstance(again, TiledImages)
    assert isinstance(start, TiledImages)
    assert torch.equal(whole.stored, again.stored)
    assert whole.stored.shape == (6, 1, 8, 8)
    assert len(whole) == 24
    assert bool((whole.stored != start.stored).any(3).all())
    with pytest.raises(ValueError, match="parametrize"):
        condense(kind, resume=states[0], parametrize=None)


def test_initial_images_shrink_real_ones_draw_noise_and_keep_a_tiled_set() -> None:
    data = real()
    whole = initial_images(data, 8, generator=4)
    made = initial_images(data, 2, parametrize=TILES, generator=4)
    assert isinstance(made, TiledImages)
    assert torch.equal(made.stored, TILES.encode(whole.images))
    noise = initial_images(data, 2, init="noise", parametrize=TILES, generator=4)
    assert isinstance(noise, TiledImages)
    assert torch.equal(noise.stored, initial_images(data, 2, init="noise", generator=4).images)
    condensed = condense("dc", init=made, iterations=0, inner=InnerTraining())
    assert condensed.info["loops"] == list(loops_for(2))  # of stored images
    again = initial_images(data, 9, init=made, parametrize=TILES)
    assert isinstance(again, TiledImages)
    assert torch.equal(again.stored, made.stored)
    assert initial_images(data, 9, init=made, parametrize=TILES, classes=[2, 0]).counts().tolist() == [8, 0, 8, 0]
    whole_tiles = initial_images(data, 4, parametrize=Tiles(1))
    shrunk = initial_images(data, 9, init=whole_tiles, parametrize=TILES)
    assert isinstance(shrunk, TiledImages)
    assert torch.equal(shrunk.stored, TILES.encode(whole_tiles.images))
    with pytest.raises(ValueError, match="multiple of 4 images"):
        initial_images(data, 1, init=whole[:9], parametrize=TILES)
    mixed = made.replace(labels=made.labels.roll(1))
    with pytest.raises(ValueError, match="single class in each stored image"):
        initial_images(data, 1, init=mixed, parametrize=TILES)


def test_random_images_in_the_same_parametrization() -> None:
    data = real()
    made, plain = random_subset(data, ipc=2, parametrize=TILES, generator=5), random_subset(data, ipc=8, generator=5)
    assert isinstance(made, TiledImages)
    assert torch.equal(made.stored, TILES.encode(plain.images))
    assert torch.equal(made.labels, plain.labels)
    assert len(made.stored) == 6
    assert made.info == plain.info | {"ipc": 2, "parametrize": "Tiles(factor=2)"}


def test_the_random_row_of_an_evaluation_has_the_same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import distillkit.evaluate as module

    seen: list[LabeledImages] = []
    train = module.train
    monkeypatch.setattr(module, "train", lambda net, own, *a, **k: (seen.append(own), train(net, own, *a, **k))[1])
    data = condense("dm", steps=1)
    evaluate(data, real(), network, protocol=Protocol(epochs=1), real=real(), num_networks=1, progress=False)
    own, random = seen
    assert isinstance(own, TiledImages)
    assert isinstance(random, TiledImages)
    assert random.stored.shape == own.stored.shape
    assert torch.equal(random.counts(), own.counts())
