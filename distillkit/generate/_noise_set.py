"""Helpers for sets of noise images: sampling of latents, computation in chunks, and conversion to a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import Bar
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages


def class_latents(
    num_classes: int, per_class: int, shape: tuple[int, ...], mean_std: float, sample_std: float, rng: torch.Generator
) -> Tensor:
    """Sample `per_class` latents for each class, and return them sorted by class, float [K * per_class, *shape].

    For each class, a mean is drawn from N(0, mean_std^2). The latents of the class are drawn from N(mean,
    sample_std^2).

    Raises:
        TypeError, ValueError: `num_classes` is less than 2, `per_class` is less than 1, `mean_std` is negative, or
            `sample_std` is not positive.
    """
    num_classes = check.positive_int(num_classes, "num_classes", least=2)
    per_class = check.positive_int(per_class, "per_class")
    mean_std = check.real_number(mean_std, "mean_std", least=0.0)
    sample_std = check.real_number(sample_std, "sample_std", above=0.0)
    means = mean_std * torch.randn(num_classes, *shape, generator=rng)
    samples = sample_std * torch.randn(num_classes * per_class, *shape, generator=rng)
    return means.repeat_interleave(per_class, 0).add_(samples)


@torch.no_grad()
def map_chunks(
    function: Callable[..., Tensor], chunk: int, device: torch.device | str, shown: Bar, *inputs: Tensor
) -> Tensor:
    """Apply a function to tensors in chunks of rows, and return the concatenated results.

    Args:
        function: function of as many tensors as there are `inputs`.
        chunk: number of rows per call.
        device: device to which each chunk is moved.
        shown: progress bar, which is advanced by the number of rows.
        inputs: tensors with the same number of rows.
    """
    outputs = []
    for piece in zip(*(i.split(chunk) for i in inputs), strict=True):
        outputs.append(function(*(p.to(device) for p in piece)))
        shown.update(len(piece[0]))
    return torch.cat(outputs)


def to_noise_set(
    raw: Tensor, num_classes: int, *, clamp: bool, normalization: Normalization | None, **info: Any
) -> LabeledImages:
    """Convert the output of a generator to a labeled set with pixels in [0, 1].

    `raw` contains n images for each of the K = `num_classes` classes. It has the shape [K * n, C, H, W] and is sorted
    by class. With `clamp`, pixels are clamped to [0, 1]. Otherwise each channel is scaled to [0, 1] by its minimum and
    maximum over the whole set. If `normalization` is None, it is measured on the resulting pixels, and marked as public
    because the images contain no private data. `info` is stored in the set.
    """
    if not check.boolean(clamp, "clamp"):
        low, high = raw.amin((0, 2, 3), keepdim=True), raw.amax((0, 2, 3), keepdim=True)
        raw = (raw - low) / torch.where(high > low, high - low, 1)
    pixels = raw.clamp(0, 1)
    labels = torch.arange(num_classes, device=raw.device).repeat_interleave(len(raw) // num_classes)
    normalization = Normalization.of(pixels, public=True) if normalization is None else normalization
    return LabeledImages.from_pixels(pixels, labels, num_classes=num_classes, normalization=normalization, info=info)
