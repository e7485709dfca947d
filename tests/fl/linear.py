"""A federation with embeddings in closed form: z = x W with four weights; z is also the logits.

A client's loss is 1/2 |x W - t|^2, mean over its few images (one batch), t one-hot. The reference is NumPy in float64;
gradients of what has no short formula are central differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distillkit import LabeledImages
from fl import FedAvg, Run, simulate

Array = Any  # numpy float64


class FourWeights(nn.Module):
    """Embedding z = x W, used as logits as well."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.w = nn.Linear(2, 2, bias=False)
        self.classifier = nn.Identity()

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.w.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images)


def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.5 * (logits - F.one_hot(labels, 2)).square().sum(1).mean()


XS = [
    np.array([[1.0, 0.5], [0.2, -0.7], [-0.4, 1.1]]),
    np.array([[0.5, 2.0], [1.3, 0.1]]),
    np.array([[1.5, 1.0], [-0.6, 0.8], [0.9, -1.2], [0.3, 0.4]]),
]
YS = [np.array([0, 1, 1]), np.array([1, 0]), np.array([0, 1, 0, 0])]
START = np.array([[0.6, -0.3], [0.2, 0.8]])


def clients() -> list[LabeledImages]:
    return [
        LabeledImages(torch.tensor(x, dtype=torch.float32).view(-1, 1, 1, 2), torch.tensor(y), num_classes=2)
        for x, y in zip(XS, YS)
    ]


def base_loss(client: int, w: Array) -> float:
    return float(0.5 * ((XS[client] @ w - np.eye(2)[YS[client]]) ** 2).sum(1).mean())


def numerical_gradient(f: Callable[[Array], float], w: Array, h: float = 1e-5) -> Array:
    """Return the gradient by central differences."""
    found = np.zeros_like(w)
    for i in np.ndindex(w.shape):
        step = np.zeros_like(w)
        step[i] = h
        found[i] = (f(w + step) - f(w - step)) / (2 * h)
    return found


def descend(f: Callable[[Array], float], w: Array, steps: int, lr: float = 0.1, momentum: float = 0.0) -> Array:
    """Run SGD on f and return the last point."""
    here, buffer = w.copy(), np.zeros_like(w)
    for _ in range(steps):
        buffer = momentum * buffer + numerical_gradient(f, here)
        here = here - lr * buffer
    return here


def average(trained: list[Array], drawn: list[int] | None = None) -> Array:
    """Return the mean weighted by sample counts."""
    counts = [len(YS[k]) for k in (drawn if drawn is not None else range(3))]
    return sum(n * w for n, w in zip(counts, trained)) / sum(counts)


def run(*addons: Any, rounds: int, how: dict[str, Any] | None = None, **options: Any) -> Run:
    """Run FedAvg with add-ons on the three clients from START, with full batches."""
    start = {"w.weight": torch.tensor(START, dtype=torch.float32)}
    chosen = {"factory": FourWeights, "objective": squares, "initial": start, "lr": 0.1, "batch": 8, **options}
    return simulate(FedAvg(*addons, **chosen), clients(), rounds=rounds, progress=False, **(how or {}))


def weights(result: Run) -> Array:
    return result.server.state[FedAvg.model]["w.weight"].double().numpy()
