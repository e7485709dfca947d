"""A tiny private set in float64 and networks that are cheap enough for thousands of steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages


@pytest.fixture
def toy_set() -> LabeledImages:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(12, 1, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    return LabeledImages(images, labels, num_classes=3, normalization=Normalization((0.5,), (0.25,)))


@pytest.fixture
def toy_network() -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        body = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(16, 3)).double()

    return factory
