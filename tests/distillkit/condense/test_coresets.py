from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit._utils.shares import share_of
from distillkit.condense import distribution_matching, gradient_matching, herding, k_center, random_subset, stitch
from distillkit.networks import RandomNetworks, build
from distillkit.rng import derive
from distillkit.sets import TiledImages, Tiles
from tests.refused import refused

ALL = [random_subset, herding, k_center]
Chooser = Callable[..., LabeledImages]


def data(counts: list[int], shape: tuple[int, int, int] = (1, 2, 2), seed: int = 0) -> tuple[Tensor, Tensor]:
    g = derive(seed, "data")
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=g)]
    return torch.randn(len(labels), *shape, generator=g, dtype=torch.float64), labels


class Small(nn.Module):
    most = 99

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Linear(4, 2)

    def features(self, images: Tensor) -> Tensor:
        assert len(images) <= self.most
        return self.body(images).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def rows_of(chosen: LabeledImages, images: Tensor) -> list[int]:
    return [next(i for i, image in enumerate(images) if torch.equal(image, c)) for c in chosen.images]


def slow_herding(f: Tensor, ipc: int) -> list[int]:
    mean, taken = f.mean(0), []
    for k in range(1, ipc + 1):
        gaps = {i: (mean - (f[taken].sum(0) + f[i]) / k).norm().item() for i in range(len(f)) if i not in taken}
        taken.append(min(gaps, key=gaps.__getitem__))
    return taken


def slow_k_center(f: Tensor, ipc: int) -> list[int]:
    taken = [int((f - f.mean(0)).norm(dim=1).argmin())]
    while len(taken) < ipc:
        gaps = {i: min((f[i] - f[j]).norm().item() for j in taken) for i in range(len(f)) if i not in taken}
        taken.append(max(gaps, key=gaps.__getitem__))
    return taken


@pytest.mark.parametrize(("choose", "slow"), [(herding, slow_herding), (k_center, slow_k_center)])
def test_selection_uses_the_networks_embedding_in_eval_mode(choose: Chooser, slow: Callable) -> None:
    images, labels = data([9, 9], (1, 4, 4))
    network = build(Small, 0).double()
    twin = build(Small, 0).double().eval()
    for chunk in (None, 4):
        network.most = chunk or 9
        chosen = choose(images, labels, ipc=3, network=network, chunk=chunk)
        own = (labels == 1).nonzero().flatten()
        with torch.no_grad():
            want = own[slow(twin.features(images[own]), 3)].tolist()
        assert rows_of(chosen, images)[3:] == want
    assert network.training
    assert all(p.requires_grad for p in network.parameters())
    assert chosen.info["embedding"] == "Small"
    other = build(lambda: Small(3), 0).double()
    call = lambda: choose(images, labels, ipc=3, network=other)  # noqa: E731
    refused(call, ValueError, r"network \(Small\) does not accept images")


@pytest.mark.parametrize(("choose", "slow"), [(herding, slow_herding), (k_center, slow_k_center)])
def test_selection_equals_the_slow_reference_on_pixels(choose: Chooser, slow: Callable) -> None:
    """Also of classes that are compared in parts."""
    for n, ipc in ((600, 3), (9, 8), (7, 7), (1, 1)):
        images, labels = data([n, 5], (2, 1, 3), seed=n)
        images *= 1e3
        own = images[labels == 0]
        assert rows_of(choose(images, labels, ipc=ipc, classes=[0]), own) == slow(own.flatten(1), ipc)


def test_random_selection_draws_class_after_class_from_one_generator(global_rng_untouched: None) -> None:
    images, labels = data([5, 6, 3])
    mine, draws = derive(0), derive(0)
    for ipc, classes in ((2, [0, 1, 2]), (3, [2, 0])):
        wanted: list[int] = []
        for c in sorted(classes):
            own = (labels == c).nonzero().flatten()
            wanted += own[torch.randperm(len(own), generator=draws)[:ipc]].tolist()
        assert rows_of(random_subset(images, labels, ipc=ipc, classes=classes, generator=mine), images) == wanted
    seeded, drawn = (random_subset(images, labels, ipc=2, generator=g).images for g in (7, derive(7)))
    assert torch.equal(seeded, drawn)


