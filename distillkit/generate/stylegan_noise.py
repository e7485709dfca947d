"""Noise images of several classes, made without real data by an untrained StyleGAN2 or from Gaussian noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.generate._noise_set import class_latents, map_chunks, to_noise_set
from distillkit.generate.stylegan2 import StyleGAN2
from distillkit.networks._factory import build
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages


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
    """Generate VHL's virtual data: images from an untrained StyleGAN2, with a latent mean for each class.

    All clients can share this set, because it needs no real data. The classes of the set differ enough that a network
    can learn to distinguish them.

    Class k has a latent mean mu_k ~ N(0, mean_std^2), and each of its images has a latent z ~ N(mu_k, sample_std^2).
    The generator uses only the direction of a latent, so the separation of the classes depends only on the ratio
    mean_std / sample_std.

    Args:
        num_classes: number of classes K.
        per_class: number of images per class.
        size: height and width, at least 4; see `StyleGAN2` for sizes that are not a power of two.
        channels: number of channels C of the images.
        latent: length of a latent vector. VHL uses 64, or 256 for 100 and 200 classes.
        mean_std, sample_std: standard deviation of the latent means, and standard deviation of the latents around the
            mean of their class. VHL uses 0.5 and 0.3, for CIFAR-100 0.5 and 0.2, and for Tiny-ImageNet 0.5 and 0.15.
        noise_gain: factor of StyleGAN2's noise inputs: each layer adds noise_gain * n to its feature maps. The noise n
            of an image of class k is drawn from N(m_k, sample_std^2), and the mean noise m_k of the class from N(0,
            mean_std^2). The default 0 adds no noise. In an untrained StyleGAN2, such as that of VHL's authors, the
            factor is 0, too.
        width: number of feature maps of the generator network; see `StyleGAN2`. The paper uses 512.
        clamp: whether to clamp the generator's output to [0, 1], as in the authors' code. This saturates most pixels.
            By default, each channel is scaled to [0, 1] by its minimum and maximum over the whole set.
        normalization: normalization of the set. By default it is measured on the set, so that each channel has mean 0
            and std 1. VHL's loader uses mean 0.5 and std 0.25.
        chunk: number of images per forward pass; a smaller number needs less memory. Use several hundred on a GPU.
        device: device of the generator network and of the returned set.
        generator: seed or random generator for all draws, which are made on the CPU.
        progress: whether to show a progress bar.

    Returns:
        The set, sorted by class.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Paper: Tang et al., "Virtual homogeneity learning" (VHL, ICML 2022), appendix C.3. Deviations: the authors' code
    clamps pixels to [0, 1] and saves JPEG files. Here, pixels are scaled by default (see `clamp`), and no JPEG
    compression is used.
    """
    noise_gain = check.real_number(noise_gain, "noise_gain", least=0.0)
    chunk = check.positive_int(chunk, "chunk")
    device, latent = check.device(device), check.positive_int(latent, "latent")
    given, generator = generator, as_generator(generator)
    network = build(lambda: StyleGAN2(size, channels, latent=latent, width=width), generator).to(device)
    assert isinstance(network, StyleGAN2)

    def draw(*shape: int) -> Tensor:
        return class_latents(num_classes, per_class, shape, mean_std, sample_std, generator)

    latents = draw(latent)
    maps = [draw(1, side, side) for side in network.noise_sides] if noise_gain else []
    with bar(len(latents), "stylegan_noise", unit="image", progress=progress) as shown:
        raw = map_chunks(lambda z, *noise: network(z, noise or None, noise_gain), chunk, device, shown, latents, *maps)
    info = {"mean_std": mean_std, "sample_std": sample_std, "noise_gain": noise_gain, "width": width}
    info |= provenance(given)
    return to_noise_set(raw, num_classes, clamp=clamp, normalization=normalization, method="stylegan_noise", **info)


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
    """Generate VHL's simplest virtual data: upsampled Gaussian noise around a mean image for each class.

    The mean image m_k of class k is drawn from N(0, mean_std^2), and the images of the class from N(m_k, sample_std^2).
    The images are drawn with `base` x `base` pixels, and then upsampled bilinearly.

    Args:
        base: side of the images before upsampling, in pixels. VHL uses 8.
        num_classes, per_class, size, channels, mean_std, sample_std, clamp, normalization, device, generator: as
            in `stylegan_noise`.

    Returns:
        The set, sorted by class.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Paper: VHL (ICML 2022), appendix C.3. Deviations: the authors' code clamps pixels to [0, 1], which removes the
    negative half of the noise, and saves JPEG files. Here, pixels are scaled by default (see `clamp` in
    `stylegan_noise`), and no JPEG compression is used.
    """
    device = check.device(device)
    for name, value in (("size", size), ("channels", channels), ("base", base)):
        check.positive_int(value, name)
    shape = (channels, base, base)
    small = class_latents(num_classes, per_class, shape, mean_std, sample_std, as_generator(generator)).to(device)
    raw = F.interpolate(small, (size, size), mode="bilinear")
    info = {"base": base, "mean_std": mean_std, "sample_std": sample_std, **provenance(generator)}
    return to_noise_set(raw, num_classes, clamp=clamp, normalization=normalization, method="upsampled_gaussian", **info)
