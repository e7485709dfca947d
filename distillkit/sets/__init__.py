"""Small image sets that know what they mean, and whatever else holds labelled images, as such a set."""

from distillkit.sets._labeled import LabeledImages, Labels
from distillkit.sets._stored import StoredImages
from distillkit.sets.conversion import Images, as_set

__all__ = ["Images", "LabeledImages", "Labels", "StoredImages", "as_set"]
__dir__ = __all__.copy
