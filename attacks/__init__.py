"""Evaluators that try to break privacy."""

from attacks.metrics import MissingWeights, lpips, psnr, ssim

__all__ = ["MissingWeights", "lpips", "psnr", "ssim"]
