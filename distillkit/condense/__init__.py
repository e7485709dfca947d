"""Condensation: learn or choose a small set that trains like the large one."""

from distillkit.condense.distribution import Augmentation, distribution_matching
from distillkit.condense.initialization import class_statistics, images_from_statistics, initial_images
from distillkit.condense.means import embedding_means, matching_gradient
from distillkit.condense.state import Progress, load_state, save_state

__all__ = [
    "Augmentation",
    "Progress",
    "class_statistics",
    "distribution_matching",
    "embedding_means",
    "images_from_statistics",
    "initial_images",
    "load_state",
    "matching_gradient",
    "save_state",
]
