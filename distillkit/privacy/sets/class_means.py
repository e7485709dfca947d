"""Release noised class sums of public embeddings once; everything after that is free.

The three steps of `condense_private`, to be used one by one: `class_sums` of the private images, `release` of the sums
with noise, and `fit_to_means`, which fits images to what was released.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.chunking import chunk_size
from distillkit.privacy._clients import ALL_CLIENTS
from distillkit.privacy.errors import PrivacyError
from distillkit.privacy.events import Event
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.sets.public_embedders import PublicEmbedders

__all__ = ["class_means_gradient", "class_sums", "fit_to_means", "release"]


@torch.no_grad()
def class_sums(
    images: Tensor, labels: Tensor, maps: PublicEmbedders, *, num_classes: int, chunk: int | None = None
) -> Tensor:
    """Embed the private images and add up their vectors v(x), class by class, for every map.

    **What it returns is private: pass it to `release`, and use nothing but what that returns.**

    Args:
        images: the private images, float [N, C, H, W]; N may be 0.
        labels: class indices int [N] in [0, num_classes).
        maps: the public maps v, one after the other.
        num_classes: a public number; a class without records has zeros.
        chunk: images per forward pass; default by device and size.

    Returns:
        float64 [maps, classes, F]. A record whose embedding overflows adds zero, silently: that it does is private.
    """
    sums = []
    size = chunk_size(images, chunk)
    for k in range(len(maps)):
        embed = maps[k]
        total = torch.zeros(num_classes, maps.dim, dtype=torch.float64, device=images.device)
        for part, own in zip(images.split(size), labels.split(size)):
            if len(part):
                vectors = embed(part.contiguous(memory_format=torch.channels_last)).double()
                finite = torch.isfinite(vectors).all(1, keepdim=True)
                total.index_add_(0, own, torch.where(finite, vectors, 0.0))
        sums.append(total)
    return torch.stack(sums)


def release(
    sums: Tensor,
    *,
    sigma: float,
    sensitivity: float,
    ledger: Ledger,
    client: int | str = ALL_CLIENTS,
    round: int = 0,
    secret: Secret | int | None = None,
) -> Tensor:
    """Make class sums public: charge the ledger, then add Gaussian noise to every entry, once.

    The noise is N(0, (sigma * sensitivity)^2), for classes that nobody holds too. Keep what this returns and read it as
    often as you like. To noise the same sums again is another release and is charged again (a cache of *clean* sums
    that is noised at each of k reads has only sigma / sqrt(k)).

    A record adds a vector of length `sensitivity` at most to one class of each of G maps, so this is G Gaussian
    releases of rate 1, and their composition is exact.

    Args:
        sums: float64 [G, K, F] from `class_sums`: G maps, all K classes, vectors of length F.
        sigma: noise standard deviation / sensitivity of each of the G releases; see `plan_noise(count=G)`. 0 adds no
            noise, which the ledger records as no guarantee.
        sensitivity: `maps.sensitivity`, the most that one record adds to the sums of one map.
        ledger: charged before the noise is drawn.
        client, round: whose records these are and when, for the ledger.
        secret: where the noise comes from; see `Secret`.

    Returns:
        The noised sums, float64 [G, K, F], which may be published.

    Raises:
        BudgetExhausted, NotAccountable: see `Ledger.spend`.
        PrivacyError: noise asked for with an infinite sensitivity.
        ValueError: sums of another shape.
    """
    if sums.ndim != 3:
        raise ValueError(f"sums must be [maps, classes, F], got shape {list(sums.shape)}")
    if sigma and not math.isfinite(sensitivity):
        raise PrivacyError("an unclipped sum has no bounded sensitivity; give a clip, or clip=None for unit vectors")
    secret = as_secret(secret)
    ledger.assume("release")
    ledger.spend(Event("class_means", sigma, count=len(sums), client=client, round=round, seeded=secret.seeded))
    noise = secret.normal(sums.shape, sigma * sensitivity if sigma else 0.0)
    return sums.double() + noise.to(sums.device)


def class_means_gradient(
    images: Tensor, maps: PublicEmbedders, k: int, target: Tensor, *, chunk: int | None = None
) -> Tensor:
    """One step's gradient of distribution matching: how to change the images so that their class means meet `target`.

    The gradient in the images s of sum_c ||target_c - mean_j v(s_cj)||^2, with v the map `maps[k]`. `fit_to_means`
    calls it; call it yourself for an optimiser of your own. Only a few classes are in memory at once.

    Args:
        images: the synthetic images, float [classes, ipc, C, H, W].
        maps, k: the maps of the release, and the number of the one that `target` came from.
        target: float [classes, F], the noised class means.
        chunk: images per backward pass; default by device and size. Classes are never cut.

    Returns:
        The gradient, of the shape of `images`.
    """
    embed, ipc = maps[k], images.shape[1]
    group = max(1, chunk_size(images[0], chunk) // ipc)
    parts = []
    for own, want in zip(images.split(group), target.to(images).split(group)):
        leaf = own.detach().requires_grad_()
        means = embed(leaf.flatten(0, 1)).unflatten(0, (-1, ipc)).mean(1)
        parts.append(torch.autograd.grad((want - means).square().sum(), leaf)[0])
    return torch.cat(parts)


def fit_to_means(
    start: Tensor,
    maps: PublicEmbedders,
    targets: Tensor,
    *,
    steps: int = 300,
    lr: float = 200.0,
    momentum: float = 0.5,
    chunk: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Fit synthetic images to released class means, so that their embeddings have these means under every map.

    Post-processing: it sees no private data, so it may run for as long as wanted and be repeated. SGD with momentum and
    a cosine schedule, map t mod G at step t.

    Args:
        start: the images to begin with, float [K * ipc, C, H, W], class by class, public.
        maps: the G maps of the release.
        targets: float [G, K, F], the noised sums divided by public or noised class sizes.
        steps: of SGD; 0 gives `start` back.
        lr: at the first step; large, because unit vectors of many dimensions have small gradients.
        momentum: of SGD, in [0, 1).
        chunk: images per backward pass; default by device and size.
        progress: whether the steps show a bar where somebody watches.

    Returns:
        The fitted images, float [K * ipc, C, H, W].

    Raises:
        TypeError, ValueError: options out of range, or targets of another number of maps.
    """
    check.positive_int(steps, "steps", least=0)
    check.real_number(lr, "lr", above=0.0)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    if targets.ndim != 3 or len(targets) != len(maps):
        raise ValueError(f"targets must be [{len(maps)} maps, classes, F], got shape {list(targets.shape)}")
    images = start.detach().clone().unflatten(0, (targets.shape[1], -1))
    velocity = torch.zeros_like(images)
    with bar(steps, "fitting private images", progress=progress) as shown:
        for step in range(steps):
            k = step % len(maps)
            gradient = class_means_gradient(images, maps, k, targets[k], chunk=chunk)
            velocity.mul_(momentum).add_(gradient)
            images.sub_(velocity, alpha=lr * 0.5 * (1 + math.cos(math.pi * step / steps)))
            shown.update()
    return images.flatten(0, 1)
