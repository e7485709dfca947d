"""Standalone dataset-distillation and privacy components for PyTorch image classification."""

from distillkit._utils.provenance import VERSION as __version__
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["LabeledImages", "Normalization", "__version__"]
