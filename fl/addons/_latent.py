"""FedGen's generator of embeddings for given classes, and the classifiers that train it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from distillkit.networks import split
from fl.message import Tensors

__all__ = ["Head", "LatentGenerator", "diversity"]


class Head(nn.Module):
    """The classifier of a network as a separate module, which can be run with any client's weights.

    Attributes:
        embedding: d, the size of the classifier's input.
        names: names that the classifier's parameters have in the network.
    """

    def __init__(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.model = network.eval().requires_grad_()
        named = dict(network.named_parameters())
        with torch.no_grad():
            z = split(network).features(next(iter(named.values())).new_zeros(1, *shape))
        self.embedding = z.shape[1]
        reached = torch.autograd.grad(self(z).sum(), list(named.values()), allow_unused=True)
        self.names = [n for n, g in zip(named, reached) if g is not None]
        self.requires_grad_(False)

    def forward(self, embedding: Tensor) -> Tensor:
        """Return logits [N, K] of embeddings [N, d]."""
        return split(self.model).classifier(embedding)

    def at(self, weights: Tensors, embedding: Tensor) -> Tensor:
        """Return logits [N, K] of embeddings [N, d] for other `weights`, which have the names of the network."""
        return cast(Tensor, functional_call(self, {f"model.{n}": t for n, t in weights.items()}, (embedding,)))


class LatentGenerator(nn.Module):
    """FedGen's generator, which maps noise and a one-hot class to embeddings, with one hidden layer and batch norm."""

    def __init__(self, num_classes: int, noise: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.num_classes, self.noise = num_classes, noise
        self.body = nn.Sequential(nn.Linear(noise + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.out = nn.Linear(hidden, embedding)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return embeddings [N, d] of labels [N] and noise [N, noise]."""
        return self.out(self.body(torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise)], 1)))


def diversity(noise: Tensor, embeddings: Tensor) -> Tensor:
    """Return exp(-mean over pairs of (mean squared noise difference * mean absolute embedding difference)).

    The value lies in (0, 1].
    """
    apart = (noise[:, None] - noise).square().mean(2)
    return torch.exp(-(apart * (embeddings[:, None] - embeddings).abs().mean(2)).mean())
