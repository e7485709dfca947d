from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit._utils.progress import bar
from distillkit.generate._noise_set import class_latents
from distillkit.generate.cnn_noise import NoiseDecoder, _calibrate, _decorrelate, cnn_noise, decorrelation
from distillkit.generate.stylegan2 import StyleGAN2, _base_and_doublings
from distillkit.generate.stylegan_noise import stylegan_noise, upsampled_gaussian
from distillkit.networks import build
from distillkit.normalization import Normalization
from distillkit.privacy.validation._arguments import refuse_measured_normalization
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages

MAKERS: dict[str, Callable[..., LabeledImages]] = {
    "stylegan": lambda *a, **o: stylegan_noise(*a, **{"width": 8, "latent": 16, **o}),
    "gaussian": upsampled_gaussian,
    "cnn": lambda *a, **o: cnn_noise(*a, **{"width": 4, **o}),
    "shared": lambda *a, **o: cnn_noise(*a, **{"width": 4, "shared": True, "mean_std": 1.0, **o}),
}


def generator_network(size: int = 8, **options: Any) -> StyleGAN2:
    network = build(lambda: StyleGAN2(size, **{"latent": 6, "width": 5, **options}), 1)
    assert isinstance(network, StyleGAN2)
    return network


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=as_generator(seed))


