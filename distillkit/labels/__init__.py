"""Soft labels from a teacher network, either one per image or one per augmented and mixed view of an image."""

from distillkit.labels.mixing import CutMix, Mixed, Mixup
from distillkit.labels.relabel import Relabel
from distillkit.labels.soft_labels import soft_labels
from distillkit.labels.stored_labels import StoredLabels, stored_soft_labels

__all__ = ["CutMix", "Mixed", "Mixup", "Relabel", "StoredLabels", "soft_labels", "stored_soft_labels"]
__dir__ = __all__.copy
