"""Labeled image sets, in memory or in a file, and conversion of other data to such sets."""

from distillkit.sets._labeled import LabeledImages, Labels
from distillkit.sets._stored import StoredImages
from distillkit.sets.as_set import Images, as_set
from distillkit.sets.tiles import TiledImages, Tiles

__all__ = ["Images", "LabeledImages", "Labels", "StoredImages", "TiledImages", "Tiles", "as_set"]
__dir__ = __all__.copy
