"""A pipeline's `fit` that a spawned process can import without the dependencies of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from distillkit.rng import derive

IMAGES = torch.rand(20, 1, 4, 4, generator=derive(0))


def fit(indices: Tensor, seed: int) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return a 'model': the mean of its records plus noise."""
    mean = IMAGES[indices].mean(0) + 0.01 * torch.randn(1, 4, 4, generator=derive(seed))
    return {
        "model": lambda x, y: (x * mean).flatten(1).sum(1) + y,
        "scores.both": lambda x, y: (x * mean).flatten(1)[:, :3],
    }


unfitted: list[int] = []


def unfit(indices: Tensor, seed: int) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
    """Fail after a moment."""
    unfitted.append(seed)
    time.sleep(0.05)
    raise ValueError("no shadow fits")
