"""Augmentation of private images without running user code on the images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit.privacy.capture._captured_function import capture
from distillkit.privacy.capture._private_records import holds_fake
from distillkit.privacy.capture._tracing import MARKER
from distillkit.privacy.capture._trusted import is_own_augmentation
from distillkit.privacy.errors import BatchStatistics

__all__ = ["captured_augmentation"]


def captured_augmentation(
    augment: Callable[..., Tensor], like: Tensor, *, siamese: bool = False
) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return an augmentation that can be applied to private images without running user code on them.

    The augmentations of this package treat every image separately and are used directly. Any other augmentation is
    captured on one image, and its random draws become inputs of the captured graph.

    Args:
        augment: function of images [N, C, H, W] and a generator. It is called with `siamese=True` if `siamese` is True.
        like: image with the shape, dtype and device of a private image; its values are not used.
        siamese: whether all images share the same random draws.

    Raises:
        BatchStatistics, NotCapturable: the augmentation is refused; the message gives the remedy.
    """
    options = {"siamese": True} if siamese else {}
    if is_own_augmentation(augment):
        return lambda images, generator: augment(images, generator, **options)
    function_name = f"the augmentation {getattr(augment, '__name__', type(augment).__name__)}"

    def one(shared: list[Tensor], image: Tensor) -> list[Tensor]:
        out = augment(image[None], MARKER, **options)
        if not isinstance(out, Tensor) or out.shape != (1, *image.shape):
            came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise BatchStatistics(
                f"{function_name} turns 1 image into {came}; return one image of the same shape for each"
            )
        return [out[0]]

    captured = capture(one, [], [like], function_name=function_name)
    if kept := holds_fake(augment):
        raise BatchStatistics(
            f"{function_name} keeps a tensor of an image ({kept}), which it could use for other images; store nothing"
        )
    return lambda images, generator: captured([], images, generator=generator, common=siamese)[0]
