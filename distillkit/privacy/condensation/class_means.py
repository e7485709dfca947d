"""Noised class sums of embeddings, and images that are fitted to class means.

The module contains the three steps of `condense_private` as separate functions. `class_sums` embeds the private images,
and sums the embeddings by class. `release` adds noise to the sums. `fit_to_means` fits images to the noised class
means, which you compute from the noised sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillkit._optimizers import sgd_step
from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.chunking import chunk_size
from distillkit.privacy.accounting._ranges import check_clip, check_sigma, power_of_two
from distillkit.privacy.condensation.public_embedders import PublicEmbedders
from distillkit.privacy.errors import PrivacyError
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._arguments import refuse_half_precision
from distillkit.privacy.validation._private_records import apart_from_records, declare_records
from distillkit.sets import Tiles


@apart_from_records()
@torch.no_grad()
def class_sums(
    images: Tensor, labels: Tensor, embedders: PublicEmbedders, *, num_classes: int, chunk: int | None = None
) -> Tensor:
    """Embed the private images with every embedder, and sum the embeddings by class.

    **The result is private: pass it to `release`, and use only what `release` returns.**

    Args:
        images: the private images, float [N, C, H, W]; N may be 0.
        labels: class indices int [N] in [0, num_classes).
        embedders: public embedders. Each one maps an image x to a vector v(x) with F entries and a bounded L2 norm; see
            `PublicEmbedder`.
        num_classes: public number of classes; the sums of a class without records are zero.
        chunk: number of images per forward pass; the default depends on device and image size.

    Returns:
        Sums of v(x), float64 [embedders, classes, F]. Every number of a vector is truncated toward zero to a multiple
        of a public unit, about 2^-40 of the largest length. This lengthens no vector, and the sums are exact in any
        order while their numbers stay below 8,192 times this length. A record whose embedding is not finite, or cannot
        be computed, adds zero. No warning is given, because it would reveal something about this record.

    Raises:
        BatchStatistics, NotCapturable: an embedder is not a fixed function of one image.
    """
    num_classes = check.positive_int(num_classes, "num_classes")
    check.instance(embedders, PublicEmbedders, "embedders", "PublicEmbedders(networks, num_networks, like=...)")
    labels = check.class_labels(labels, len(images), num_classes)
    declare_records(images, labels)
    sums = []
    size, bounded = chunk_size(images, chunk), math.isfinite(embedders.sensitivity)
    unit = power_of_two(embedders.sensitivity) * 2.0**-40 if bounded else 0.0
    for k in range(len(embedders)):
        embed = embedders[k]
        total = torch.zeros(num_classes, embedders.dim, dtype=torch.float64, device=images.device)
        embed.prepare(images)  # a network is refused whether or not there are records
        for part, own in zip(images.split(size), labels.split(size)):
            if len(part):
                vectors = embed.of_private(part)
                if bounded:
                    vectors = (vectors / unit).trunc() * unit
                finite = torch.isfinite(vectors).all(1, keepdim=True)
                total.index_add_(0, own, torch.where(finite, vectors, 0.0))
        sums.append(total)
    return torch.stack(sums)


def release(sums: Tensor, *, sigma: float, sensitivity: float, ledger: Ledger | Account) -> Tensor:
    """Make class sums public by adding Gaussian noise to every entry. The ledger is charged first.

    The noise is N(0, (sigma * sensitivity)^2), also for classes without records. The noised sums are rounded to a
    public grid; `Secret` states the mechanism and its limit. You may read the result as often as
    you like. Adding noise to the same sums again is another release and is charged again: k noised copies of the same
    sums protect only as much as one copy with noise multiplier sigma / sqrt(k).

    The sums were computed with G embedders, functions that map an image to a vector. With each embedder, a record adds
    a vector of length at most `sensitivity` to the sum of one class. The call is therefore charged as G Gaussian
    releases with sample rate 1 (no subsampling).

    Args:
        sums: class sums from `class_sums`, float64 [G, K, F], for G embedders, K classes and vectors of length F.
        sigma: noise standard deviation / sensitivity of each of the G releases; see `plan_noise(count=G)`. 0 adds no
            noise, and the ledger then records that no guarantee holds.
        sensitivity: largest l2 norm that one record adds to the sums of one embedder, `embedders.sensitivity`.
        ledger: ledger that is charged before the noise is drawn; or an `Account`, which combines a ledger with the
            client, the round and the source of the noise.

    Returns:
        The noised sums, float64 [G, K, F], which may be published.

    Raises:
        BudgetExhausted, NotAccountable: the ledger refuses the charge; see `Ledger.spend`.
        PrivacyError: sigma is positive, but the sensitivity is infinite.
        ValueError: the sums do not have three dimensions or are not finite, or the sensitivity is out of range.
    """
    if check.float_tensor(sums, "sums").ndim != 3:
        raise ValueError(f"sums must have shape [embedders, classes, F], got {list(sums.shape)}")
    refuse_half_precision(sums, "sums")  # rounded sums change by more than the sensitivity
    if not bool(sums.isfinite().all()):
        raise ValueError("sums must be finite, but hold NaN or Inf; compute them with class_sums")
    sigma = check_sigma(sigma)
    sensitivity = check_clip(sensitivity, "sensitivity", infinite=True)
    if sigma and sensitivity == math.inf:
        raise PrivacyError("an unclipped sum has no bounded sensitivity; give a clip, or clip=None for unit vectors")
    account = Account.of(ledger)
    account.ledger.assume("release")
    account.spend("class_means", sigma, count=len(sums))
    return account.secret.add_noise(sums, sigma * sensitivity if sigma else 0.0)


@torch.enable_grad()
def class_means_gradient(
    images: Tensor,
    embedders: PublicEmbedders,
    k: int,
    target: Tensor,
    *,
    parametrize: Tiles | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the gradient of the distribution-matching loss with respect to the synthetic images, for one embedder.

    The loss is sum_c ||target_c - mean_j v(s_cj)||^2, where s_cj is synthetic image j of class c and v =
    `embedders[k]`. `fit_to_means` calls this function; call it yourself to use another optimizer. Only a few classes
    are in memory at once.

    Args:
        images: the synthetic images, float [classes, ipc, C, H, W].
        embedders, k: the embedders that embedded the private images, and the index of the embedder to which `target`
            belongs.
        target: noised class means, float [classes, F].
        parametrize: parametrization of the images, such as `sets.Tiles(2)`, or None. With a parametrization, `images`
            are the stored images, from which the images s are decoded.
        chunk: number of images per backward pass; the default depends on device and image size. A class is never split.

    Returns:
        Gradient with the shape of `images`.
    """
    embed, tiles = embedders[k], Tiles.require(parametrize) or Tiles(1)
    group = max(1, chunk_size(images[0], chunk) // (images.shape[1] * tiles.count))
    parts = []
    for own, want in zip(images.split(group), target.to(images).split(group)):
        leaf = own.detach().requires_grad_()
        inputs = leaf.flatten(0, 1) if parametrize is None else tiles.decode(leaf.flatten(0, 1))
        means = embed(inputs).unflatten(0, (len(own), -1)).mean(1)
        check.differentiable(means, "embedders", "their images")
        parts.append(torch.autograd.grad((want - means).square().sum(), leaf)[0])
    return torch.cat(parts)


def fit_to_means(
    start: Tensor,
    embedders: PublicEmbedders,
    targets: Tensor,
    *,
    steps: int = 300,
    lr: float = 200.0,
    momentum: float = 0.5,
    parametrize: Tiles | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Fit synthetic images so that the class means of their embeddings match the released means, for every embedder.

    The fit is post-processing, which reads no private data. You can run and repeat it for any number of steps at no
    privacy cost. The optimizer is SGD with momentum and a cosine schedule; step t uses embedder t mod G of the G
    embedders.

    Args:
        start: public initial images, float [K * ipc, C, H, W], `ipc` for each of the K classes, sorted by class.
        embedders: the G embedders that embedded the private images.
        targets: class means to match, float [G, K, F], for vectors of length F. They are the noised class sums of
            embeddings from `release`, divided by public or noised class sizes.
        steps: number of SGD steps; 0 returns `start`.
        lr: initial learning rate. The default is large because it suits embeddings that are scaled to length 1. Their
            values are small, and so are the gradients of the loss with respect to the images.
        momentum: momentum of SGD, in [0, 1).
        parametrize: parametrization of the images, such as `sets.Tiles(2)`, or None. With a parametrization, `start`
            and the result are stored images, and the images decoded from them are fitted to the means.
        chunk: number of images per backward pass; the default depends on device and image size.
        progress: whether to show a progress bar on a terminal.

    Returns:
        The fitted images, float [K * ipc, C, H, W].

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range, or the first dimension of `targets`
            differs from the number of embedders.
    """
    check.positive_int(steps, "steps", least=0)
    check.learning_rate(lr)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    check.instance(embedders, PublicEmbedders, "embedders", "PublicEmbedders(networks, num_networks, like=...)")
    check.float_tensor(start, "start", "[K * ipc, C, H, W]")
    wanted = len(embedders), embedders.dim
    check.float_tensor(targets, "targets", "[G, K, F]")
    if targets.ndim != 3 or (len(targets), targets.shape[2]) != wanted or not targets.shape[1]:
        raise ValueError(f"targets must be [{wanted[0]} embedders, classes, F={wanted[1]}], got {list(targets.shape)}")
    for name, given in (("start", start), ("targets", targets)):
        if not bool(torch.isfinite(given).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite values")
    if not len(start) or len(start) % targets.shape[1]:
        raise ValueError(f"start must hold ipc images for each of {targets.shape[1]} classes, got {len(start)} images")
    images = start.detach().clone().unflatten(0, (targets.shape[1], -1))
    velocity = torch.zeros_like(images)
    with bar(steps, "fitting private images", progress=progress) as shown:
        for step in range(steps):
            k = step % len(embedders)
            gradient = class_means_gradient(images, embedders, k, targets[k], parametrize=parametrize, chunk=chunk)
            rate = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            sgd_step([images], [gradient], [velocity], lr=rate, momentum=momentum)
            shown.update()
    return check.converged(images.flatten(0, 1), "lr")
