"""Small image sets that know what they mean, and whatever else holds labelled images, as such a set."""

from distillkit.sets.convert import Images, as_set
from distillkit.sets.labeled import LabeledImages, Labels

__all__ = ["Images", "LabeledImages", "Labels", "as_set"]
