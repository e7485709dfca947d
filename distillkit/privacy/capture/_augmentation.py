"""Augmentation of private images, without user code on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit.privacy.capture._captured_function import capture
from distillkit.privacy.capture._tracing import MARKER
from distillkit.privacy.capture._trusted import is_own_augmentation
from distillkit.privacy.errors import BatchStatistics

__all__ = ["captured_augmentation"]


def captured_augmentation(
    augment: Callable[..., Tensor], like: Tensor, *, siamese: bool = False
) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return an augmentation of n private images in which no user code runs on them.

    The augmentations of this package treat every image alone and are returned as they are. Any other is captured with
    one image, and its draws become inputs.

    Args:
        augment: function of (images [N, C, H, W], generator), and of `siamese` if that is requested.
        like: images of the shape, dtype and device; their values are not used.
        siamese: whether all images share one draw.

    Raises:
        BatchStatistics, NotCapturable: the augmentation is refused; the message gives the remedy.
    """
    options = {"siamese": True} if siamese else {}
    if is_own_augmentation(augment):
        return lambda images, generator: augment(images, generator, **options)
    what = f"the augmentation {getattr(augment, '__name__', type(augment).__name__)}"

    def one(shared: list[Tensor], image: Tensor) -> list[Tensor]:
        out = augment(image[None], MARKER, **options)
        if not isinstance(out, Tensor) or out.shape != (1, *image.shape):
            came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise BatchStatistics(f"{what} turns 1 image into {came}; return one image of the same shape for each")
        return [out[0]]

    captured = capture(one, [], [like], what=what)
    return lambda images, generator: captured([], images, generator=generator, common=siamese)[0]
