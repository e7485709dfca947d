"""Networks that mix examples in one way, and only under one condition; and a layer for any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAULTS = ("folds rows", "mixes examples", "draws globally", "counts the batch", "moves a buffer")
OCCASIONS = ("always", "in train mode", "in one phase", "at the drawn size")


class FaultyNetwork(nn.Module):
    """Two linear layers on 1x4x4 images, with the features/classifier split.

    Args:
        outputs: logits.
        way, occasion: what it does wrong, and when; "in one phase" is while the classifier is frozen.
        size: the batch size of "at the drawn size".
        free: with a parameter outside any layer, so that hooks cannot serve.
    """

    def __init__(
        self, outputs: int, way: str = "", occasion: str = "always", size: int = 7, free: bool = False
    ) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(16, 6), nn.Linear(6, outputs)
        self.way, self.occasion, self.size, self.seen = way, occasion, size, torch.zeros(())
        self.register_buffer("moved", torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(6)) if free else 0.0

    def initialize(self, generator: torch.Generator) -> None:
        """The layers are drawn by themselves."""

    def features(self, x: Tensor) -> Tensor:
        wrong, x = self.way if self._now(x) else "", x.flatten(1)
        if wrong == "mixes examples":
            x = x - x.mean(0)
        if wrong == "counts the batch":
            x = x * (len(x) / 3)
        if wrong == "draws globally":
            x = F.dropout(x, 0.5)
        if wrong == "moves a buffer":
            self.moved += x.detach().sum()
        if wrong == "folds rows":
            views = self.body(torch.stack([x, x.flip(1)], 1).flatten(0, 1))
            return torch.tanh(views).view(len(x), 2, -1).mean(1) + self.shift
        return torch.tanh(self.body(x)) + self.shift

    def _now(self, x: Tensor) -> bool:
        return {
            "always": True,
            "in train mode": self.training,
            "in one phase": not self.classifier.weight.requires_grad,
            "at the drawn size": len(x) == self.size,
        }[self.occasion]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Layer(nn.Module):
    """Layer that is a function of (itself, its input), with parameters, buffers (plain tensors), layers and others."""

    def __init__(self, function: Callable[[Any, Any], Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            self.register_buffer(name, value) if type(value) is Tensor else setattr(self, name, value)

    def initialize(self, generator: torch.Generator) -> None:
        """Keep what was given."""

    def forward(self, x: Any) -> Any:
        return self.function(self, x)
