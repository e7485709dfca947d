"""Straightforward implementations for the benchmarks: PyTorch's own layers and whole batches.

Each function returns a step: a function without arguments that runs one step of its loop and returns the result, which
is compared with ours. Random numbers are drawn as in our implementation, so both results must agree.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.condense import initial_images
from distillkit.losses import clamped_disagreement, gradient_distance
from distillkit.networks import NetworkBall
from distillkit.rng import as_generator, derive

Step = Callable[[], Tensor]
Embed = Callable[[Tensor], Tensor]


def plain(network: Any) -> nn.Sequential:
    """Return the embedding of one of our networks with PyTorch's layers and the same parameters."""
    layers: list[nn.Module] = []
    for layer in network.body:
        if isinstance(layer, nn.GroupNorm):
            norm = nn.GroupNorm(layer.num_groups, layer.num_channels)
            norm.weight, norm.bias = layer.weight, layer.bias
            layers.append(norm)
        elif isinstance(layer, nn.ReLU):
            layers.append(nn.ReLU())
        elif isinstance(layer, nn.AvgPool2d):
            layers.append(nn.AvgPool2d(2))
        else:
            layers.append(layer)
    return nn.Sequential(*layers, nn.Flatten())


def plain_classifier(network: Any) -> nn.Sequential:
    """Return the whole network with PyTorch's layers."""
    return nn.Sequential(*plain(network), network.classifier)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all tensors as one vector, a copy."""
    return torch.cat([t.detach().flatten() for t in tensors])


# Matching.


def dm_gradient(embed: Embed, real: Sequence[Tensor], synthetic: Tensor) -> Tensor:
    """Return the gradient of distribution matching in the synthetic images: whole classes, one backward pass."""
    leaf = synthetic.clone().requires_grad_()
    loss = torch.zeros(())
    for own, fake in zip(real, leaf.split(len(leaf) // len(real)), strict=True):
        with torch.no_grad():
            target = embed(own).mean(0)
        loss = loss + (target - embed(fake).mean(0)).square().sum()
    return torch.autograd.grad(loss, leaf)[0]


def gm_gradient(network: nn.Module, real: Sequence[Tensor], synthetic: Tensor) -> Tensor:
    """Return the gradient of gradient matching in the synthetic images: whole classes, one backward pass for all."""
    parameters, leaf = list(network.parameters()), synthetic.clone().requires_grad_()
    loss, ipc = torch.zeros(()), len(synthetic) // len(real)
    for c, (own, fake) in enumerate(zip(real, leaf.split(ipc), strict=True)):
        target = torch.autograd.grad(F.cross_entropy(network(own), torch.full((len(own),), c)), parameters)
        mean = F.cross_entropy(network(fake), torch.full((ipc,), c))
        loss = loss + gradient_distance(torch.autograd.grad(mean, parameters, create_graph=True), target)
    return torch.autograd.grad(loss, leaf)[0]


def target_gradient(network: nn.Module, target: Sequence[Tensor], labels: Tensor, synthetic: Tensor) -> Tensor:
    """Return the gradient of matching to a given gradient, with all classes in one batch (FedLGD's server)."""
    parameters, leaf = list(network.parameters()), synthetic.clone().requires_grad_()
    loss = F.cross_entropy(network(leaf), labels)
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(gradient_distance(found, target), leaf)[0]


def descent(start: Tensor, gradient: Callable[[Tensor], Tensor], lr: float, momentum: float = 0.5) -> Step:
    """SGD with momentum on images; a step returns their change."""
    images, velocity = start.clone(), torch.zeros_like(start)

    def step() -> Tensor:
        velocity.mul_(momentum).add_(gradient(images))
        images.sub_(velocity, alpha=lr)
        return images - start

    return step


def inversion(teacher: nn.Module, student: nn.Module, targets: Tensor, shape: Sequence[int], steps: int) -> Step:
    """Adam on a batch of images that the teacher classifies as their targets and the student does not (FedCOG)."""

    def step() -> Tensor:
        images = torch.randn(len(targets), *shape, generator=as_generator(0)).requires_grad_()
        adam, best = torch.optim.Adam([images], lr=0.01, betas=(0.5, 0.9)), images.detach().clone()
        least = torch.full((len(images),), torch.inf)
        for number in range(steps + 1):
            logits = teacher(images)
            apart = clamped_disagreement(student(images), logits, reduction="none")
            losses = F.cross_entropy(logits, targets, reduction="none") + 0.1 * (1 - apart)
            better = losses.detach() < least
            best[better], least[better] = images.detach()[better], losses.detach()[better]
            if number < steps:
                adam.zero_grad()
                losses.sum().backward()
                adam.step()
        with torch.no_grad():
            teacher(best)
        return best

    return step


# Federated rounds.


def fedavg(
    model: nn.Module, clients: Sequence[LabeledImages], *, lr: float, batch: int, pool: ThreadPoolExecutor
) -> Step:
    """Round of averaging: copy, loop, SGD, average; a step returns the change of the weights."""
    begun, number = flat(list(model.parameters())), 0

    def train(client: int) -> dict[str, Tensor]:
        net, data = copy.deepcopy(model).train(), clients[client]
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, foreach=False)
        for index in torch.randperm(len(data), generator=derive(0, number, client, "batches0")).split(batch):
            loss = F.cross_entropy(net(data.images.index_select(0, index)), data.labels.index_select(0, index))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net.state_dict()

    def step() -> Tensor:
        nonlocal number
        number += 1
        states = list(pool.map(train, range(len(clients))))
        model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
        return flat(list(model.parameters())) - begun

    return step