@pytest.mark.parametrize("choose", ALL)
def test_short_missing_and_unbalanced_classes(choose: Chooser, global_rng_untouched: None) -> None:
    images, labels = data([2, 9, 0, 4])
    with pytest.warns(UserWarning, match=r"ipc=5 is more than 2 of 3 classes have: 0 \(2\), 3 \(4\)"):
        chosen = choose(images, labels, ipc=5, num_classes=4)
    assert chosen.counts().tolist() == [5, 5, 0, 5]
    assert chosen.info["with_replacement"] == [0, 3]
    assert chosen.info["absent"] == [2]
    rows = rows_of(chosen, images)
    assert labels[rows].tolist() == chosen.labels.tolist()
    for part, distinct in ((rows[:5], 2), (rows[5:10], 5), (rows[10:], 4)):
        assert len(set(part)) == distinct
    assert rows[:2] == rows[2:4]
    for ipc, short in ((2, []), (3, [0]), (4, [0]), (9, [0, 3]), (10, [0, 1, 3])):
        assert choose(images, labels, ipc=ipc, num_classes=4).info["with_replacement"] == short


@pytest.mark.parametrize("choose", ALL)
def test_set_keeps_its_metadata_and_columns(choose: Chooser) -> None:
    images, labels = data([4, 4], (5, 3, 2))
    real = LabeledImages(
        images,
        labels,
        normalization=Normalization((0.5,), (0.2,)),
        columns={"row": torch.arange(8)},
        class_names=[*"ab"],
    )
    chosen = choose(real, ipc=2, classes=[1], generator=7)
    assert (chosen.normalization, chosen.class_names) == (real.normalization, ("a", "b"))
    assert chosen.labels.tolist() == [1, 1]
    assert torch.equal(chosen.images, images[chosen.columns["row"]])
    assert chosen.info["absent"] == []
    names = {random_subset: "random", herding: "herding", k_center: "k-center"}
    facts = {"publishes": "real images", "ipc": 2, "with_replacement": [], "derived": names[choose]}
    assert facts.items() <= chosen.info.items()
    assert (chosen.info["method"], chosen.info.get("embedding", "pixels")) == (names[choose], "pixels")
    assert chosen.info.get("generator") == (7 if choose is random_subset else None)
    private = real.replace(info={"epsilon": 1.0, "delta": 1e-5})
    for network, reason in ((None, None), (build(lambda: Small(5), 0).double(), "a network of unknown origin")):
        told = choose(private, ipc=2, network=network).info
        used = reason if choose is not random_subset else None
        assert (told["epsilon"], used is None or used in told["reason"]) == (None if used else 1.0, True)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()


DRAWN = RandomNetworks(linear)


@pytest.mark.parametrize("condense", [
    *ALL, partial(stitch, observer=build(linear, 0)), partial(gradient_matching, networks=DRAWN, iterations=0),
    partial(distribution_matching, networks=DRAWN, steps=0),
])  # fmt: skip
def test_tensors_have_the_given_normalization_and_number_of_classes(condense: Chooser) -> None:
    made = condense(*data([4, 4]), ipc=1, num_classes=3, normalization=Normalization((0.5,), (0.2,)), progress=False)
    assert (made.normalization, made.num_classes) == (Normalization((0.5,), (0.2,)), 3)


def test_random_images_in_the_same_parametrization() -> None:
    data = LabeledImages(torch.randn(36, 1, 8, 6, generator=derive(1)), torch.arange(36) % 3, num_classes=4)
    made, plain = random_subset(data, ipc=2, parametrize=Tiles(2), generator=5), random_subset(data, ipc=8, generator=5)
    assert isinstance(made, TiledImages)
    assert torch.equal(made.stored, Tiles(2).encode(plain.images))
    assert torch.equal(made.labels, plain.labels)
    assert len(made.stored) == 6
    assert made.info == plain.info | {"ipc": 2, "parametrize": "Tiles(factor=2)"}
    with share_of("over_classes"):
        refused(lambda: random_subset(data, ipc=2), ValueError, "one sequence of random numbers; call random_subset")
    assert random_subset(data, ipc=2, parametrize=Tiles(2), classes=[2]).counts().tolist() == [0, 0, 8, 0]
    refused(lambda: random_subset(data, ipc=2, parametrize=Tiles(4)), ValueError, "divisible by 4, got 8x6")


@pytest.mark.parametrize("choose", ALL)
def test_identical_images_are_not_selected_twice(choose: Chooser) -> None:
    real = LabeledImages(torch.ones(4, 1, 2, 2), torch.zeros(4, dtype=torch.long), columns={"row": torch.arange(4)})
    assert sorted(choose(real, ipc=4).columns["row"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("choose", ALL)
def test_invalid_input_is_refused(choose: Chooser) -> None:
    images, labels = data([3, 3])
    refused(lambda: choose(images, ipc=1), TypeError, "labels must be given")
    refused(lambda: choose(images, labels, ipc=1, num_classes=3, classes=[2]), ValueError, "have none")
    refused(lambda: choose(LabeledImages(images, torch.full((6, 2), 0.5)), ipc=1), ValueError, "class indices")
