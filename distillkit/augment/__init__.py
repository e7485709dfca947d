"""Augmentation: differentiable Siamese augmentation (DSA), and crop, flip and cutout."""

from distillkit.augment._validation import Augmentation, apply_augmentation, require_augmentation, require_normalization
from distillkit.augment.crop_flip import CropFlip, adapt_normalization
from distillkit.augment.dsa import DIGITS, DSA, NATURAL

__all__ = [
    "DIGITS",
    "DSA",
    "NATURAL",
    "Augmentation",
    "CropFlip",
    "adapt_normalization",
    "apply_augmentation",
    "require_augmentation",
    "require_normalization",
]
__dir__ = __all__.copy
