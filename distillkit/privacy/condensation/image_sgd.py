"""DP-SGD on synthetic images, as in FedDM: every step adds noise to the gradient of the images."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import without_warnings
from distillkit.chunking import chunk_size
from distillkit.networks.samplers import NetworkSampler
from distillkit.privacy._public_noise import public_noise
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.privacy.condensation.condensation_options import EmbeddingNetworks
from distillkit.privacy.condensation.public_embedders import PublicEmbedder, PublicEmbedders
from distillkit.privacy.condensation.separable import SeparableLoss, require_separable, squared_distance
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._arguments import as_private_set, initial_images, open_account
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages

__all__ = ["image_gradients", "image_sgd"]


def image_gradients(
    images: Tensor,
    embed: Callable[[Tensor], Tensor],
    embedding: Tensor,
    labels: Tensor,
    *,
    loss: SeparableLoss = squared_distance,
    chunk: int = 8,
    batched: bool | None = None,
) -> Iterator[Tensor]:
    """Compute the per-example gradients of the matching loss in the synthetic images, a few examples at a time.

    `image_sgd` clips these gradients; use them for a private optimiser of your own. Example i contributes g_i, the
    gradient of l(phi(x_i), mu_y) with mu_c = mean_j phi(s_cj). All g_i of a class are vector-Jacobian products of the
    map S_c -> mu_c. The synthetic images are therefore embedded once per class, and of the real ones only the
    embeddings are needed. g_i is zero outside the class of example i.

    Args:
        images: the synthetic images s, float [K, ipc, C, H, W].
        embed: phi, which maps images to [N, F].
        embedding: phi(x_i) of n real examples, float [n, F], without a graph.
        labels: their class indices, int [n].
        loss: l, a separable loss; see `separable`.
        chunk: examples at a time.
        batched: compute the products of a chunk together (default on an accelerator) or one by one (faster on a CPU).

    Yields:
        Gradients [m, K, ipc, C, H, W] of m <= chunk examples, class by class, not in the order of `labels`.
    """
    batched = images.device.type != "cpu" if batched is None else batched
    for c in labels.unique().tolist():
        own = embedding[labels == c]
        leaf = images[c].detach().requires_grad_()
        with torch.enable_grad():
            mean = embed(leaf).mean(0)
            rows = mean.detach().expand_as(own).clone().requires_grad_()
            cotangents = torch.autograd.grad(loss(own, rows).sum(), rows)[0]
        for some in cotangents.split(chunk):
            grads = images.new_zeros((len(some), *images.shape))
            if batched:
                grads[:, c] = torch.autograd.grad(mean, leaf, some, retain_graph=True, is_grads_batched=True)[0]
            else:
                for i, one in enumerate(some):
                    grads[i, c] = torch.autograd.grad(mean, leaf, one, retain_graph=True)[0]
            yield grads


def image_sgd(
    images: Tensor | LabeledImages,
    labels: Tensor | None = None,
    *,
    size: int,
    epsilon: float | None = None,
    sigma: float | None = None,
    delta: float = 1e-5,
    num_classes: int | None = None,
    ipc: int = 10,
    networks: NetworkSampler | EmbeddingNetworks | None = None,
    loss: SeparableLoss = squared_distance,
    clip: float | None = None,
    rate: float = 0.05,
    steps: int = 100,
    lr: float = 0.1,
    momentum: float = 0.5,
    init: str | LabeledImages = "noise",
    ledger: Ledger | Account | None = None,
    generator: int | torch.Generator = 0,
    progress: bool = True,
    callback: Callable[[int, Tensor], None] | None = None,
) -> LabeledImages:
    """Condense a private set to one that may be published, by DP-SGD on the synthetic images (FedDM, section 3.3).

    Prefer `condense_private` unless you study FedDM: it is cheaper and was more accurate at the same epsilon. Every
    step draws records by Poisson sampling over the *whole* set, clips the gradient that each record has in the images
    of all classes, sums, and adds noise to every pixel of every class, also of classes without records.

    Paper: Xiong et al., "FedDM" (CVPR 2023), section 3.3, Eq. 8 and Eq. 16. Deviations, all needed for the guarantee:
    the paper samples 256 records *per class*, at a rate (one half or more for 500 records per class) that is ten times
    the accounted one; it divides by the number of records drawn; it sends only classes that exist. Its noise scale
    (Theorem 3.2) is not sound outside q < 1 / (16 sigma) and covers one round: here an accountant computes epsilon.

    Args:
        images, labels, num_classes, ipc, init, ledger, generator, progress: see `condense_private`.
        size: the public number of records, which scales the mean gradient and which delta is compared with; not the
            private `len(images)`.
        epsilon: for all steps of this call; sigma follows from it. Or give `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, which the ledger records as no guarantee.
        delta: below 1 / size, and equal to that of a given ledger.
        networks: see `condense_private`. `match` defaults to `"embedding+logits"` (Eq. 8). The sampler may be
            `NetworkBall(network, rho)` around weights that are public or were released under this ledger.
        loss: between a real example and the synthetic mean of its class; separable, see `separable`.
        clip: the largest l2 norm of one record's gradient. Default: the median norm on public smooth noise, which costs
            no privacy.
        rate: the probability with which a record takes part in a step (sample rate).
        steps, lr, momentum: of SGD. All steps are charged before the first. Use a smaller lr than for distribution
            matching without noise.
        callback: `callback(step, gradient)` receives every released gradient [K, ipc, C, H, W].

    Returns:
        As `condense_private`.

    Raises:
        PrivacyError: as `condense_private`, and NotSeparable for a loss that is not a sum over examples.
        TypeError, ValueError: invalid images, labels or options.
    """
    loss = require_separable(loss)
    check.positive_int(size, "size")
    check.positive_int(steps, "steps")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    check.real_number(lr, "lr", above=0.0)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    sigma = resolve_sigma(epsilon, sigma, delta=delta, count=steps, rate=rate)
    real = as_private_set(images, labels, num_classes=num_classes, delta=delta, size=size)
    check.boolean(progress, "progress")
    embedding_options = EmbeddingNetworks.of(networks)
    augment, match = embedding_options.augment, embedding_options.match or "embedding+logits"
    chunk = chunk_size(real.images, embedding_options.chunk)
    if callback is not None:
        check.callable_with(callback, "callback", ["step", "gradient"], "a function of both")
    account = open_account(ledger, delta)
    secret = account.secret
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    start, init_name = initial_images(init, real, ipc=ipc, generator=derive(seed, "start"))
    synthetic = start.unflatten(0, (real.num_classes, ipc)).requires_grad_()
    sampler = embedding_options.sampler_for(real)
    embedders = PublicEmbedders(sampler, steps, like=real, match=match, augment=augment, centers=0, seed=seed)
    if clip is None:
        clip = _public_clip(synthetic, embedders[0], loss, real, seed)

    private = PrivateGradient(
        [synthetic], sigma=sigma, clip=clip, denominator=rate * size / real.num_classes, secret=secret
    )
    account.ledger.assume("image_sgd")
    account.spend("image_sgd", sigma, rate=rate, count=steps)
    velocity = torch.zeros_like(start).view_as(synthetic)
    with bar(steps, "private image steps", progress=progress) as shown:
        for step in range(steps):
            phi = embedders[step].embedding
            rows = secret.poisson(len(real), rate).to(real.images.device)
            drawn = real.images.index_select(0, rows)
            with torch.no_grad():
                embedding = torch.cat([phi(x) for x in drawn.split(chunk)]) if len(rows) else None
            if embedding is not None:
                for grads in image_gradients(synthetic, phi, embedding, real.labels[rows], loss=loss):
                    private.add([grads])
            (gradient,) = private.take()
            if callback is not None:
                callback(step, gradient)
            velocity.mul_(momentum).add_(gradient)
            with torch.no_grad():
                synthetic.sub_(velocity, alpha=lr)
            shown.update()

    info = {"method": "image_sgd", **account.guarantee().info()}
    info |= {"sigma": sigma, "clip": clip, "rate": rate, "steps": steps, "match": match, "ipc": ipc, "init": init_name}
    classes = torch.arange(real.num_classes, device=real.labels.device).repeat_interleave(ipc)
    learned = synthetic.detach().flatten(0, 1)
    with without_warnings():  # noise may drive pixels far out of their range, and the images are right nevertheless
        return LabeledImages(
            learned, classes, num_classes=real.num_classes, normalization=real.normalization, info=info
        )


def _public_clip(images: Tensor, phi: PublicEmbedder, loss: SeparableLoss, like: LabeledImages, seed: int) -> float:
    noise = public_noise(32, like, derive(seed, "clip"))
    with torch.no_grad():
        embedding = phi.embedding(noise)
    labels = torch.arange(len(noise), device=noise.device) % images.shape[0]
    parts = image_gradients(images, phi.embedding, embedding, labels, loss=loss)
    return float(torch.cat([g.flatten(1).norm(dim=1) for g in parts]).median())
