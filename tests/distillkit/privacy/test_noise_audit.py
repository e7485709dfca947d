"""Ten thousand releases on neighbouring sets: an adversary's advantage agrees with the claim, and not with bugs.

The adversary knows everything but whether one record is there, and asks whether the likelihood ratio of the release is
above e^epsilon. The advantage P(yes | there) - e^epsilon P(yes | not there) is then exactly delta(epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks import build
from distillkit.networks.samplers import FixedNetwork
from distillkit.privacy import (
    Account,
    EmbeddingNetworks,
    Ledger,
    PublicEmbedders,
    Secret,
    class_sums,
    gaussian_delta,
    image_sgd,
    release,
)
from distillkit.sets import LabeledImages

EACH = 5000
SEEDED = Secret(seed=1)
"""Seeded noise, so that no test fails by chance; `test_secret` covers the system's entropy."""
EPSILONS = (0.0, 0.5, 1.0)


def advantage(there: Tensor, absent: Tensor, threshold: float, epsilon: float) -> tuple[float, float]:
    """Return the observed delta at `epsilon` and its standard error."""
    p, q = float((there > threshold).double().mean()), float((absent > threshold).double().mean())
    spread = p * (1 - p) / len(there) + math.exp(2 * epsilon) * q * (1 - q) / len(absent)
    return p - math.exp(epsilon) * q, math.sqrt(spread) + 1e-4


def agrees(observed: tuple[float, float], claimed: float) -> bool:
    return abs(observed[0] - claimed) <= 4 * observed[1]


def leaks(observed: tuple[float, float], claimed: float) -> bool:
    return observed[0] - claimed > 3 * observed[1]


def tiny(images: int) -> LabeledImages:
    pixels = torch.tensor([[0.3, -1.0, 0.2, 0.5], [1.0, 0.4, -0.6, 0.1]], dtype=torch.float64)
    return LabeledImages(pixels.view(2, 1, 2, 2), torch.tensor([0, 1]), num_classes=2)[:images]


def linear() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)).double(), 3)


def sums_of(data: LabeledImages) -> Tensor:
    embedders = PublicEmbedders(FixedNetwork(linear()), 1, like=data)
    return class_sums(data.images, data.labels, embedders, num_classes=2)[0]


SIGMA = 1.2


def released(sums: Tensor) -> Tensor:
    """Return `EACH` independent releases of the same sums: [EACH, 2, 3]."""
    return release(sums.expand(EACH, -1, -1), sigma=SIGMA, sensitivity=1.0, ledger=Account(Ledger(), secret=SEEDED))


@pytest.fixture(scope="module")
def worlds() -> tuple[Tensor, Tensor]:
    return sums_of(tiny(2)), sums_of(tiny(1))


