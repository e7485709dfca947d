"""Generator networks whose weights and latents `invert` optimizes in place of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.options import PositiveInt, check_options
from distillkit.generate._latents import require_latents
from distillkit.networks._factory import NetworkFactory, require_factory


@dataclass(frozen=True)
class LatentDecoder:
    """Parametrization of images by latent vectors and a generator network, for `invert(..., parametrize=...)`.

    Each batch of images gets a new generator, which is trained together with the latents. The generated pixels are
    normalized before they are passed to the teacher and the student.

    Args:
        factory: function that builds a generator, for example `lambda: SmallDecoder(shape)`. The generator maps latents
            [B, latent] to pixels [B, C, H, W] in [0, 1].
        latent: length of the latent vectors.
    """

    factory: NetworkFactory
    latent: PositiveInt = 256

    def __post_init__(self) -> None:
        check_options(self)
        require_factory(self.factory, wanted="lambda: SmallDecoder(shape)")


class SmallDecoder(nn.Module):
    """Small generator network for `invert`, which maps latents [B, latent] to pixels [B, C, H, W] in (0, 1).

    The network has a linear layer to `width` feature maps with a quarter of the final side, two upsamplings and three
    3x3 convolutions. It is the generator in FedCOG's appendix (Ye et al., ICLR 2024), which comes from data-free
    distillation (Fang et al., 2019).

    Args:
        shape: (C, H, W) of the images.
        latent: length of a latent vector.
        width: number of feature maps. The second-to-last layer has `width // 2`.

    Raises:
        TypeError, ValueError: an argument is not positive.
    """

    def __init__(self, shape: Sequence[int], latent: int = 256, width: int = 128) -> None:
        super().__init__()
        given = check.sequence(shape, "shape", "numbers (C, H, W)", 3)
        channels, height, columns = (check.positive_int(s, "shape") for s in given)
        latent = check.positive_int(latent, "latent")
        width = check.positive_int(width, "width", least=2)
        self._sizes = [(-(-height // k), -(-columns // k)) for k in (4, 2, 1)]
        h, w = self._sizes[0]
        self.start = nn.Linear(latent, width * h * w)
        self.norm = nn.BatchNorm2d(width)
        self.middle = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.LeakyReLU(0.2))
        self.end = nn.Sequential(
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, channels, 3, padding=1),
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Generate pixels [B, C, H, W] in (0, 1) from `latents` [B, latent]."""
        small, half, full = self._sizes
        require_latents(latents, self.start.in_features, "latents")
        maps = self.norm(self.start(latents).unflatten(1, (-1, *small)))
        maps = self.middle(F.interpolate(maps, half))
        return self.end(F.interpolate(maps, full)).sigmoid()
