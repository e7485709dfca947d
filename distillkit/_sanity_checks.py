"""Images and labels that are possible and hardly meant: what is surely wrong is refused, what is odd is warned of."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from distillkit.normalization import Normalization

__all__ = ["check_class_sizes", "check_images", "check_labels", "warn", "without_warnings"]

_OURS = ("distillkit.", "fl.", "attacks.")
_silent: ContextVar[bool] = ContextVar("silent", default=False)


def warn(message: str) -> None:
    """Warn of what is odd (a `UserWarning`), at the user's own line: the first outside this project's packages.

    Args:
        message: what is odd, and the remedy.
    """
    if _silent.get():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextmanager
def without_warnings() -> Iterator[None]:
    """No such warning from this thread while the block runs: for callers that mean what they do."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def check_images(images: Tensor, normalization: Normalization | None) -> None:
    """Refuse, or warn of, images that do not look like what they are said to be.

    Args:
        images: [N, C, H, W].
        normalization: what was said of them; None if nothing was, so that they should be pixels in [0, 1].

    Raises:
        ValueError: without a stated normalisation, [N, H, W, C], or numbers that are surely not pixels in [0, 1].
    """
    if not len(images):
        return
    _, c, h, w = images.shape
    if w in (1, 3, 4) and min(c, h) >= 8:
        words = (
            f"images must be [N, C, H, W], but {list(images.shape)} looks like [N, H, W, C]; turn them with "
            "images.permute(0, 3, 1, 2)"
        )
        if normalization is None:
            raise ValueError(f"{words}; if it is [N, C, H, W] indeed, say normalization=")
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
            "them by their largest possible value (0..255: images / 255), or say how they were made: "
            "normalization=Normalization(mean, std)"
        )
    if low < -0.001 or high > 1.001:
        warn(
            f"images reach from {low:.4g} to {high:.4g} and no normalization is given, so they are taken for pixels in "
            "[0, 1]; say how they were made: normalization=Normalization(mean, std)"
        )


def _in_space(low: float, high: float, images: Tensor, normalization: Normalization) -> None:
    mean, std = (images.new_tensor(values) for values in (normalization.mean, normalization.std))
    black, white = -mean / std, (1 - mean) / std
    least, most = float(black.min()), float(white.max())
    if low >= 0 and high <= 1.001 and float(black.max()) < -0.2:
        warn(
            f"images lie in [0, 1] although black would be {least:.4g} in the normalization given ({normalization}): "
            "pixels become a set with LabeledImages.from_pixels(pixels, labels, normalization=...)"
        )
    elif low < least - 9 * (most - least) or high > most + 9 * (most - least):
        warn(
            f"images reach from {low:.4g} to {high:.4g}, but pixels in [0, 1] from {least:.4g} to {most:.4g} in the "
            f"normalization given ({normalization}); divide 0..255 by 255 first"
        )


def check_labels(labels: Tensor) -> None:
    """Warn of class indices that hardly begin at 0: K was derived from them, and none of them is 0.

    Args:
        labels: class indices [N].
    """
    if len(labels) and labels.ndim == 1 and (least := int(labels.min())) > 0:
        warn(
            f"labels start at {least}, so class 0 is empty; class indices count from 0: give labels - {least}, or say "
            "num_classes= if classes are absent"
        )


def check_class_sizes(name: str, wanted: int, counts: dict[int, int]) -> None:
    """Warn that classes have fewer images than are wanted of each, so that images repeat.

    Args:
        name: of the argument.
        wanted: images per class.
        counts: class -> images that it has.
    """
    short = {c: n for c, n in counts.items() if n < wanted}
    if short:
        listed = ", ".join(f"{c} ({n})" for c, n in list(short.items())[:5]) + (", ..." if len(short) > 5 else "")
        warn(
            f"{name}={wanted} is more than {len(short)} of {len(counts)} classes hold: {listed}; their images are "
            "repeated, see info['with_replacement']"
        )
