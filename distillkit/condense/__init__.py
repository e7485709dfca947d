"""Condensation: learn or choose a small set that trains like the large one."""

from distillkit.condense.coresets import herding, k_center, random_subset
from distillkit.condense.distribution import distribution_matching
from distillkit.condense.gradient import gradient_matching, loops_for, match_gradient
from distillkit.condense.initialization import class_statistics, images_from_statistics, initial_images
from distillkit.condense.means import embedding_means, matching_gradient
from distillkit.condense.state import Progress, load_state, save_state

__all__ = [
    "Progress",
    "class_statistics",
    "distribution_matching",
    "embedding_means",
    "gradient_matching",
    "herding",
    "images_from_statistics",
    "initial_images",
    "k_center",
    "load_state",
    "loops_for",
    "match_gradient",
    "matching_gradient",
    "random_subset",
    "save_state",
]
