"""Labeled image sets, in memory or in a file, and conversion of other inputs to them."""

from distillkit.sets._labeled import LabeledImages, Labels
from distillkit.sets._stored import StoredImages
from distillkit.sets.as_set import Images, as_set

__all__ = ["Images", "LabeledImages", "Labels", "StoredImages", "as_set"]
__dir__ = __all__.copy
