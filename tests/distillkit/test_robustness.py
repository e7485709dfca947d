"""Corruptions and attacks: hand-computed changes, laws, and accuracies of trained networks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization, robustness
from distillkit.data import open_npz
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet, build
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from distillkit.robustness import FGSM, PGD, Corruption, Perturbation, pixels_in_range, require_perturbations
from distillkit.robustness import CorruptionKind as Kind
from distillkit.training import accuracy
from tests.refused import refused

KINDS: tuple[Kind, ...] = get_args(Kind)
RGB = Normalization((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def pixels(count: int = 6, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, side, side, generator=derive(seed), dtype=torch.float64)


def labeled(normalization: Normalization = RGB, count: int = 12, classes: int = 2, **options: Any) -> LabeledImages:
    x = pixels(count, **options)
    return LabeledImages.from_pixels(x, torch.arange(count) % classes, num_classes=classes, normalization=normalization)


def linear(channels: int = 3, side: int = 8, classes: int = 2, seed: int = 3) -> nn.Module:
    return build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, classes)), seed).double()


def apply(one: Perturbation, x: Tensor, network: nn.Module, labels: Tensor, norm: Normalization = RGB) -> Tensor:
    return one(x, labels, lambda p: network(norm.encode(p)), derive(5)).clamp(0, 1)


@pytest.mark.parametrize(
    ("steps", "size", "start"), [(1, None, True), (4, None, False), (5, 0.03, True), (3, 0.3, False)]
)
def test_pgd_and_fgsm_equal_the_algorithm_pixel_by_pixel(steps: int, size: float | None, start: bool) -> None:
    """On images with black and white pixels, each with its own draws, and a network whose gradient changes its sign."""
    x, labels, epsilon, draws = (1.4 * pixels() - 0.2).clamp(0, 1), torch.arange(6) % 2, 0.1, derive(5)
    network = build(lambda: ConvNet((3, 8, 8), 2, width=8, depth=1), 0).double().eval()

    def slope(image: Tensor, label: Tensor) -> Tensor:
        leaf = image[None].clone().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(network(RGB.encode(leaf)), label[None]), leaf)[0][0].sign()

    wanted = []
    for image, label in zip(x, labels, strict=True):
        low, high = (image - epsilon).clamp_min(0), (image + epsilon).clamp_max(1)
        shift = 2 * torch.rand(image.shape, generator=draws, dtype=torch.float64) - 1 if start else torch.zeros(())
        found = torch.minimum(torch.maximum(image + epsilon * shift, low), high)
        for _ in range(steps):
            found = found + (2.5 * epsilon / steps if size is None else size) * slope(found, label)
            found = torch.minimum(torch.maximum(found, low), high)
        wanted.append(found)
    one = PGD(epsilon, steps=steps, step_size=size, random_start=start)
    assert torch.allclose(apply(one, x, network, labels), torch.stack(wanted), rtol=0, atol=1e-9)
    assert not x.requires_grad
    once = torch.stack([image + epsilon * slope(image, label) for image, label in zip(x, labels, strict=True)])
    assert torch.allclose(apply(FGSM(epsilon), x, network, labels), once.clamp(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("severity", range(6))
def test_noise_has_the_stated_amount_and_is_drawn_image_by_image(severity: int) -> None:
    x = pixels(3, 2)[:, :, :5, :7]
    std, photons = ((0, 0), (0.04, 500), (0.06, 250), (0.08, 100), (0.09, 75), (0.1, 50))[severity]
    draws, others = derive(0), derive(0)
    normal = torch.stack([image + std * torch.randn(image.shape, generator=draws, dtype=x.dtype) for image in x])
    assert torch.allclose(corrupt("gaussian_noise", severity, x), normal)
    shot = torch.stack([torch.poisson(photons * image, others) / photons for image in x]) if severity else x
    assert torch.allclose(corrupt("shot_noise", severity, x), shot)
    if not severity:
        assert all(torch.equal(corrupt(kind, 0, x), x) for kind in KINDS)


def corrupt(kind: Kind, severity: int, x: Tensor) -> Tensor:
    return Corruption(kind, severity)(x, torch.zeros(len(x)), lambda p: p, derive(0))


def test_names_state_all_options_that_differ_from_the_defaults() -> None:
    assert str(Corruption("contrast", 3)) == "contrast 3"
    attacks = (PGD(8 / 255), PGD(8 / 255, steps=3, step_size=2 / 255, random_start=False), FGSM(0.5 / 255))
    assert [*map(str, attacks)] == ["PGD 8/255 10 steps", "PGD 8/255 3 steps of 2/255 from clean", "FGSM 0.5/255"]


def test_amounts_are_those_of_the_documentation() -> None:
    for kind, (_, amounts) in robustness._CORRUPTIONS.items():
        line = next(line for line in str(Corruption.__doc__).splitlines() if f'`"{kind}"`' in line)
        assert tuple(float(number) for number in re.findall(r"\d[\d.]*", line)[:5]) == amounts


def test_brightness_is_that_of_hsv() -> None:
    from kornia.color import hsv_to_rgb, rgb_to_hsv

    x = pixels()
    x[:, :, 2] = 0  # black becomes grey
    for severity, amount in ((1, 0.05), (5, 0.3)):
        hsv = rgb_to_hsv(x)
        hsv[:, 2] = (hsv[:, 2] + amount).clamp(0, 1)
        assert torch.allclose(corrupt("brightness", severity, x), hsv_to_rgb(hsv), atol=1e-6)


def test_contrast_is_reduced_around_the_mean_of_each_channel_and_image() -> None:
    x = pixels(3, 3, 6)[:, :, :4] * torch.tensor([1.0, 0.2, 0.6]).view(1, 3, 1, 1).double()
    for severity, factor in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        wanted = torch.stack([torch.stack([c.mean() + factor * (c - c.mean()) for c in image]) for image in x])
        assert torch.allclose(corrupt("contrast", severity, x), wanted)


@pytest.mark.parametrize(("height", "width"), [(33, 33), (41, 96), (96, 41), (9, 20), (64, 64)])
def test_blur_is_a_gaussian_average_with_repeated_borders(height: int, width: int) -> None:
    """Of sigma for sides up to 32, and of sigma times side / 32 for larger ones; four sigma on each side."""
    x = torch.rand(2, 2, height, width, generator=derive(0), dtype=torch.float64)
    for severity, sigma in enumerate((0.4, 0.6, 0.7, 0.8, 1.0), 1):
        sigma *= max(1, min(height, width) / 32)
        away = torch.arange(-math.ceil(4 * sigma), math.ceil(4 * sigma) + 1)
        weights = (-(away**2) / (2 * sigma**2)).double().exp()
        rows, columns = (
            sum(
                w * F.one_hot((torch.arange(side) + d).clamp(0, side - 1), side)
                for d, w in zip(away, weights / weights.sum(), strict=True)
            )
            for side in (height, width)
        )
        assert torch.allclose(corrupt("gaussian_blur", severity, x), rows @ x @ columns.T, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(7, 20), (20, 7), (13, 13)])
def test_pixelate_averages_blocks_of_oblong_images(height: int, width: int) -> None:
    x = pixels(2, 3, 20)[:, :, :height, :width]
    for severity, share in enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1):
        found = corrupt("pixelate", severity, x)
        rows, columns = ([int((i + 0.5) * int(size * share) / size) for i in range(size)] for size in (height, width))
        for i in (0, height // 2, height - 1):
            for j in (0, width // 2, width - 1):
                same = torch.tensor([[(a, b) == (rows[i], columns[j]) for b in columns] for a in rows])
                assert torch.allclose(found[:, :, i, j], x[:, :, same].mean(2))


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize(
    "one", [PGD(0.02, steps=2), Corruption("gaussian_noise", 5), Corruption("shot_noise", 5)], ids=str
)
def test_accuracy_does_not_depend_on_chunks_or_on_where_images_are_stored(one: Perturbation, tmp_path: Any) -> None:
    x = (255 * pixels(30)).round().to(torch.uint8)
    pictures, labels = x.permute(0, 2, 3, 1).numpy(), np.arange(30) % 2
    parts = {f"{name}_images": pictures for name in ("train", "test")}
    np.savez(tmp_path / "x.npz", **parts, train_labels=labels, test_labels=labels)  # type: ignore[arg-type]
    stored = open_npz(tmp_path / "x.npz", normalization=RGB, cache=tmp_path / "cache", progress=False).test
    network = linear().float().train()
    found = {accuracy(network, stored, against=one, generator=4, chunk=chunk) for chunk in (1, 7, None)}
    found |= {accuracy(network, stored.read(), against=one, generator=4, chunk=chunk) for chunk in (4, None)}
    assert len(found) == 1
    assert accuracy(linear(), stored, chunk=7) == accuracy(linear(), stored.read().to(dtype=torch.float64))
    assert network.training
    assert all(p.grad is None for p in network.parameters())


def test_own_perturbation_is_tested_like_the_others() -> None:
    """It sees pixels in [0, 1], their labels and logits, and the given generator; its result is clipped."""
    told, seen = list[list[Tensor]](), list[Tensor]()

    class Invert(Perturbation):
        def __call__(
            self, pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], generator: torch.Generator
        ) -> Tensor:
            told.append([pixels, labels, logits(pixels), torch.rand(len(pixels), generator=generator)])
            return 1.4 - pixels

        def __str__(self) -> str:
            return "inverted"

    class Flat(Invert):
        def __call__(self, pixels: Tensor, *others: Any) -> Tensor:
            return pixels.flatten(1)

    data, network = labeled(), linear()
    x = RGB.decode(data.images)
    with network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        accuracy(network, data, against=Invert(), generator=9, chunk=5)
    wanted = [x, data.labels, network(data.images), torch.rand(12, generator=derive(9))]
    for found, want in zip(zip(*told, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(found), want)
    torch.testing.assert_close(RGB.decode(torch.cat(seen[-5::2])), (1.4 - x).clamp(0, 1))
    words = r"inverted must return images of shape \[12, 3, 8, 8\], got \[12, 192\]"
    refused(lambda: accuracy(network, data, against=Flat()), ValueError, words)


def test_user_networks_with_frozen_parameters_are_attacked_and_others_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(images).detach()

    data, network = labeled(), linear().requires_grad_(False)
    with torch.no_grad():
        assert accuracy(network, data, against=FGSM(0.3)) < accuracy(network, data)
    attack = lambda: accuracy(Detached(), data, against=FGSM(0.1))  # noqa: E731
    refused(attack, ValueError, "differentiable with respect to its images")
    accuracy(Detached(), data, against=Corruption("contrast", 1))


def test_wrong_arguments_are_named() -> None:
    data = labeled()
    wrong: dict[str, Callable[[], object]] = {
        "kind must be one of .*, got 'fog'$": lambda: Corruption("fog", 1),  # type: ignore[arg-type]
        "severity must be at most 5, got 6$": lambda: Corruption("contrast", 6),
        "step_size must be greater than 0, got 0$": lambda: PGD(0.1, step_size=0.0),
        "epsilon must be at least 0, got -0.1$": lambda: FGSM(-0.1),
        "epsilon must be below 1, .*, got 1; for a budget in 0..255 pass 1 / 255$": lambda: PGD(1.0),
        "normalization must be ": lambda: pixels_in_range(data.images, "none"),  # type: ignore[arg-type]
    }
    for words, call in wrong.items():
        refused(call, (TypeError, ValueError), f"^{words}")
    first, other = FGSM(1 / 255), FGSM(8 / 255)
    for twice in (other, FGSM(8 / 255 + 1e-9)):
        call = partial(require_perturbations, [first, other, twice])
        refused(call, ValueError, "different names, got 'FGSM 8/255' twice")
    for other_type in (FGSM, "FGSM"):
        call = partial(require_perturbations, [first, other_type])  # type: ignore[list-item]
        refused(call, TypeError, "^against must be a list of perturbations")
    assert require_perturbations((first, other)) == {"FGSM 1/255": first, "FGSM 8/255": other}
    call = partial(pixels_in_range, torch.zeros(0, 1, 1, 1), IDENTITY, "pictures")
    refused(call, ValueError, "^pictures must not be empty")
    plain = LabeledImages(data.images, data.labels, num_classes=2)
    late = plain[torch.arange(1025) % 12]
    late = late.replace(images=(torch.arange(1025.0) // 1024 * 2).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).double())
    words = r" must have pixels in \[0, 1\] after removing the normalization \(pixels in \[0, 1\]\), got "
    for test in (plain, late):  # pixels are read 1,024 images at a time
        refused(lambda t=test: evaluate(plain, t, linear, against=[FGSM(0.1)]), ValueError, f"test{words}")
    refused(lambda: accuracy(linear(), plain, against=FGSM(0.1)), ValueError, f"data{words}")
    for rounded in (1.005, -0.001, 1.0099, -0.0099):  # up to 0.01 is taken for rounding
        assert float(pixels_in_range(torch.full((1, 1, 1, 1), rounded), IDENTITY)) == round(rounded)
    for beyond in (1.011, -0.011):
        call = partial(pixels_in_range, torch.tensor([0.5, beyond]).view(2, 1, 1, 1), IDENTITY)
        refused(call, ValueError, f"^images{words}{min(beyond, 0.5)} to {max(beyond, 0.5)}; create")
