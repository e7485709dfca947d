"""Ten thousand releases on neighbouring sets: an adversary's advantage agrees with the claim, and not with bugs.

The adversary knows everything but whether one record is there, and asks whether the likelihood ratio of the release is
above e^epsilon. The advantage P(yes | there) - e^epsilon P(yes | not there) is then exactly delta(epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


def read_twice_with_fresh_noise(sums: Tensor) -> Tensor:
    return (released(sums) + released(sums)) / 2


def too_little_noise(sums: Tensor) -> Tensor:
    return sums + (released(sums) - sums) * 0.7


def nothing_for_absent_classes(sums: Tensor) -> Tensor:
    return torch.where((sums != 0).any(1, keepdim=True), released(sums), torch.zeros(()).double())


def divided_by_the_class_count(sums: Tensor) -> Tensor:
    """Mean with noise / count: the scale of the noise reveals the count."""
    count = 1 + (sums[1] != 0).any().double()
    return (sums + (released(sums) - sums)) / count


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


@pytest.mark.parametrize("bug", [read_twice_with_fresh_noise, too_little_noise], ids=lambda f: f.__name__)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_class_means_with_a_bug_reveal_more(
    worlds: tuple[Tensor, Tensor], epsilon: float, bug: Callable[[Tensor], Tensor]
) -> None:
    there, absent = projection_on_the_record(worlds, bug)
    real = SIGMA * (0.7 if bug is too_little_noise else 2**-0.5)
    assert leaks(advantage(there, absent, real**2 * epsilon + 0.5, epsilon), gaussian_delta(SIGMA, epsilon))


def test_omitted_class_reveals_the_record(worlds: tuple[Tensor, Tensor]) -> None:
    for mechanism, verdict in ((nothing_for_absent_classes, leaks), (released, agrees)):
        there, absent = (mechanism(sums)[:, 1].ne(0).any(1).double() for sums in worlds)
        assert verdict(advantage(there, absent, 0.5, 1.0), gaussian_delta(SIGMA, 1.0)) or mechanism is released
        if mechanism is released:
            assert bool(there.all())
            assert bool(absent.all())


def test_division_by_the_count_reveals_the_record(worlds: tuple[Tensor, Tensor]) -> None:
    """Orthogonal to the record and class 0 there is only noise, and its size must be independent of the record."""
    direction = worlds[0] - worlds[1]

    def across(mechanism: Callable[[Tensor], Tensor], sums: Tensor) -> Tensor:
        noise = mechanism(sums) - sums
        noise[:, 1] -= (noise[:, 1] @ direction[1])[:, None] * direction[1]
        return -noise[:, 1].norm(dim=1)

    for mechanism, verdict in ((divided_by_the_class_count, True), (released, False)):
        there, absent = (across(mechanism, sums) for sums in worlds)
        median = float(absent.median())
        assert leaks(advantage(there, absent, median, 0.0), 0.0) is verdict


@dataclass
class Steps:
    """`EACH` released gradients [EACH, 2, 4] in units of the clip, and which of the two records each one drew."""

    released: Tensor
    drawn: Tensor


def image_gradients(data: LabeledImages, *, rate: float, sigma: float) -> Steps:
    """Gradients at the same images: steps of learning rate 0."""
    seen: list[Tensor] = []
    who: list[Tensor] = []
    poisson = Secret.poisson

    def recorded(self: Secret, count: int, rate: float) -> Tensor:
        who.append(poisson(self, count, rate))
        return who[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Secret, "poisson", recorded)
        image_sgd(
            data,
            size=2,
            sigma=sigma,
            rate=rate,
            clip=0.1,
            lr=1e-300,  # the images stay where they are
            ipc=1,
            steps=EACH,
            networks=EmbeddingNetworks(FixedNetwork(linear()), match="embedding"),
            ledger=Account(Ledger(), secret=SEEDED),
            callback=lambda step, g: seen.append(g.clone()),
        )
    drawn = torch.stack([(rows[:, None] == torch.arange(2)).any(0) for rows in who])
    return Steps((torch.stack(seen) * (rate * 2 / 2) / 0.1).view(EACH, 2, 4), drawn)


@pytest.fixture(scope="module")
def steps() -> tuple[Steps, Steps]:
    """Return releases with the record, which is the one of class 1, and without it."""
    there, absent = (image_gradients(tiny(n), rate=RATE, sigma=IMAGE_SIGMA) for n in (2, 1))
    return there, absent


@pytest.fixture(scope="module")
def directions() -> tuple[Tensor, Tensor]:
    """Return the clipped gradients [2, 4] of the record and of the other one, in units of the clip."""
    both, other = (image_sgd_sum(tiny(n)).view(2, 4) for n in (2, 1))
    for direction in (both - other, other):
        assert float(direction.norm()) == pytest.approx(1.0, rel=1e-4)
    return both - other, other


@pytest.fixture(scope="module")
def gradients(steps: tuple[Steps, Steps], directions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The likelihood ratio's statistic: the release projected on the record's gradient, with the record and without."""
    there, absent = ((world.released * directions[0]).sum((1, 2)) for world in steps)
    return there, absent


