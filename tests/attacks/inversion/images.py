"""Images as targets of attacks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit.rng import derive

__all__ = ["pictures"]


def pictures(n: int = 2) -> Tensor:
    """Return smooth images of 1x8x8, like photographs."""
    coarse = torch.rand(n, 1, 3, 3, generator=derive(0))
    return F.interpolate(coarse, (8, 8), mode="bilinear", align_corners=True)
