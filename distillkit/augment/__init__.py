"""Augmentation: differentiable Siamese (six families, one draw for real and synthetic images), and crop-flip-cutout."""

from distillkit.augment._validation import Augmentation, augmented, require_augmentation, require_space
from distillkit.augment.crop_flip import CropFlip, in_space
from distillkit.augment.dsa import DIGITS, DSA, NATURAL

__all__ = [
    "DIGITS",
    "DSA",
    "NATURAL",
    "Augmentation",
    "CropFlip",
    "augmented",
    "in_space",
    "require_augmentation",
    "require_space",
]
__dir__ = __all__.copy
