"""Standalone dataset-distillation and privacy components for PyTorch image classification."""

from distillkit._utils.lazy_loading import lazy_submodules
from distillkit._utils.provenance import VERSION as __version__
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["LabeledImages", "Normalization", "__version__"]
__getattr__, __dir__ = lazy_submodules(
    __name__,
    ("augment", "condense", "data", "evaluate", "generate", "labels", "losses", "networks", "normalization", "plot",
     "privacy", "protocols", "rng", "robustness", "scores", "select", "serialization", "sets", "study", "training"),
    __all__,
)  # fmt: skip
