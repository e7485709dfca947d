"""Evaluation of privacy: membership inference, gradient inversion, audits of privacy claims, and reports on runs.

The functions work on plain tensors (scores, images, logits) of any model. This package exports image metrics,
statistics of attacks, `leaks` (what a published set reveals of its training records), and `report` for a finished run.
The attacks are in `attacks.membership` and `attacks.inversion`, and the audits of differential-privacy claims in
`attacks.audit`.
"""

from typing import TYPE_CHECKING

from attacks.matching import align, match
from attacks.metrics import lpips, psnr, ssim
from attacks.statistics import Estimate, OperatingPoint, Rate, Roc, at_threshold, bonferroni, clopper_pearson, ppv, roc
from distillkit._utils.lazy_loading import lazy_submodules

if TYPE_CHECKING:
    from attacks.reporting import Leaks, Report, leaks, report

__all__ = [
    "Estimate", "Leaks", "OperatingPoint", "Rate", "Report", "Roc", "align", "at_threshold",
    "bonferroni", "clopper_pearson", "leaks", "lpips", "match", "ppv", "psnr", "report", "roc", "ssim",
]  # fmt: skip
__getattr__, __dir__ = lazy_submodules(
    __name__,
    ("audit", "inversion", "matching", "membership", "metrics", "reporting", "statistics", "transcript"),
    __all__,
    dict.fromkeys(("Leaks", "Report", "leaks", "report"), "attacks.reporting"),
)