def feddm(
    model: Any, clients: Sequence[LabeledImages], *, ipc: int, steps: int, rho: float, epochs: int, batch: int,
    pool: ThreadPoolExecutor,
) -> Step:  # fmt: skip
    """Round of FedDM: clients match embeddings and logits in the ball; the server trains on the union in it."""
    begun, number = flat(list(model.parameters())), 0

    def condense(client: int) -> tuple[Tensor, Tensor]:
        data = clients[client]
        seed = int(torch.randint(2**62, (), generator=derive(0, number, client, "images")))
        ball = NetworkBall(model, rho)
        network: Any = ball.draw(derive(0))
        features, classifier = plain(network), network.classifier
        real = [data.images[data.labels == c] for c in range(data.num_classes)]
        start = initial_images(data, ipc, init="real", generator=derive(seed, "init"))
        drawn = iter(range(steps))

        def gradient(images: Tensor) -> Tensor:
            ball.draw(derive(seed, next(drawn), "network"))

            def embed(images: Tensor) -> Tensor:
                embedding = features(images)
                return torch.cat([embedding, classifier(embedding)], 1)

            return dm_gradient(embed, real, images)

        step = descent(start.images, gradient, 1.0)
        moved = [step() for _ in range(steps)]
        return start.images + moved[-1], start.labels

    def step() -> Tensor:
        nonlocal number
        number += 1
        made = list(pool.map(condense, range(len(clients))))
        images, labels = (torch.cat(parts) for parts in zip(*made))
        net = nn.Sequential(plain(model), model.classifier).train()
        parameters = list(net.parameters())
        center = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
        generator = derive(0, number, "server", "train")
        for _ in range(epochs):
            for index in torch.randperm(len(images), generator=generator).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(net(images[index]), labels[index]).backward()
                optimizer.step()
                with torch.no_grad():
                    distance = torch.stack([(p - c).square().sum() for p, c in zip(parameters, center)]).sum().sqrt()
                    for p, c in zip(parameters, center) if distance > rho else ():
                        p.copy_(c + (p - c) * (rho / distance))
        return flat(parameters) - begun

    return step


# Private steps.


def private_images(
    embed: Embed, images: Tensor, real: Tensor, labels: Tensor, *, clip: float
) -> Callable[[float], Tensor]:
    """FedDM's private step: one forward and backward pass per record, clipped over all classes, summed, with noise."""
    noise = torch.Generator().manual_seed(0)

    def step(sigma: float) -> Tensor:
        total = torch.zeros_like(images)
        with torch.no_grad():
            embedding = embed(real)
        for own, c in zip(embedding, labels.tolist()):
            leaf = images[c].clone().requires_grad_()
            (gradient,) = torch.autograd.grad((own - embed(leaf).mean(0)).square().sum(), leaf)
            total[c] += gradient * (clip / gradient.norm().clamp_min(clip))
        return (total + sigma * clip * torch.randn(total.shape, generator=noise)) / len(real)

    return step


def means_gradient(embed: Embed, center: Tensor, target: Tensor, images: Tensor) -> Tensor:
    """Return the gradient that moves the means of unit vectors of images [K, ipc, ...] to a target, in one batch."""
    leaf = images.clone().requires_grad_()
    vectors = embed(leaf.flatten(0, 1)) - center
    means = (vectors / vectors.norm(dim=1, keepdim=True)).unflatten(0, images.shape[:2]).mean(1)
    return torch.autograd.grad((target - means).square().sum(), leaf)[0]


def opacus(network: nn.Module, images: Tensor, labels: Tensor) -> Callable[[float], Tensor]:
    """DP-SGD step by Opacus alone, up to the optimizer step: the noisy mean of clipped gradients."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(network.train())
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        expected_batch_size=len(images), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip

    def step(sigma: float) -> Tensor:
        optimizer.noise_multiplier = sigma
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            F.cross_entropy(module(images), labels).backward()
        optimizer.pre_step()
        return flat([p.grad for p in module.parameters() if p.grad is not None])

    return step
