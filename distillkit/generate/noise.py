"""Class-separable images from nothing: untrained generators and upsampled Gaussian noise, without any data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.generate._noise import around_class_means, as_noise_set, in_chunks
from distillkit.generate.stylegan2 import StyleGAN2
from distillkit.networks._factory import build
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages

__all__ = ["stylegan_noise", "upsampled_gaussian"]


def stylegan_noise(
    num_classes: int,
    per_class: int,
    size: int = 32,
    channels: int = 3,
    *,
    latent: int = 64,
    mean_std: float = 0.5,
    sample_std: float = 0.3,
    noise_gain: float = 0.0,
    width: int = 512,
    clamp: bool = False,
    normalization: Normalization | None = None,
    chunk: int = 16,
    device: torch.device | str = "cpu",
    generator: int | torch.Generator = 0,
    progress: bool = True,
) -> LabeledImages:
    """VHL's virtual data: images of an untrained StyleGAN2, another kind for each class, made without any data.

    Latents have another mean in each class, so that a network can learn to tell the classes apart.

    Class k has a latent mean mu_k ~ N(0, mean_std^2), its images are those of z ~ N(mu_k, sample_std^2). PixelNorm
    keeps only directions, so mean_std / sample_std alone says how far classes are apart.

    Args:
        num_classes: K.
        per_class: images of each class (VHL: 200 or 5,000; its release leaves open which).
        size: height and width, at least 4; see `StyleGAN2` for sizes that are not a power of two.
        channels: C of the images.
        latent: length of a latent vector (VHL: 64; 256 for 100 and 200 classes).
        mean_std, sample_std: as above (VHL: .5 and .3; CIFAR-100 .5 and .2; Tiny-ImageNet .5 and .15).
        noise_gain: gain of StyleGAN2's noise inputs, which an untrained network has at 0, so that in VHL's release the
            noise that it draws has no effect. Above 0, each layer adds gain * n, n ~ N(m_k, sample_std^2), with a noise
            picture m_k ~ N(0, mean_std^2) for each class.
        width: maps of the generator; the paper has 512. With 64 a set takes a fortieth of the time.
        clamp: cut the generator's output at 0 and 1 as released, which saturates most pixels. Default: it is scaled
            to [0, 1] over the whole set, each channel by its smallest and largest value.
        normalization: of the set. Default: measured on it, so that each channel has mean 0 and std 1. VHL's loader has
            mean .5 and std .25.
        chunk: images at a time, which bounds the memory; on a GPU take some hundreds.
        device: where the generator runs and the set will live.
        generator: draws everything, on the CPU.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Returns:
        The set, class by class.

    Raises:
        TypeError, ValueError: what is wrong with which argument.

    Paper: Tang et al., "Virtual homogeneity learning" (VHL, ICML 2022), appendix C.3. Deviations: scaled, not
    clamped; no JPEG between generator and set.
    """
    noise_gain = check.real_number(noise_gain, "noise_gain", least=0.0)
    chunk = check.positive_int(chunk, "chunk")
    device, latent = check.device(device), check.positive_int(latent, "latent")
    given, generator = generator, as_generator(generator)
    network = build(lambda: StyleGAN2(size, channels, latent=latent, width=width), generator).to(device)
    assert isinstance(network, StyleGAN2)

    def drawn(*shape: int) -> Tensor:
        return around_class_means(num_classes, per_class, shape, mean_std, sample_std, generator)

    latents = drawn(latent)
    maps = [drawn(1, side, side) for side in network.noise_sides] if noise_gain else []
    with bar(len(latents), "stylegan_noise", unit="image", progress=progress) as shown:
        raw = in_chunks(lambda z, *noise: network(z, noise or None, noise_gain), chunk, device, shown, latents, *maps)
    info = {
        "mean_std": mean_std,
        "sample_std": sample_std,
        "noise_gain": noise_gain,
        "width": width,
        **provenance(given),
    }
    return as_noise_set(raw, num_classes, clamp=clamp, normalization=normalization, method="stylegan_noise", **info)


def upsampled_gaussian(
    num_classes: int,
    per_class: int,
    size: int = 32,
    channels: int = 3,
    *,
    base: int = 8,
    mean_std: float = 1.0,
    sample_std: float = 0.5,
    clamp: bool = False,
    normalization: Normalization | None = None,
    device: torch.device | str = "cpu",
    generator: int | torch.Generator = 0,
) -> LabeledImages:
    """VHL's simplest virtual data: Gaussian noise around a mean picture of each class, enlarged.

    The pictures have `base` x `base` pixels and are enlarged bilinearly.

    The mean of class k is m_k ~ N(0, mean_std^2), an image is N(m_k, sample_std^2).

    Args:
        base: pixels before the enlargement (VHL: 8).
        num_classes, per_class, size, channels, mean_std, sample_std, clamp, normalization, device, generator: as
            in `stylegan_noise`.

    Returns:
        As `stylegan_noise`.

    Raises:
        TypeError, ValueError: what is wrong with which argument.

    Paper: VHL (ICML 2022), appendix C.3. Deviations: as in `stylegan_noise`; the release's clamp removes the negative
    half of the noise.
    """
    device = check.device(device)
    for name, value in (("size", size), ("channels", channels), ("base", base)):
        check.positive_int(value, name)
    shape = (channels, base, base)
    small = around_class_means(num_classes, per_class, shape, mean_std, sample_std, as_generator(generator)).to(device)
    raw = F.interpolate(small, (size, size), mode="bilinear")
    info = {"base": base, "mean_std": mean_std, "sample_std": sample_std, **provenance(generator)}
    return as_noise_set(raw, num_classes, clamp=clamp, normalization=normalization, method="upsampled_gaussian", **info)
