"""Condensation: learn or choose a small set that trains like the large one."""

from distillkit.condense.initialization import class_statistics, images_from_statistics, initial_images
from distillkit.condense.state import Progress, load_state, save_state

__all__ = [
    "Progress",
    "class_statistics",
    "images_from_statistics",
    "initial_images",
    "load_state",
    "save_state",
]
