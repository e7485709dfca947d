"""Dataset condensation: small learned or selected sets on which networks train about as well as on the full set.

A new condenser is a file here, on the base class of `_condensation.py` if it optimizes images in steps, an import
below, and an entry of the tables in `commands/condense.py`.
"""

from distillkit.condense._class_embeddings import embedding_means
from distillkit.condense._inner_training import InnerTraining, loops_for
from distillkit.condense._state import Progress, load_state, save_state
from distillkit.condense.coresets import herding, k_center, random_subset
from distillkit.condense.distribution_matching import distance_to_means, distribution_matching
from distillkit.condense.gradient_matching import gradient_matching
from distillkit.condense.initialization import class_statistics, images_from_statistics, initial_images
from distillkit.condense.stitch import stitch
from distillkit.condense.target_gradient import fit_to_gradient

__all__ = [
    "InnerTraining",
    "Progress",
    "class_statistics",
    "distance_to_means",
    "distribution_matching",
    "embedding_means",
    "fit_to_gradient",
    "gradient_matching",
    "herding",
    "images_from_statistics",
    "initial_images",
    "k_center",
    "load_state",
    "loops_for",
    "random_subset",
    "save_state",
    "stitch",
]
__dir__ = __all__.copy
