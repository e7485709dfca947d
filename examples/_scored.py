"""What the pipelines of `membership.py` share: their network, and how records are scored against what is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attacks.membership import Scorer, margin, model_scorer, nearest
from distillkit import LabeledImages
from distillkit.networks import ConvNet, build
from distillkit.training import Protocol, train

__all__ = ["Numbers", "Start", "convnet", "distances", "published", "trained"]

Start = Literal["real", "noise"]
Numbers = dict[str, Any]


def convnet(outputs: int = 10) -> ConvNet:
    """A ConvNet of two blocks for digits of 16 x 16, with 5,178 weights."""
    return ConvNet((1, 16, 16), outputs, width=16, depth=2)


def trained(data: LabeledImages, epochs: int, seed: int) -> nn.Module:
    """A network from scratch."""
    protocol = Protocol(epochs=epochs, batch=32, lr=0.05)
    return train(build(convnet, seed), data, protocol, generator=seed, progress=False)


def published(network: nn.Module, sets: Sequence[Tensor] = (), started: Tensor | None = None) -> dict[str, Scorer]:
    """How records are scored against a model, and against images that were seen one set after another.

    Args:
        network: the model; "margin" says whether it is right.
        sets: the images of each set. "nearest" compares a record with the images of one set at a time, "distance" is
            that to the closest of all, times -1.
        started: the real images that sets started from; "started" says which records these are.
    """
    found: dict[str, Scorer] = {"model": model_scorer(network), "margin": model_scorer(network, margin)}
    if sets:
        found["nearest"] = lambda x, _: torch.stack([nearest(one, x) for one in sets]).amax(0)
        found["distance"] = lambda x, _: -distances(x, torch.cat(list(sets)))
    if started is not None:
        found["started"] = lambda x, _: (distances(x, started) < 1e-4).double()  # up to rounding
    return found


def distances(records: Tensor, images: Tensor) -> Tensor:
    """How far each record is from the closest image, [n]."""
    return torch.cdist(records.flatten(1), images.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
