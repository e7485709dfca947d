"""Small image sets that know what they mean, and whatever else holds labelled images, as such a set."""

from distillkit.sets.conversion import Images, as_set
from distillkit.sets.labeled import LabeledImages, Labels
from distillkit.sets.stored import StoredImages

__all__ = ["Images", "LabeledImages", "Labels", "StoredImages", "as_set"]
__dir__ = __all__.copy
