"""Striped images in three classes, and networks for them."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from distillkit.training import Protocol, train

SHAPE, CLASSES = (1, 8, 8), 3


def convnet(norm: str = "instance", dropout: float = 0.0) -> nn.Module:
    body = ConvNet(SHAPE, CLASSES, width=4, depth=1, norm=norm)
    return nn.Sequential(nn.Dropout(dropout), body) if dropout else body


def stripes(count: int = 60, seed: int = 0, noise: float = 0.5) -> LabeledImages:
    """Return images of three classes: waves along the rows, along the columns, and along both."""
    labels = torch.arange(count) % CLASSES
    wave = (torch.arange(8) % 2 * 2 - 1).float()
    kinds = torch.stack([wave.view(8, 1).expand(8, 8), wave.view(1, 8).expand(8, 8), wave.view(8, 1) * wave])
    images = kinds[labels].unsqueeze(1) + noise * torch.randn(count, *SHAPE, generator=derive(seed))
    return LabeledImages(images, labels, num_classes=CLASSES)


def trained_teacher(norm: str = "batch") -> nn.Module:
    return copy.deepcopy(_trained(norm))


@functools.cache
def _trained(norm: str) -> nn.Module:
    protocol = Protocol(epochs=10, lr=0.1, batch=20)
    return train(build(lambda: convnet(norm), 5), stripes(120, seed=9), protocol, generator=3, progress=False)


def weights(network: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in network.state_dict().values()])
