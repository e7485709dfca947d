"""Augmentation: differentiable Siamese augmentation (DSA), and crop, flip and cutout."""

from distillkit.augment._validation import Augmentation, apply_augmentation, require_augmentation, require_normalization
from distillkit.augment.crop_flip import CropFlip, adapt_normalization
from distillkit.augment.dsa import DIGITS, DSA, NATURAL
from distillkit.augment.resized_crop import ResizedCrop
from distillkit.augment.shuffle_patches import ShufflePatches

__all__ = [
    "DIGITS",
    "DSA",
    "NATURAL",
    "Augmentation",
    "CropFlip",
    "ResizedCrop",
    "ShufflePatches",
    "adapt_normalization",
    "apply_augmentation",
    "require_augmentation",
    "require_normalization",
]
__dir__ = __all__.copy
