"""Interface and validation of augmentations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.normalization import Normalization

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Augmentation as federated methods call it: every image gets its own transform. Condensers also pass `siamese=`, see
`Augmentation`.
"""


class Augmentation(Protocol):
    """Interface of the argument `augment`: a callable with the signature of `__call__`, such as `DSA()`."""

    def __call__(self, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
        """Transform a batch. All random numbers come from `generator`.

        Args:
            images: float [N, C, H, W].
            generator: source of all random draws.
            siamese: whether to apply the same random transform to all images of the batch. The transform must then
                depend only on the generator's state, not on N, so that a batch of real images and a batch of synthetic
                images can get the same transform.

        Returns:
            The transformed images, of the same shape, dtype and device.
        """
        ...


def require_augmentation(augment: Any, normalization: Normalization | None = None, *, siamese: bool = True) -> None:
    """Check that an argument `augment` is None or an augmentation.

    Args:
        augment: None, or a callable `augment(images, generator, siamese=...)`.
        normalization: normalization of the images; None if it is not known yet.
        siamese: whether `augment` must accept the argument `siamese`. Condensers and `Protocol` pass this argument,
            federated methods do not.

    Raises:
        TypeError: the value is not callable (for example True or a name), is a class or a torchvision transform, or
            accepts other arguments.
        ValueError: the augmentation was created for another normalization than that of the images.
    """
    check.boolean(siamese, "siamese")
    if normalization is not None:
        Normalization.require(normalization)
    if augment is None:
        return
    call = "augment(images, generator, siamese=...)" if siamese else "augment(images, generator)"
    wanted = f"augment must be None or an augmentation such as distillkit.augment.DSA(), called as {call}"
    if isinstance(augment, type):
        raise TypeError(f"{wanted}; got the class {augment.__name__}, pass {augment.__name__}(...)")
    if not callable(augment):
        raise TypeError(f"{wanted}; got {augment!r}")
    try:
        signature = inspect.signature(augment.forward if isinstance(augment, nn.Module) else augment)
        signature.bind(*(None, None), **({"siamese": True} if siamese else {}))
    except ValueError:
        pass  # a function without a signature
    except TypeError as error:
        name = getattr(augment, "__name__", type(augment).__name__)
        raise TypeError(
            f"{wanted}; {name}{signature} has other arguments. Wrap it in a function that draws from the generator, "
            "with one draw for all images if siamese is true"
        ) from error
    if normalization is not None:
        require_normalization(augment, normalization)


def apply_augmentation(augment: Any, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
    """Apply an augmentation, and check that the result has the same shape and dtype as the images.

    Condensers and training call this function in every step.

    Args:
        augment: the augmentation, a callable with the interface `Augmentation`.
        images: float [N, C, H, W].
        generator, siamese: arguments that are passed to the augmentation; see `Augmentation`.

    Returns:
        The transformed images, of the same shape and dtype.

    Raises:
        TypeError, ValueError: the images, the augmentation or its result are invalid.
    """
    check.batch_of_images(images, values=False)
    check.has_values(images, "images")
    check.boolean(siamese, "siamese")
    if not callable(augment) or isinstance(augment, type):
        require_augmentation(0 if augment is None else augment)
    before = 0 if images.is_inference() else images._version
    try:
        seen = augment(images, generator, siamese=siamese)
    except TypeError:
        require_augmentation(augment)
        raise
    except RuntimeError as error:
        if "inplace" in str(error) or "in-place" in str(error):
            raise ValueError(f"augment must not change its images in place; return new images ({error})") from error
        raise
    if before != (0 if images.is_inference() else images._version):
        raise ValueError("augment must not change its images in place; return new images")
    if not isinstance(seen, Tensor) or (seen.shape, seen.dtype) != (images.shape, images.dtype):
        came = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"augment must return {images.dtype} {list(images.shape)}, like its input, got {came}")
    return seen


def require_normalization(augment: object, normalization: Normalization) -> None:
    """Refuse an augmentation that was created for another normalization than that of the images.

    For example, `CropFlip` pads with black, whose normalized value depends on the normalization.

    Args:
        augment: any augmentation. An augmentation without a normalization is always accepted.
        normalization: normalization of the images.

    Raises:
        ValueError: the normalizations differ. The message explains how to create the augmentation for these images.
    """
    told = getattr(augment, "normalization", None)
    if isinstance(told, Normalization) and told != normalization:
        name = type(augment).__name__
        raise ValueError(
            f"augment pads with black for {told}, but the images have {normalization}: pass {name} with the images' "
            "normalization"
        )
