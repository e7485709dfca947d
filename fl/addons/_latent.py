"""Networks of FedGen: the generator of embeddings for given classes, and the classifier of a client as a module."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from distillkit.networks import split
from fl.message import Tensors


class Head(nn.Module):
    """Classifier of a network as a separate module, whose weights can be replaced in each call.

    Attributes:
        embedding: length d of the embeddings, which are the classifier's input.
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
        """Return the logits [N, K] of embeddings [N, d] from the classifier of the network."""
        return split(self.model).classifier(embedding)

    def at(self, weights: Tensors, embedding: Tensor) -> Tensor:
        """Return the logits [N, K] of embeddings [N, d], from the classifier with `weights` in place of its parameters.

        Args:
            weights: parameters of the classifier, by their names in the network.
            embedding: embeddings [N, d].
        """
        return cast(Tensor, functional_call(self, {f"model.{n}": t for n, t in weights.items()}, (embedding,)))


class LatentGenerator(nn.Module):
    """FedGen's generator, a network that maps a class and noise to an embedding. It has one hidden layer with batch
    norm.
    """

    def __init__(self, num_classes: int, noise: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.num_classes, self.noise = num_classes, noise
        self.body = nn.Sequential(nn.Linear(noise + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.out = nn.Linear(hidden, embedding)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return embeddings [N, d] for class indices `labels` [N] and noise vectors `noise` [N, m]."""
        return self.out(self.body(torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise)], 1)))


def diversity(noise: Tensor, embeddings: Tensor) -> Tensor:
    """Return FedGen's diversity loss, in (0, 1]. It is small if different noise leads to different embeddings.

    For the noise vectors e_i and embeddings z_i, the loss is exp(-a). Here, a is the average, over all pairs i, j, of
    mean((e_i - e_j)^2) * mean(|z_i - z_j|), where `mean` is the mean of a vector's elements.

    Args:
        noise: noise vectors [N, m].
        embeddings: the generator's embeddings [N, d] for this noise.
    """
    apart = (noise[:, None] - noise).square().mean(2)
    return torch.exp(-(apart * (embeddings[:, None] - embeddings).abs().mean(2)).mean())
