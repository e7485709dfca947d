"""Helpers for sets of synthetic noise images: class-wise latents, evaluation in chunks, and conversion to a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import Bar
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["class_latents", "map_chunks", "to_noise_set"]


def class_latents(
    num_classes: int, per_class: int, shape: tuple[int, ...], mean_std: float, sample_std: float, rng: torch.Generator
) -> Tensor:
    """Sample latents, float [K * n, *shape], in the order of the classes.

    Each class mean is drawn from N(0, mean_std^2), and the latents of the class from N(class mean, sample_std^2).

    Raises:
        TypeError, ValueError: there are fewer than 2 classes or fewer than 1 sample, `mean_std` is negative, or
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
    """Return `function(*inputs)`, computed on `device` in chunks of rows. `shown` is the progress bar to advance."""
    outputs = []
    for piece in zip(*(i.split(chunk) for i in inputs), strict=True):
        outputs.append(function(*(p.to(device) for p in piece)))
        shown.update(len(piece[0]))
    return torch.cat(outputs)


def to_noise_set(
    raw: Tensor, num_classes: int, *, clamp: bool, normalization: Normalization | None, **info: Any
) -> LabeledImages:
    """Convert raw images [K * n, C, H, W], sorted by class, to a labeled set with pixels in [0, 1].

    With `clamp`, pixels are clamped to [0, 1]. Otherwise each channel is scaled to [0, 1] by its minimum and maximum
    over the whole set. If no `normalization` is given, it is measured on these pixels. The normalization counts as
    public, because the pixels derive from no private data.
    """
    if not check.boolean(clamp, "clamp"):
        low, high = raw.amin((0, 2, 3), keepdim=True), raw.amax((0, 2, 3), keepdim=True)
        raw = (raw - low) / torch.where(high > low, high - low, 1)
    pixels = raw.clamp(0, 1)
    labels = torch.arange(num_classes, device=raw.device).repeat_interleave(len(raw) // num_classes)
    normalization = Normalization.of(pixels, public=True) if normalization is None else normalization
    return LabeledImages.from_pixels(pixels, labels, num_classes=num_classes, normalization=normalization, info=info)
