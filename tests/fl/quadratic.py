"""A federation with gradients in closed form: two weights, a quadratic loss, clients with constant images.

A client holds copies of one image (x_0, x_1) with one label; its loss is 1/2 sum_j (x_j w_j - t_j)^2 with t the one-hot
label, so that dL/dw_j = x_j (x_j w_j - t_j) whatever the batch. A client's number of copies is its number of steps if
the batch is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distillkit import LabeledImages
from fl import FedAvg, Run, simulate

Vector = Any  # numpy float64 [2]


class TwoWeights(nn.Module):
    """Logits (x_0 w_0, x_1 w_1)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def initialize(self, generator: torch.Generator) -> None:
        """Keep the weights; the tests set them."""

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)

    def classifier(self, embedding: torch.Tensor) -> torch.Tensor:
        return embedding * self.w

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.5 * (logits - F.one_hot(labels, 2)).square().sum(1).mean()


XS = [np.array([1.0, 0.5]), np.array([0.5, 2.0]), np.array([1.5, 1.0])]
TS = [np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0])]
COUNTS = [3, 1, 5]
START = np.array([0.3, -0.2])


def gradient(client: int, w: Vector) -> Vector:
    return XS[client] * (XS[client] * w - TS[client])


def clients() -> list[LabeledImages]:
    def one(x: Vector, t: Vector, count: int) -> LabeledImages:
        image = torch.tensor(x, dtype=torch.float32).view(1, 1, 1, 2)
        return LabeledImages(image.repeat(count, 1, 1, 1), torch.full((count,), int(t.argmax())), num_classes=2)

    return [one(x, t, count) for x, t, count in zip(XS, TS, COUNTS)]


def train(client: int, w: Vector, steps: int, lr: float, momentum: float = 0.0, shift: Vector = 0.0) -> Vector:
    """Run SGD on a client's loss with a constant shift of the gradient; return the change of the weights."""
    here, buffer = w.copy(), np.zeros(2)
    for _ in range(steps):
        buffer = momentum * buffer + gradient(client, here) + shift
        here -= lr * buffer
    return here - w


def run(*addons: Any, rounds: int, participation: float | int = 1.0, **options: Any) -> Run:
    """Run FedAvg with add-ons on the three clients from START."""
    start = {"w": torch.tensor(START, dtype=torch.float32)}
    method = FedAvg(*addons, factory=TwoWeights, objective=squares, initial=start, **{"lr": 0.1, **options})
    return simulate(method, clients(), rounds=rounds, participation=participation, progress=False)


def weights(result: Run) -> Vector:
    return result.server.state[FedAvg.model]["w"].double().numpy()
