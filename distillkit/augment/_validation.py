"""What `augment=` takes, checked before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.normalization import Normalization

__all__ = ["Augment", "Augmentation", "apply_augmentation", "require_augmentation", "require_normalization"]

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""An augmentation as the federated layer calls it, image by image; what works class by class passes `siamese=` too."""


class Augmentation(Protocol):
    """What `augment=` takes, for instance `DSA()`: anything that can be called so, a function of yours too."""

    def __call__(self, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
        """Transform a batch, with draws from `generator` alone.

        Args:
            images: float [N, C, H, W].
            generator: what all is drawn from.
            siamese: whether one draw is for the whole batch. Equal generator states must then give all N images,
                whatever N is, one transform: that is how real and synthetic images share it.

        Returns:
            Images of the same shape, dtype and device.
        """
        ...


def require_augmentation(augment: Any, normalization: Normalization | None = None, *, siamese: bool = True) -> None:
    """Check what a user gave as `augment=`, before any work is done.

    Args:
        augment: None, or what can be called as `augment(images, generator, siamese=...)`.
        normalization: of the images that it will see; None if that is not known yet.
        siamese: whether it is called with `siamese=`, as condensers and `Protocol` do; the federated layer does not.

    Raises:
        TypeError: True, a name, a class, a torchvision transform, or another function of other arguments.
        ValueError: an augmentation that was told another normalisation.
    """
    check.boolean(siamese, "siamese")
    if normalization is not None:
        Normalization.require(normalization)
    if augment is None:
        return
    call = "augment(images, generator, siamese=...)" if siamese else "augment(images, generator)"
    wanted = f"augment must be None or an augmentation such as DSA() of distillkit.augment, called as {call}"
    if isinstance(augment, type):
        raise TypeError(f"{wanted}; got the class {augment.__name__}, give {augment.__name__}(...)")
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
            f"{wanted}; {name}{signature} is called otherwise. Wrap it in a function that draws from the generator, "
            "with one draw for all images where siamese is true"
        ) from error
    if normalization is not None:
        require_normalization(augment, normalization)


def apply_augmentation(augment: Any, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
    """Call an augmentation, and refuse what it gives if that is no batch like the one that it got.

    Components call it at every step, so that an augmentation that crops or converts is found by name.

    Args:
        augment: see `Augmentation`.
        images: float [N, C, H, W].
        generator, siamese: what it is called with.

    Returns:
        The transformed images, of the same shape and dtype.

    Raises:
        TypeError, ValueError: `images` that are none, what is no augmentation, or what it gave.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        check.batch_of_images(images)
    check.boolean(siamese, "siamese")
    if not callable(augment) or isinstance(augment, type):
        require_augmentation(0 if augment is None else augment)
    seen = augment(images, generator, siamese=siamese)
    if not isinstance(seen, Tensor) or (seen.shape, seen.dtype) != (images.shape, images.dtype):
        came = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"augment must give images as it got them, {images.dtype} {list(images.shape)}, got {came}")
    return seen


def require_normalization(augment: object, normalization: Normalization) -> None:
    """Refuse an augmentation that was told another normalisation than the images have that it will see.

    `CropFlip` pads with black, which is another number in every normalised space.

    Args:
        augment: any augmentation; one that was told no normalisation fits everywhere.
        normalization: of the images.

    Raises:
        ValueError: it was told another one; the message says how to build it for these images.
    """
    told = getattr(augment, "normalization", None)
    if isinstance(told, Normalization) and told != normalization:
        name = type(augment).__name__
        raise ValueError(
            f"augment pads with the black of images with {told}, but these have {normalization}: give {name}(their own "
            "normalization)"
        )
