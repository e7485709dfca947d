"""What `augment=` takes, checked before any work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distillkit import check
from distillkit.normalization import Normalization

__all__ = ["Augment", "Augmentation", "augmented", "require_augmentation", "require_space"]

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""An augmentation as the federated layer calls it, image by image; what works class by class passes `siamese=` too."""


class Augmentation(Protocol):
    """What `augment=` takes, for instance `DSA()`."""

    def __call__(self, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
        """Images [N, C, H, W], transformed; with `siamese`, equal generator states give all N, any N, one transform."""
        ...


def require_augmentation(augment: Any, normalization: Normalization | None = None, *, siamese: bool = True) -> None:
    """Check what `augment=` was given, before any work is done.

    Args:
        augment: None, or what can be called as `augment(images, generator, siamese=...)`.
        normalization: of the images that it will see.
        siamese: whether it is called with `siamese=`, as condensers and `Protocol` do; the federated layer does not.

    Raises:
        TypeError: True, a name, a class, a torchvision transform, or another function of other arguments.
        ValueError: an augmentation that was told another normalisation.
    """
    check.switch(siamese, "siamese")
    if normalization is not None and not isinstance(normalization, Normalization):
        raise TypeError(f"normalization must be a Normalization(mean, std), got {type(normalization).__name__}")
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
        require_space(augment, normalization)


def augmented(augment: Any, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
    """`augment(images, generator, siamese=siamese)`, which must have the images' shape and dtype.

    Raises:
        TypeError, ValueError: `images` that are none, what is no augmentation, or what it gave.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        check.batch_of_images(images)
    check.switch(siamese, "siamese")
    if not callable(augment) or isinstance(augment, type):
        require_augmentation(0 if augment is None else augment)
    seen = augment(images, generator, siamese=siamese)
    if not isinstance(seen, Tensor) or (seen.shape, seen.dtype) != (images.shape, images.dtype):
        came = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"augment must give images as it got them, {images.dtype} {list(images.shape)}, got {came}")
    return seen


def require_space(augment: object, normalization: Normalization) -> None:
    """Raise ValueError if an augmentation that was told a normalisation (`CropFlip`) will see images of another one."""
    told = getattr(augment, "normalization", None)
    if isinstance(told, Normalization) and told != normalization:
        name = type(augment).__name__
        raise ValueError(
            f"augment pads with the black of images with {told}, but these have {normalization}: give {name}(their own "
            "normalization)"
        )