RATE, IMAGE_SIGMA = 0.6, 0.7


def image_sgd_sum(data: LabeledImages) -> Tensor:
    """Return the sum of the clipped gradients of all records, in units of the clip."""
    seen: list[Tensor] = []
    options = {"size": 2, "sigma": 0.0, "rate": 1.0, "clip": 0.1, "lr": 1e-300, "ipc": 1, "steps": 1}
    network = EmbeddingNetworks(FixedNetwork(linear()), match="embedding")
    image_sgd(data, networks=network, callback=lambda step, g: seen.append(g.clone()), **options)  # type: ignore[arg-type]
    return seen[0] / 0.1


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
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_image_gradients_contradict_a_smaller_rate_or_more_noise(
    gradients: tuple[Tensor, Tensor], epsilon: float
) -> None:
    """A per-class rate reported as the client's, and an unaccounted step (two are visible, one is charged)."""
    threshold, _ = subsampled(epsilon, IMAGE_SIGMA, RATE)
    _, understated_rate = subsampled(epsilon, IMAGE_SIGMA, RATE / 2)
    assert leaks(advantage(*gradients, threshold, epsilon), understated_rate)
    ratios = [(1 - RATE + RATE * ((2 * g - 1) / (2 * IMAGE_SIGMA**2)).exp()).log() for g in gradients]
    there, absent = (ratio.view(2, -1).sum(0) for ratio in ratios)
    assert leaks(advantage(there, absent, epsilon, epsilon), subsampled(epsilon, IMAGE_SIGMA, RATE)[1])


def without_noise_where_nobody_was_drawn(world: Steps) -> Tensor:
    return world.released * world.drawn[:, :, None]


def divided_by_the_records_drawn(world: Steps) -> Tensor:
    return world.released / world.drawn.sum(1).clamp_min(1).view(-1, 1, 1)


def unchanged(world: Steps) -> Tensor:
    return world.released


@pytest.mark.slow
def test_block_without_noise_reveals_the_record(steps: tuple[Steps, Steps]) -> None:
    """Drawn class by class, with noise only for the drawn classes."""
    claimed = subsampled(1.0, IMAGE_SIGMA, RATE)[1]
    for mechanism, verdict in ((without_noise_where_nobody_was_drawn, True), (unchanged, False)):
        there, absent = (mechanism(world)[:, 1].ne(0).any(1).double() for world in steps)
        assert leaks(advantage(there, absent, 0.5, 1.0), claimed) is verdict


@pytest.mark.slow
def test_division_by_the_drawn_records_reveals_the_record(
    steps: tuple[Steps, Steps], directions: tuple[Tensor, Tensor]
) -> None:
    """Orthogonal to both gradients there is only noise, and its size must be independent of the record."""

    def across(mechanism: Callable[[Steps], Tensor], world: Steps) -> Tensor:
        noise = mechanism(world).clone()
        for direction in directions:
            noise -= (noise * direction).sum((1, 2), keepdim=True) * direction
        return -noise.flatten(1).norm(dim=1)

    for mechanism, verdict in ((divided_by_the_records_drawn, True), (unchanged, False)):
        there, absent = (across(mechanism, world) for world in steps)
        small = float(absent.quantile(0.9))
        assert leaks(advantage(there, absent, small, 0.0), 0.0) is verdict