def modulated_by_hand(conv: Any, x: Tensor, w: Tensor) -> Tensor:
    """Eq. 1 and 3 with a separate kernel for each image; up: zeros between pixels, convolution, blur."""
    line = torch.tensor([1.0, 3.0, 3.0, 1.0])
    blur = (torch.outer(line, line) / 16).expand(conv.weight.shape[0], 1, 4, 4)
    images = []
    for image, latent in zip(x, w, strict=True):
        style = conv.style.weight @ latent / math.sqrt(len(latent)) + 1
        kernel = conv.weight / math.sqrt(conv.weight[0].numel()) * style[None, :, None, None]
        if conv.demodulate:
            kernel = kernel / (kernel.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        if conv.up:
            spread = image.new_zeros(len(image), 2 * image.shape[1] - 1, 2 * image.shape[2] - 1)
            spread[:, ::2, ::2] = image
            y = F.conv2d(F.conv2d(spread[None], kernel.flip(2, 3), padding=2), blur, padding=1, groups=len(kernel))
        else:
            y = F.conv2d(image[None], kernel, padding=kernel.shape[-1] // 2)
        images.append(y)
    return torch.cat(images)


def generated_by_hand(network: StyleGAN2, z: Tensor, noise: list[Tensor], gain: float) -> Tensor:
    w = z / z.square().mean(1, keepdim=True).sqrt()
    for layer in network.mapping:
        w = F.leaky_relu(w @ layer.weight.T / math.sqrt(w.shape[1]), 0.2) * math.sqrt(2)
    x = network.constant.expand(len(z), -1, -1, -1)
    sums = []
    for k, conv in enumerate(network.convs):
        x = F.leaky_relu(modulated_by_hand(conv, x, w) + gain * noise[k], 0.2) * math.sqrt(2)
        if k % 2 == 0:
            sums.append(modulated_by_hand(network.colours[k // 2], x, w))
    image = sums[0]
    for colours in sums[1:]:
        spread = torch.zeros(*image.shape[:2], 2 * image.shape[2], 2 * image.shape[3])
        spread[:, :, ::2, ::2] = image
        line = torch.tensor([1.0, 3.0, 3.0, 1.0])
        blur = (torch.outer(line, line) / 16).expand(image.shape[1], 1, 4, 4)
        image = F.conv2d(F.pad(spread, (2, 1, 2, 1)), blur, groups=image.shape[1]) + colours
    return image


@torch.no_grad()
@pytest.mark.parametrize(("size", "margin"), [(16, 0), (33, 3)])
def test_the_generator_follows_the_equations_of_stylegan2(size: int, margin: int) -> None:
    network = generator_network(size, depth=2)
    z = normal(3, 6)
    noise = [normal(3, 1, s, s, seed=s) for s in network.noise_sides]
    made = network(z, noise, 0.7)
    assert made.shape == (3, 3, size, size)
    whole = generated_by_hand(network, z, noise, 0.7)
    assert torch.allclose(made, whole[..., margin : margin + size, margin : margin + size], atol=1e-4)


@given(st.integers(4, 300))
def test_base_and_doublings_cover_a_size_tightly(size: int) -> None:
    base, doublings = _base_and_doublings(size)
    assert 4 <= base <= 8
    assert base * 2**doublings - 2**doublings < size <= base * 2**doublings


def test_latents_scatter_around_class_means() -> None:
    latents = class_latents(40, 50, (30,), 0.5, 0.2, as_generator(0)).view(40, 50, 30)
    means = latents.mean(1)
    assert float(means.std()) == pytest.approx(0.5, rel=0.1)
    assert float((latents - means[:, None]).std()) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("size", "channels"), [(8, 3), (14, 1), (13, 5)])
def test_noise_is_scaled_and_standardised(name: str, size: int, channels: int, global_rng_untouched: None) -> None:
    made = MAKERS[name](3, 4, size, channels)
    pixels = made.normalization.decode(made.images).transpose(0, 1).flatten(1)
    assert made.images.shape == (12, channels, size, size)
    assert made.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.allclose(pixels.amin(1), torch.zeros(channels), atol=1e-5)
    assert torch.allclose(pixels.amax(1), torch.ones(channels), atol=1e-5)
    assert torch.allclose(made.images.mean((0, 2, 3)), torch.zeros(channels), atol=1e-4)
    assert torch.allclose(made.images.std((0, 2, 3), correction=0), torch.ones(channels), atol=1e-4)
    assert made.info["mean_std"] >= 0
    assert len({tuple(x.flatten().tolist()) for x in made.images}) == 12


@pytest.mark.parametrize("name", MAKERS)
def test_the_measured_normalization_of_noise_is_public(name: str) -> None:
    """A guarantee may treat these statistics as public (docs/privacy_guide.md, 3): they use no record."""
    refuse_measured_normalization(MAKERS[name](2, 3, 8).normalization)


CHANGES: dict[str, dict[str, Any]] = {
    "stylegan": {"latent": 8, "width": 9, "mean_std": 2.0, "sample_std": 1.0, "noise_gain": 1.0, "clamp": True},
    "gaussian": {"base": 4, "mean_std": 2.0, "sample_std": 1.0, "clamp": True},
    "cnn": {"latent": 8, "width": 5, "mean_std": 1.0, "sample_std": 2.0, "clamp": True},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_has_an_effect_and_is_recorded(name: str) -> None:
    plain = MAKERS[name](2, 3, 8)
    assert MAKERS[name](2, 3, 8, generator=7).info["generator"] == 7
    for option, value in CHANGES[name].items():
        other = MAKERS[name](2, 3, 8, **{option: value})
        assert not torch.equal(other.images, plain.images), option
        assert option in ("latent", "clamp") or other.info[option] == value
        assert other.info.get(option, value) == value


@pytest.mark.parametrize("shared", [False, True])
def test_images_are_those_of_one_network_for_each_class_or_for_all(shared: bool) -> None:
    draws, raw = as_generator(6), []
    latents = class_latents(3, 4, (5,), 0.7, 0.2, draws)
    for own in [latents] if shared else latents.split(4):
        network = build(lambda: NoiseDecoder(9, 2, latent=5, width=4), draws)
        with bar(2, "", progress=False) as shown:
            _decorrelate(network, own, 2, draws, shown)
        _calibrate(network, own, draws)
        raw.append(network.eval()(own).detach())
    low, high = (getattr(torch.cat(raw), bound)((0, 2, 3), keepdim=True) for bound in ("amin", "amax"))
    options: dict[str, Any] = {"latent": 5, "width": 4, "mean_std": 0.7, "sample_std": 0.2, "decorrelation_steps": 2}
    made = cnn_noise(3, 4, 9, 2, shared=shared, generator=6, **options)
    torch.testing.assert_close(made.pixels(), (torch.cat(raw) - low) / (high - low), rtol=1e-4, atol=1e-5)
    assert made.info["shared"] is shared


@pytest.mark.parametrize("name", MAKERS)
def test_equal_seeds_give_equal_bits(name: str) -> None:
    make, half = MAKERS[name], Normalization((0.5,), (0.25,))
    first, again, other = (make(2, 3, 8, generator=seed, normalization=half) for seed in (4, 4, 5))
    assert torch.equal(first.images, again.images)
    assert not torch.allclose(first.images, other.images, atol=1e-3)
    assert first.normalization == half
    if name != "gaussian":
        assert torch.allclose(make(2, 3, 8, generator=4, normalization=half, chunk=2).images, first.images, atol=1e-5)


def test_the_released_clamp_saturates_where_scaling_does_not() -> None:
    scaled, clamped = (MAKERS["stylegan"](4, 6, clamp=clamp).pixels() for clamp in (False, True))

    def saturated(pixels: Tensor) -> float:
        return float(((pixels <= 0) | (pixels >= 1)).float().mean())

    assert saturated(scaled) < 0.01
    assert saturated(clamped) > 0.3
    raw = MAKERS["gaussian"](4, 6, clamp=True).pixels()
    assert float((raw == 0).float().mean()) == pytest.approx(0.5, abs=0.1), "the clamp removes the negative half"


@pytest.mark.parametrize("options", [{}, {"base": 5}])
def test_upsampled_gaussian_is_an_affine_map_of_enlarged_noise(options: dict[str, int]) -> None:
    base = options.get("base", 8)
    small = class_latents(3, 4, (2, base, base), 1.0, 0.5, as_generator(9))
    large = F.interpolate(small, (20, 20), mode="bilinear")
    pixels = upsampled_gaussian(3, 4, 20, 2, generator=9, **options).pixels()
    for channel in range(2):
        pair = torch.stack([large[:, channel].flatten(), pixels[:, channel].flatten()])
        assert float(torch.corrcoef(pair)[0, 1]) == pytest.approx(1, abs=1e-5)


def test_active_noise_gives_each_class_a_picture() -> None:
    quiet, loud = (
        stylegan_noise(3, 5, 16, width=8, noise_gain=gain, mean_std=2.0, sample_std=0.1) for gain in (0.0, 2.0)
    )
    fine = [s.images.diff(dim=-1) for s in (quiet, loud)]
    assert float(fine[1].square().mean()) > 3 * float(fine[0].square().mean())
    means = torch.stack([fine[1][loud.labels == k].mean(0) for k in range(3)])
    assert float(means.square().mean()) > 0.9 * float(fine[1].square().mean()), (
        "the grain is the class's, not the image's"
    )


@pytest.mark.parametrize(
    ("shape", "value", "slopes"),
    [
        ((5, 3, 12, 12), 0.002048167970864996, [-1.79449797304e-06, 3.510540971918e-07, -2.047238693166e-06]),
        ((4, 1, 8, 8), 0.0005260617091649302, [-2.46528991387e-06, -2.482903400735e-06, -1.58689167702e-06]),
        ((3, 2, 6, 10), 0.0012402573355948764, [-1.10882650726e-05, -2.406274504526e-06, -1.816552613889e-06]),
    ],
)
def test_decorrelation_equals_the_released_loss(shape: tuple[int, ...], value: float, slopes: list[float]) -> None:
    """Computed by `cov_non_diag_norm` (wizard1203/VHL at c5aa7a1, loss_fn/cov_loss.py) in float64, and its gradient."""
    images = (torch.sin(1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + 0.4) + 0.3).view(shape)
    images.requires_grad_()
    got = decorrelation(images)
    got.backward()
    assert images.grad is not None
    assert got.item() == pytest.approx(value, rel=1e-12)
    assert images.grad.flatten()[[0, 17, 41]].tolist() == pytest.approx(slopes, rel=1e-10)


def test_decorrelation_steps_lower_it_and_black_images_have_none() -> None:
    plain, trained = (cnn_noise(2, 32, 8, width=4, decorrelation_steps=s, generator=0).images[:32] for s in (0, 3))
    assert not torch.allclose(plain, trained, atol=1e-3)
    black = torch.zeros(3, 1, 4, 4, requires_grad=True)
    value = decorrelation(black)
    value.backward()
    assert value.item() == 0
    assert black.grad is not None
    assert not black.grad.isnan().any()

    network, twin = (build(lambda: NoiseDecoder(8, 1, latent=4, width=4), 0) for _ in range(2))
    latents, draws = normal(100, 4), derive(5)
    with bar(2, "", progress=False) as shown:
        _decorrelate(network, latents, 2, derive(5), shown)
    for _ in range(2):
        some, parameters = torch.randint(100, (64,), generator=draws), list(twin.parameters())
        gradients = torch.autograd.grad(decorrelation(twin(latents[some])), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= 0.01 * (g + 1e-4 * p)
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-8) for p, q in zip(network.parameters(), twin.parameters()))


def test_the_noise_decoder_has_the_layers_of_the_paper() -> None:
    layers = list(NoiseDecoder().layers)
    blocks = [word for last in ("Upsample", "Upsample", "Identity", "Identity")
              for word in ("ConvTranspose2d", "BatchNorm2d", "ReLU", last)]  # fmt: skip
    end = ["Conv2d", "ReLU"] * 2 + ["Conv2d", "Tanh"]
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Unflatten", "BatchNorm2d", "ReLU", *blocks, *end]
    assert [layer.kernel_size[0] for layer in layers if hasattr(layer, "kernel_size")] == [3] * 4 + [5] * 3
    images = build(lambda: NoiseDecoder(30, 2, latent=3, width=4), 0)(normal(5, 3))
    assert images.shape == (5, 2, 30, 30)
    assert images.abs().max() <= 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: stylegan_noise(1, 2), "num_classes must be at least 2"),
        (lambda: stylegan_noise(2, 2, sample_std=0.0), "sample_std"),
        (lambda: stylegan_noise(2, 0), "per_class must be at least 1"),
        (lambda: stylegan_noise(2, 2, mean_std=-1.0), "mean_std must be at least 0"),
        (lambda: stylegan_noise(2, 2, noise_gain=-1.0), "noise_gain must be at least 0"),
        (lambda: upsampled_gaussian(2, 2, base=0), "base must be at least 1"),
        (lambda: stylegan_noise(2, 2, 3), "size must be at least 4"),
        (lambda: stylegan_noise(2, 2, width=3), "width"),
        (lambda: cnn_noise(2, 2, shared=True), "mean_std must be greater than 0 with shared=True"),
    ],
)
def test_invalid_options_are_named(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("count", [40, 300])
def test_batch_norm_has_the_statistics_of_at_most_256_latents(count: int) -> None:
    network = build(lambda: NoiseDecoder(8, 1, latent=4, width=4), 0)
    latents = torch.randn(count, 4, generator=derive(6))
    with torch.no_grad():
        _calibrate(network, latents, derive(7))
        used = latents[torch.randperm(count, generator=derive(7))[:256]]
        fixed = network.eval()(used)
        assert torch.allclose(network.train()(used), fixed, atol=2e-2)  # running variances are unbiased


def test_maps_halve_above_32_pixels() -> None:
    network = StyleGAN2(128, width=16, latent=2)
    assert [conv.weight.shape[0] for conv in network.convs] == [16, 16, 16, 16, 16, 16, 16, 8, 8, 4, 4]
    network = StyleGAN2(256, width=16, latent=2)
    assert [conv.weight.shape[0] for conv in network.convs] == [16, 16, 16, 16, 16, 16, 16, 8, 8, 4, 4, 4, 4]
