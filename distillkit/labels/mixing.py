"""CutMix and Mixup, which mix each image of a batch with another image of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, Fraction, Positive
from distillkit.rng import as_generator


class Mixed(NamedTuple):
    """Result of mixing each image of a batch with another image of the batch, its partner.

    Attributes:
        images: mixed images, float [N, C, H, W].
        partner: index in the batch of the partner of each image, int64 [N].
        share: share of a mixed image that comes from the original image, in [0, 1]. The rest comes from the partner.
    """

    images: Tensor
    partner: Tensor
    share: float


@dataclass(frozen=True)
class CutMix(CheckedOptions):
    """CutMix: replacement of a box in every image by the same box of another image of the batch.

    Pass it as `mix=` to `Relabel` or `Protocol`, or call it: `CutMix()(images, generator)`.

    One box is drawn for the whole batch. The share of the area that an image keeps is drawn from Beta(alpha, alpha),
    and the center of the box is uniform. The box is clipped at the border, so an image may keep more than the drawn
    share. A call returns the share that it actually keeps.

    Paper: Yun et al., "CutMix" (ICCV 2019), section 3.1. As in the code of SRe2L, RDED and IDC, height and width of the
    box are rounded down, and the box extends from `center - side // 2` to `center + side // 2`.

    Args:
        alpha: parameter of the beta distribution. With 1, the share is uniform in [0, 1]; all
            `distillkit.protocols.PROTOCOLS` with CutMix use 1.
        probability: probability that a batch is mixed. IDC uses 0.5.
    """

    alpha: Positive = 1.0
    probability: Fraction = 1.0

    def __call__(self, images: Tensor, generator: int | torch.Generator) -> Mixed:
        """Mix each image of a batch with another image of the batch, its partner.

        Args:
            images: float [N, C, H, W].
            generator: int seed, or generator for all random draws. The number of draws does not depend on the pixel
                values.

        Returns:
            The mixed images, the indices of their partners, and the share that each image keeps; see `Mixed`.
        """
        kept, partner = _draw(images, generator := as_generator(generator), self.alpha, self.probability)
        h, w = images.shape[2:]
        reach = [int(side * math.sqrt(1 - kept)) // 2 for side in (h, w)]
        center = [int(torch.randint(side, (), generator=generator)) for side in (h, w)]
        (top, bottom), (left, right) = (
            (max(0, at - half), min(side, at + half)) for at, half, side in zip(center, reach, (h, w), strict=True)
        )
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images[
            partner.to(images.device, non_blocking=True), :, top:bottom, left:right
        ]
        return Mixed(mixed, partner, 1 - (bottom - top) * (right - left) / (h * w))


@dataclass(frozen=True)
class Mixup(CheckedOptions):
    """Mixup: weighted average of every image with another image of the batch.

    Pass it as `mix=` to `Relabel` or `Protocol`, or call it: `Mixup()(images, generator)`.

    The weight of the image itself is drawn from Beta(alpha, alpha), once for the whole batch.

    Paper: Zhang et al., "mixup" (ICLR 2018), section 2.

    Args:
        alpha: parameter of the beta distribution. The code of SRe2L and RDED uses 0.8.
        probability: probability that a batch is mixed.
    """

    alpha: Positive = 0.8
    probability: Fraction = 1.0

    def __call__(self, images: Tensor, generator: int | torch.Generator) -> Mixed:
        """Mix each image of a batch with another image of the batch, its partner.

        Args:
            images: float [N, C, H, W].
            generator: int seed, or generator for all random draws. The number of draws does not depend on the pixel
                values.

        Returns:
            The mixed images, the indices of their partners, and the share that each image keeps; see `Mixed`.
        """
        kept, partner = _draw(images, as_generator(generator), self.alpha, self.probability)
        return Mixed(torch.lerp(images[partner.to(images.device, non_blocking=True)], images, kept), partner, kept)


def _draw(images: Tensor, generator: torch.Generator, alpha: float, probability: float) -> tuple[float, Tensor]:
    """Draw the share of a mixed image that comes from the original image, and the partner of each image, int64 [N].

    The share is 1 with probability 1 - `probability`; the batch is then not mixed.
    """
    check.batch_of_images(images, values=False)
    a, b = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=generator).tolist()
    partner = torch.randperm(len(images), generator=generator)
    mixed = float(torch.rand((), generator=generator, dtype=torch.float64)) < probability
    return (a / (a + b) if mixed else 1.0), partner
