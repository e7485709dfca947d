"""Shared parts of the tests of FedLGD, VHL and FedCOG: plain formulas, a network, a plain local training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit import LabeledImages
from fl.message import Tensors


class Small(nn.Module):
    """Images 1x2x2 -> 3 features -> logits, with batch statistics if asked."""

    def __init__(self, outputs: int, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.classifier = nn.Linear(3, outputs)

    def features(self, images: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.body(images.flatten(1))))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def toy(count: int, seed: int, classes: int = 3, labels: Sequence[int] | None = None) -> LabeledImages:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 2, 2, generator=generator)
    y = torch.randint(classes, (count,), generator=generator) if labels is None else torch.tensor(labels)
    images[:, 0, 0, 0] += y
    return LabeledImages(images, y, num_classes=classes)


def initial_network(outputs: int, norm: bool = False, seed: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    net = Small(outputs, norm)
    state = {n: torch.randn(p.shape, generator=generator) for n, p in net.named_parameters()}
    return {n: 1 + 0.1 * t if n == "norm.weight" else t for n, t in state.items()}


def supcon(z: Tensor, labels: Tensor, temperature: float = 0.07, empty: str = "drop") -> Tensor:
    """Return Khosla et al., Eq. 2, anchor by anchor; anchors without positives are left out, or count as "zero"."""
    z = z / z.norm(dim=1, keepdim=True)
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        if positives:
            total = sum(torch.exp(z[i] @ z[a] / temperature) for a in others)
            losses.append(
                -sum(torch.log(torch.exp(z[i] @ z[p] / temperature) / total) for p in positives) / len(positives)
            )
    return sum(losses) / (len(z) if empty == "zero" else len(losses))


def trained(
    net: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int, lr: float, momentum: float = 0.0
) -> nn.Module:
    """Return a copy after the given number of SGD steps, written out."""
    net = copy.deepcopy(net).train()
    buffers = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for _ in range(steps):
        grads = torch.autograd.grad(loss(net), list(net.parameters()))
        for (name, p), g in zip(net.named_parameters(), grads):
            buffers[name] = momentum * buffers[name] + g
            p.data -= lr * buffers[name]
    return net


def averaged(nets: Sequence[nn.Module], weights: Sequence[float]) -> Tensors:
    """Return the weighted mean of parameters and float buffers, and the maximum of integer ones."""
    states = [net.state_dict() for net in nets]
    return {
        n: sum(w * s[n] for w, s in zip(weights, states)) / sum(weights)
        if t.is_floating_point()
        else max(s[n] for s in states)
        for n, t in states[0].items()
    }


def assert_close(got: Tensors, want: Tensors, atol: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(got[name], value, atol=atol), (name, got[name], value)
