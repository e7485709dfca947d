"""Checks for images and labels that are valid but probably not intended."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils.conversion import channels_last
from distillkit._utils.user_warnings import warn
from distillkit.normalization import Normalization


def check_images(images: Tensor, normalization: Normalization | None) -> None:
    """Refuse, or warn of, images that look like [N, H, W, C] or do not fit the stated normalization."""
    if not len(images):
        return
    if channels_last(images.shape[1:]):
        words = (
            f"images must be [N, C, H, W], but {list(images.shape)} looks like [N, H, W, C]; convert them with "
            "images.permute(0, 3, 1, 2)"
        )
        if normalization is None:
            raise ValueError(f"{words}; if they are [N, C, H, W], pass normalization=")
        warn(words)
    low, high = (float(value) for value in images.detach().aminmax())
    if normalization is None:
        _without_normalization(low, high)
    elif normalization.zca is None:
        _in_space(low, high, images, normalization)


def _without_normalization(low: float, high: float) -> None:
    if low >= 0 and high > 16:
        raise ValueError(
            f"images must be pixels in [0, 1] where no normalization is given, got {low:.4g} to {high:.4g}; divide "
            "them by their largest possible value (0..255: images / 255), or pass their "
            "normalization=Normalization(mean, std)"
        )
    if low < -0.001 or high > 1.001:
        warn(
            f"images range from {low:.4g} to {high:.4g} and no normalization is given, so they are treated as pixels "
            "in [0, 1]; pass their normalization=Normalization(mean, std)"
        )


def _in_space(low: float, high: float, images: Tensor, normalization: Normalization) -> None:
    mean, std = (images.new_tensor(values) for values in (normalization.mean, normalization.std))
    black, white = -mean / std, (1 - mean) / std
    least, most = float(black.min()), float(white.max())
    if low >= 0 and high <= 1.001 and float(black.max()) < -0.2:
        warn(
            f"images are in [0, 1], although black is {least:.4g} in the normalization given ({normalization}); "
            "normalize pixels with LabeledImages.from_pixels(pixels, labels, normalization=...)"
        )
    elif low < least - 9 * (most - least) or high > most + 9 * (most - least):
        warn(
            f"images range from {low:.4g} to {high:.4g}, but pixels in [0, 1] from {least:.4g} to {most:.4g} in the "
            f"normalization given ({normalization}); divide 0..255 by 255 first"
        )


def check_labels(labels: Tensor) -> None:
    """Warn if the smallest class index is not 0, in a set whose number of classes was derived from the labels."""
    if len(labels) and labels.ndim == 1 and (least := int(labels.min())) > 0:
        warn(
            f"labels start at {least}, so class 0 is empty; class indices start at 0: pass labels - {least}, or "
            "num_classes= if classes are absent"
        )


def check_logits(logits: Tensor, name: str, *, refuse: bool) -> None:
    """Refuse or warn of outputs that are probabilities, although logits are expected.

    Outputs of log-softmax are logits.

    Args:
        logits: outputs of a network, [N, K].
        name: name of the network in the message.
        refuse: whether to raise an error instead of a warning.

    Raises:
        ValueError: `refuse` is True, and the rows are probabilities.
    """
    if logits.shape[1] > 1 and bool((logits >= 0).all()) and bool(((logits.float().sum(1) - 1).abs() < 1e-3).all()):
        words = (
            f"{name} must return logits, but its outputs are not negative and have sum 1, as after a softmax: remove "
            "its last softmax layer, or return the logarithm of the probabilities"
        )
        if refuse:
            raise ValueError(words)
        warn(words)


def require_numbers(logits: Tensor, source: str, data: str) -> None:
    """Refuse logits that are NaN, whose largest entry is meaningless.

    Args:
        logits: logits [N, K].
        source, data: names of the network and of the set of its images in the message.

    Raises:
        ValueError: a logit is NaN.
    """
    bad = logits.isnan().any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{source} returns NaN for {int(bad.sum())} of {len(bad)} images of {data} (first: "
            f"{int(bad.nonzero()[0])}); check that its weights are finite, as they are not after a diverged training"
        )


def check_perturbed(changed: object, pixels: Tensor, name: str) -> Tensor:
    """Return perturbed images after checking their type, shape and range.

    Args:
        changed: the value that a perturbation returned.
        pixels: the images before, float [N, C, H, W] in [0, 1].
        name: name of the perturbation.

    Raises:
        ValueError: the value is no tensor of this shape and dtype, is not finite, or holds pixels in 0..255.
    """
    if not isinstance(changed, Tensor) or changed.shape != pixels.shape:
        came = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise ValueError(f"{name} must return images of shape {list(pixels.shape)}, got {came}")
    if not changed.is_floating_point():
        raise ValueError(f"{name} must return float pixels in [0, 1], got {changed.dtype}; divide by 255")
    bad = ~torch.isfinite(changed.detach().flatten(1)).all(1)
    if bool(bad.any()):
        raise ValueError(f"{name} must return finite pixels, but {int(bad.sum())} of {len(bad)} images hold NaN or Inf")
    if float(changed.detach().max()) > 16 >= float(pixels.max()):
        raise ValueError(f"{name} must return pixels in [0, 1], got up to {float(changed.detach().max()):g}")
    return changed
