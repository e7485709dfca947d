"""The automatic learning rate of images (`lr=None`): its rule by hand, laws, resume, and the rate in `info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.condense import InnerTraining, Progress, distribution_matching, gradient_matching
from distillkit.networks import FixedNetwork, RandomNetworks, build, split
from distillkit.normalization import Normalization
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages, Tiles
from tests.refused import refused

HALF = Normalization((0.5,), (0.25,))


def data(normalization: Normalization = HALF) -> LabeledImages:
    images = torch.randn(24, 1, 8, 8, generator=derive(1), dtype=torch.float64)
    return LabeledImages(images, torch.arange(24) % 3, num_classes=3, normalization=normalization)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()


def squares(real: Tensor, synthetic: Tensor) -> Tensor:
    return (real.mean(0) - synthetic.mean(0)).square().sum()


def dm(**options: Any) -> LabeledImages:
    given = {"networks": RandomNetworks(network), "ipc": 2, "steps": 3, "lr": None, "progress": False}
    return distribution_matching(data(), **{**given, **options})


def dc(**options: Any) -> LabeledImages:
    given = {"iterations": options.pop("steps", 3), "inner": InnerTraining(loops=(2, 1), batch=4), "lr": None}
    return gradient_matching(data(), networks=RandomNetworks(network), ipc=2, progress=False, **{**given, **options})


KINDS: dict[str, Callable[..., LabeledImages]] = {
    "dm": dm,
    "dm, noise": lambda **o: dm(init="noise", augment=DSA("flip_crop"), **o),
    "dm, tiles": lambda **o: dm(parametrize=Tiles(2), **o),
    "dm, logits": lambda **o: dm(match="embedding+logits", **o),
    "own objective": lambda **o: dm(match=squares, **o),
    "dc": dc,
    "dc, tiles": lambda **o: dc(parametrize=Tiles(2), augment=DSA("flip_crop"), **o),
}


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("normalization", [HALF, Normalization((0.0,), (1.0,))], ids=str)
def test_rate_moves_pixels_of_noise_by_a_fixed_amount(normalization: Normalization) -> None:
    """The formula with autograd: the noise comes from the seed of the call, the network is that of the first step."""
    net = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)), 0).double()
    real = data(normalization)
    made = distribution_matching(real, networks=FixedNetwork(net), ipc=2, steps=1, lr=None, generator=4, progress=False)
    seed = int(torch.randint(2**62, (), generator=as_generator(4)))
    noise = torch.randn(6, 1, 8, 8, generator=derive(seed, "lr"), dtype=torch.float64).requires_grad_()
    own, features = split(net).features(noise).view(3, 2, -1).mean(1), split(net).features
    loss = sum((features(real.images[real.labels == c]).mean(0) - own[c]).square().sum() for c in range(3))
    assert isinstance(loss, Tensor)
    size = float(torch.autograd.grad(loss, noise)[0].square().mean().sqrt())
    assert made.info["lr"] == pytest.approx(0.05 / normalization.std[0] / size, rel=0.005)


@pytest.mark.parametrize("tiles", [None, Tiles(2)], ids=str)
def test_rate_counts_all_channels_and_stored_pixels(tiles: Tiles | None) -> None:
    """Colour with unequal deviations, oblong images and tiles, through autograd."""
    images = torch.randn(12, 3, 4, 6, generator=derive(1), dtype=torch.float64)
    normalization = Normalization((0.5, 0.4, 0.3), (0.1, 0.2, 0.6))
    real = LabeledImages(images, torch.arange(12) % 2, num_classes=2, normalization=normalization)
    net = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 2)), 0).double()
    options: dict[str, Any] = {
        "ipc": 2,
        "init": "noise",
        "steps": 1,
        "generator": 4,
        "progress": False,
        "parametrize": tiles,
    }
    made = distribution_matching(real, networks=FixedNetwork(net), lr=None, **options)
    seed = int(torch.randint(2**62, (), generator=as_generator(4)))
    noise = torch.randn(4, 3, 4, 6, generator=derive(seed, "lr"), dtype=torch.float64).requires_grad_()
    features = split(net).features
    own = features(noise if tiles is None else tiles.decode(noise)).view(2, -1, 5).mean(1)
    loss = sum((features(images[real.labels == c]).mean(0) - own[c]).square().sum() for c in range(2))
    assert isinstance(loss, Tensor)
    size = float(torch.autograd.grad(loss, noise)[0].square().mean().sqrt())
    assert made.info["lr"] == pytest.approx(0.05 / 0.3 / size, rel=0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_rate_is_in_the_info_and_gives_the_same_bits_when_passed(kind: str) -> None:
    made = KINDS[kind]()
    assert isinstance(made.info["lr"], float)
    again = KINDS[kind](lr=made.info["lr"])
    assert torch.equal(made.images, again.images)
    assert made.info == again.info


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_keeps_the_rate_and_gives_the_same_bits(kind: str) -> None:
    states = []

    def keep(progress: Progress) -> None:
        if progress.step == 1:
            states.append(progress.state())

    whole = KINDS[kind](callback=keep)
    again = KINDS[kind](resume=states[0])
    assert torch.equal(whole.images, again.images)
    assert whole.info["lr"] == again.info["lr"]
    refused(lambda: KINDS[kind](resume=states[0], lr=1.0), ValueError, r"lr=None \(now 1\.0\)")


@given(st.floats(1e-3, 1e3))
def test_first_step_does_not_depend_on_the_scale_of_the_objective(scale: float) -> None:
    def scaled(real: Tensor, synthetic: Tensor) -> Tensor:
        return scale * squares(real, synthetic)

    plain, made = dm(match=squares, steps=1), dm(match=scaled, steps=1)
    assert made.info["lr"] == pytest.approx(plain.info["lr"] / scale, rel=0.01)
    start = dm(steps=0).images
    assert torch.allclose(made.images - start, plain.images - start, rtol=0.02, atol=1e-9)


def test_rate_does_not_depend_on_the_start_and_no_step_needs_none() -> None:
    rates = {dm(init=init).info["lr"] for init in ("real", "noise", data()[:6])}
    assert len(rates) == 1
    assert dm(steps=0).info["lr"] is None
    assert dm(steps=0, lr=2.0).info["lr"] == 2.0


def test_objective_without_a_gradient_needs_a_rate() -> None:
    def flat(real: Tensor, synthetic: Tensor) -> Tensor:
        return 0 * squares(real, synthetic)

    refused(lambda: dm(match=flat), ValueError, r"lr must be given, because the gradient at noise images has size 0\.0")
    assert torch.equal(dm(match=flat, lr=1.0).images, dm(steps=0).images)
    refused(lambda: dm(lr=0.0), ValueError, "lr must be greater than 0")