def projection_on_the_record(
    worlds: tuple[Tensor, Tensor], mechanism: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The likelihood ratio's statistic: the release projected on the record's contribution, 0 or 1 without noise."""
    there, absent = worlds
    direction = there - absent
    assert float(direction.norm()) == pytest.approx(1.0)
    first, second = ((mechanism(sums) - absent) * direction for sums in worlds)
    return first.sum((1, 2)), second.sum((1, 2))


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_class_means_agree_with_the_claim(worlds: tuple[Tensor, Tensor], epsilon: float) -> None:
    there, absent = projection_on_the_record(worlds, released)
    observed = advantage(there, absent, SIGMA**2 * epsilon + 0.5, epsilon)
    assert agrees(observed, gaussian_delta(SIGMA, epsilon))


def test_absent_class_is_noised_like_others(worlds: tuple[Tensor, Tensor]) -> None:
    for sums in worlds:
        assert bool(released(sums)[:, 1].ne(0).any(1).all())


def test_size_of_the_noise_does_not_depend_on_the_record(worlds: tuple[Tensor, Tensor]) -> None:
    """Orthogonal to the record and class 0 there is only noise."""
    direction = worlds[0] - worlds[1]

    def across(sums: Tensor) -> Tensor:
        noise = released(sums) - sums
        noise[:, 1] -= (noise[:, 1] @ direction[1])[:, None] * direction[1]
        return -noise[:, 1].norm(dim=1)

    there, absent = (across(sums) for sums in worlds)
    assert not leaks(advantage(there, absent, float(absent.median()), 0.0), 0.0)


def image_gradients(data: LabeledImages, **options: float) -> Tensor:
    """Return the sums of clipped gradients of `EACH` steps from the same images, in clips, [steps, 2, 4]."""
    seen: list[Tensor] = []
    given: dict[str, Any] = {"size": 2, "clip": 0.1, "lr": 1e-300, "ipc": 1, "steps": EACH} | options
    network, account = EmbeddingNetworks(FixedNetwork(linear()), match="embedding"), Account(Ledger(), secret=SEEDED)
    image_sgd(data, networks=network, ledger=account, callback=lambda _, g: seen.append(g.clone()), **given)
    return (torch.stack(seen) * given["rate"] / 0.1).view(-1, 2, 4)


@pytest.fixture(scope="module")
def steps() -> tuple[Tensor, Tensor]:
    """Return releases with the record, which is the one of class 1, and without it."""
    there, absent = (image_gradients(tiny(n), rate=RATE, sigma=IMAGE_SIGMA) for n in (2, 1))
    return there, absent


@pytest.fixture(scope="module")
def directions() -> tuple[Tensor, Tensor]:
    """Return the clipped gradients [2, 4] of the record and of the other one, in units of the clip."""
    both, other = (image_gradients(tiny(n), rate=1.0, sigma=0.0, steps=1)[0] for n in (2, 1))
    for direction in (both - other, other):
        assert float(direction.norm()) == pytest.approx(1.0, rel=1e-4)
    return both - other, other


@pytest.fixture(scope="module")
def gradients(steps: tuple[Tensor, Tensor], directions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The likelihood ratio's statistic: the release projected on the record's gradient, with the record and without."""
    there, absent = ((world * directions[0]).sum((1, 2)) for world in steps)
    return there, absent


RATE, IMAGE_SIGMA = 0.6, 0.7


def subsampled(epsilon: float, sigma: float, rate: float) -> tuple[float, float]:
    """Return threshold and delta of one Poisson-subsampled Gaussian release, with or without the record."""
    threshold = sigma**2 * math.log((math.exp(epsilon) - 1 + rate) / rate) + 0.5
    above = [0.5 * math.erfc((threshold - mean) / (sigma * math.sqrt(2))) for mean in (0.0, 1.0)]
    return threshold, (1 - rate) * above[0] + rate * above[1] - math.exp(epsilon) * above[0]


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_image_gradients_agree_with_the_claim(gradients: tuple[Tensor, Tensor], epsilon: float) -> None:
    threshold, claimed = subsampled(epsilon, IMAGE_SIGMA, RATE)
    assert agrees(advantage(*gradients, threshold, epsilon), claimed)


@pytest.mark.slow
def test_class_of_which_nobody_was_drawn_is_noised(steps: tuple[Tensor, Tensor]) -> None:
    for world in steps:
        assert bool(world[:, 1].ne(0).any(1).all())


@pytest.mark.slow
def test_noise_of_a_step_does_not_depend_on_the_record(
    steps: tuple[Tensor, Tensor], directions: tuple[Tensor, Tensor]
) -> None:
    """Orthogonal to both gradients there is only noise."""

    def across(world: Tensor) -> Tensor:
        noise = world.clone()
        for direction in directions:
            noise -= (noise * direction).sum((1, 2), keepdim=True) * direction
        return -noise.flatten(1).norm(dim=1)

    there, absent = (across(world) for world in steps)
    assert not leaks(advantage(there, absent, float(absent.quantile(0.9)), 0.0), 0.0)
