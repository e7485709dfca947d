"""Image sets made without a dataset: by network inversion, from untrained generators, or as crops of one image."""

from distillkit.generate._crop import CropParameters
from distillkit.generate.cnn_noise import NoiseDecoder, cnn_noise, decorrelation
from distillkit.generate.complement import complement_targets
from distillkit.generate.decoder import LatentDecoder, SmallDecoder
from distillkit.generate.invert import invert
from distillkit.generate.patches import Patches
from distillkit.generate.separability import Separability, separability
from distillkit.generate.stylegan2 import StyleGAN2
from distillkit.generate.stylegan_noise import stylegan_noise, upsampled_gaussian

__all__ = [
    "CropParameters",
    "LatentDecoder",
    "NoiseDecoder",
    "Patches",
    "Separability",
    "SmallDecoder",
    "StyleGAN2",
    "cnn_noise",
    "complement_targets",
    "decorrelation",
    "invert",
    "separability",
    "stylegan_noise",
    "upsampled_gaussian",
]
__dir__ = __all__.copy
