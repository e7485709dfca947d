"""Evaluators that try to break privacy."""

from attacks.metrics import MissingWeights, lpips, psnr, ssim
from attacks.stats import Point, Rate, Roc, at_threshold, bonferroni, clopper_pearson, ppv, roc

__all__ = [
    "MissingWeights", "Point", "Rate", "Roc", "at_threshold", "bonferroni", "clopper_pearson", "lpips", "ppv", "psnr",
    "roc", "ssim",
]  # fmt: skip
