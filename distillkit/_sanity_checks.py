"""Checks for images and labels that are valid but probably not intended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils.user_warnings import warn
from distillkit.normalization import Normalization

if TYPE_CHECKING:
    from distillkit.sets import LabeledImages, StoredImages

__all__ = [
    "check_baseline", "check_class_sizes", "check_factor", "check_images", "check_labels", "check_logits",
    "check_perturbed", "check_test_images", "require_numbers",
]  # fmt: skip

_CHUNK = 1024
_SAME_PIXEL = 1.5 / 255
"""Largest difference of two pixels in [0, 1] that is taken for rounding to 8 bits."""
_CANDIDATES = 8
"""Number of images with equal summaries that are compared pixel by pixel with another image."""


def check_images(images: Tensor, normalization: Normalization | None) -> None:
    """Raise an error or a warning for images that look like [N, H, W, C], or that do not fit the stated normalization.

    Args:
        images: [N, C, H, W].
        normalization: normalization of the images as stated by the caller; None for pixels in [0, 1].

    Raises:
        ValueError: `normalization` is None, and the images look like [N, H, W, C] or are not pixels in [0, 1].
    """
    if not len(images):
        return
    _, c, h, w = images.shape
    if w in (1, 3, 4) and min(c, h) >= 8:
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
    """Warn if the smallest class index is not 0, in a set whose number of classes was derived from the labels.

    Args:
        labels: class indices [N].
    """
    if len(labels) and labels.ndim == 1 and (least := int(labels.min())) > 0:
        warn(
            f"labels start at {least}, so class 0 is empty; class indices start at 0: pass labels - {least}, or "
            "num_classes= if classes are absent"
        )


def check_class_sizes(name: str, wanted: int, counts: dict[int, int]) -> None:
    """Warn about classes that have fewer images than requested. The caller repeats the images of these classes.

    Args:
        name: name of the argument with the requested number, used in the warning.
        wanted: requested number of images per class.
        counts: number of images by class.
    """
    short = {c: n for c, n in counts.items() if n < wanted}
    if short:
        listed = ", ".join(f"{c} ({n})" for c, n in list(short.items())[:5]) + (", ..." if len(short) > 5 else "")
        warn(
            f"{name}={wanted} is more than {len(short)} of {len(counts)} classes have: {listed}; their images are "
            "repeated, see info['with_replacement']"
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


def require_numbers(logits: Tensor, network: str, data: str) -> None:
    """Refuse logits that are NaN, whose largest entry is meaningless.

    Args:
        logits: logits [N, K].
        network, data: names of the network and of the set of its images in the message.

    Raises:
        ValueError: a logit is NaN.
    """
    bad = logits.isnan().any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{network} returns NaN for {int(bad.sum())} of {len(bad)} images of {data} (first: "
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


def check_factor(info: Mapping[str, Any], augment: object, *, relabel: bool) -> None:
    """Warn of training that does not fit the number of crops in each image of a set, see `condense.stitch`.

    Args:
        info: how the set was made. If it names a method without a `factor`, images hold a single crop.
        augment: augmentation of the training.
        relabel: whether a teacher labels every view, as in RDED.
    """
    from distillkit.augment import ResizedCrop, ShufflePatches

    factor = info.get("factor", 1 if "method" in info else None)
    shuffled = augment.factor if isinstance(augment, ShufflePatches) else 1
    if not isinstance(factor, int) or factor == shuffled or (shuffled == 1 and not relabel):
        return
    crop = ResizedCrop(min_scale=1 / factor)
    advice = f"augment=ShufflePatches({factor}, augment={crop})" if factor > 1 else f"augment={crop}"
    named = {1: "PROTOCOLS['rded'], or ", 2: "PROTOCOLS['rded-factor-2'], or "}.get(factor, "")
    warn(
        f"protocol shuffles {shuffled} x {shuffled} patches, but the images of data hold {factor} x {factor} crops "
        f"(info['factor']); use {named}{advice}"
    )


def check_test_images(test: LabeledImages | StoredImages, training: Mapping[str, LabeledImages | None]) -> None:
    """Warn if test images are among training images, or if the test set seems to be the small set.

    Images are compared as pixels in [0, 1], so a new normalization, order or dtype does not hide them.

    Args:
        test: the test set.
        training: sets whose images are used for training, by name of the argument. Sets that are None are left out.
    """
    for name, data in training.items():
        if data is None or not len(data) or not len(test):
            continue
        found = int(_found(test, data).sum())
        if found:
            warn(
                f"{found} of {len(test)} images of test are also in {name}, so the accuracy is partly or wholly one on "
                "training images; pass images that were not used for training"
            )
        made = test.info.get("method")
        few = len(test) <= 10 * test.num_classes
        if name == "data" and found < len(test) < len(data) and (few or made):
            by = f", made by {made!r}," if made else ""
            warn(
                f"test has {len(test)} images{by} and data has {len(data)}: test must be the real test images, "
                "and data the small set; are the arguments swapped?"
            )


def check_baseline(data: LabeledImages, real: LabeledImages, *, relabel: bool) -> None:
    """Refuse a set of real images from which no random images can be drawn that are comparable with a small set.

    Args:
        data: the small set.
        real: the real images.
        relabel: whether a teacher labels every view, so that the labels of both sets are ignored.

    Raises:
        ValueError: the sets have different kinds of labels, `real` is smaller than `data`, or it consists of images of
            `data`.
    """
    if not relabel and data.labels.ndim != real.labels.ndim:
        soft, hard = ("data", "real") if data.labels.ndim == 2 else ("real", "data")
        raise ValueError(
            f"{soft} has soft labels and {hard} has class indices, and their accuracies must not be compared: random "
            "images need labels from the same teacher. Pass real=soft_labels(real, teacher) with the teacher of data, "
            "or data with class indices"
        )
    if len(real) < len(data):
        raise ValueError(
            f"real must be the real training images, at least as many as data has ({len(data)}), because random images "
            f"are drawn from it; got {len(real)}"
        )
    if bool(_found(real, data).all()):
        raise ValueError("real must be the real training images, but all of its images are in data: pass the whole set")
    own, other = data.counts().tolist(), real.counts().tolist()
    short = [f"{c} ({n})" for c, (n, wanted) in enumerate(zip(other, own)) if n < wanted]
    if short:
        listed = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
        warn(f"real has fewer images than data in {len(short)} classes: {listed}; random images of these repeat")


def _found(some: LabeledImages | StoredImages, among: LabeledImages) -> Tensor:
    """Return for each image of the first set whether it is in the second one, as bools [N]."""
    if some.shape != among.shape:
        return torch.zeros(len(some), dtype=torch.bool)
    rows: dict[bytes, list[int]] = defaultdict(list)
    for start, pixels in _pixels(among):
        for row, key in enumerate(_summaries(pixels), start):
            if len(rows[key]) < _CANDIDATES:
                rows[key].append(row)
    found = torch.zeros(len(some), dtype=torch.bool)
    for start, pixels in _pixels(some):
        pairs = [(i, row) for i, key in enumerate(_summaries(pixels)) for row in rows.get(key, ())]
        for part in torch.tensor(pairs, dtype=torch.int64).view(-1, 2).split(_CHUNK):
            own, other = part.unbind(1)
            images = among.images.index_select(0, other.to(among.images.device)).float()
            difference = pixels[own] - among.normalization.decode(images).cpu()
            found[start + own[difference.abs().flatten(1).amax(1) <= _SAME_PIXEL]] = True
    return found


def _pixels(data: LabeledImages | StoredImages) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of the first image and the pixels, float32 on the CPU, of consecutive parts of a set."""
    from distillkit.sets import StoredImages

    for start in range(0, len(data), _CHUNK):
        rows = slice(start, start + _CHUNK)
        images = data.read(rows).images if isinstance(data, StoredImages) else data.images[rows]
        yield start, data.normalization.decode(images.detach().float()).cpu()


def _summaries(pixels: Tensor) -> list[bytes]:
    """Return a short summary of each image, which rounding to 8 bits seldom changes: 16 block means in 64 levels."""
    means = F.adaptive_avg_pool2d(pixels.mean(1, keepdim=True), 4).flatten(1)
    levels = (64 * means).round().clamp(-128, 127).to(torch.int8)
    return [row.tobytes() for row in levels.numpy()]
