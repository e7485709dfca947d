"""Standalone dataset-distillation and privacy components for PyTorch image classification."""

from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["LabeledImages", "Normalization", "__version__"]

__version__ = "0.1.0"
