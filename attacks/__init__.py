"""Evaluators that try to break privacy: who was trained on, what an image gives away, whether a claim of DP holds.

They work on plain tensors (scores, images, logits) that any model made. Here are the numbers that every report needs;
the attacks themselves are in `attacks.membership`, the audits of a differential-privacy claim in `attacks.audit`.
"""

from attacks.matching import align, match
from attacks.metrics import MissingWeights, lpips, psnr, ssim
from attacks.reporting import Report, report
from attacks.statistics import Estimate, Point, Rate, Roc, at_threshold, bonferroni, clopper_pearson, ppv, roc
from distillkit._utils.lazy_loading import lazy_submodules

__all__ = [
    "Estimate", "MissingWeights", "Point", "Rate", "Report", "Roc", "align", "at_threshold", "bonferroni",
    "clopper_pearson", "lpips", "match", "ppv", "psnr", "report", "roc", "ssim",
]  # fmt: skip
__getattr__, __dir__ = lazy_submodules(
    __name__,
    ("audit", "inversion", "matching", "membership", "metrics", "reporting", "statistics", "transcript"),
    __all__,
)
