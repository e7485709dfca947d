"""Shared parts of the pipelines: the network, and scorers of models and sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attacks.membership import Scorer, margin, model_scorer, nearest
from distillkit import LabeledImages
from distillkit.networks import ConvNet, build
from distillkit.training import Protocol, train

Start = Literal["real", "noise"]
Numbers = dict[str, Any]


def convnet(outputs: int = 10) -> ConvNet:
    """Return a ConvNet with two blocks and 5,178 weights, for digits of 16 x 16 pixels."""
    return ConvNet((1, 16, 16), outputs, width=16, depth=2)


def trained(data: LabeledImages, epochs: int, seed: int) -> nn.Module:
    """Return a network trained from scratch."""
    protocol = Protocol(epochs=epochs, batch=32, lr=0.05)
    return train(build(convnet, seed), data, protocol, generator=seed, progress=False)


def published(network: nn.Module, sets: Sequence[Tensor] = (), started: Tensor | None = None) -> dict[str, Scorer]:
    """Return scorers for a model, and for the images of one or several sets.

    Args:
        network: the model, for the scorers "model" and "margin". The sign of "margin" also shows whether the model's
            prediction is right.
        sets: images of each set. "nearest" compares a record with the images of one set at a time. "distance" is the
            negative distance to the closest image of all sets.
        started: real images from which the sets were initialized. "started" marks these records.
    """
    found: dict[str, Scorer] = {"model": model_scorer(network), "margin": model_scorer(network, margin)}
    if sets:
        found["nearest"] = lambda x, _: torch.stack([nearest(one, x) for one in sets]).amax(0)
        found["distance"] = lambda x, _: -distances(x, torch.cat(list(sets)))
    if started is not None:
        found["started"] = lambda x, _: (distances(x, started) < 1e-4).double()  # up to rounding
    return found


def distances(records: Tensor, images: Tensor) -> Tensor:
    """Return the distance from each record to the closest image, [n]."""
    return torch.cdist(records.flatten(1), images.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
