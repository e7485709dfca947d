"""DP-SGD on synthetic images, as in FedDM. Every step adds noise to the gradient with respect to the images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from distillkit._optimizers import sgd_step
from distillkit._utils import check
from distillkit._utils.conversion import require_in_memory
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import without_warnings
from distillkit.chunking import chunk_size
from distillkit.networks._base import Network
from distillkit.networks.samplers import NetworkSampler
from distillkit.privacy._public_noise import public_noise
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.privacy.capture._captured_function import capture
from distillkit.privacy.condensation.condensation_options import EmbeddingNetworks
from distillkit.privacy.condensation.public_embedders import PublicEmbedder, PublicEmbedders
from distillkit.privacy.condensation.separable import SeparableLoss, require_separable, squared_distance
from distillkit.privacy.errors import NotCapturable
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._arguments import initial_images, open_account, open_private_set, remark_start
from distillkit.privacy.validation._private_records import Untouched, active_records, apart_from_records
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages
from distillkit.sets._devices import on_device


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
    """Compute the gradient of each real image's loss with respect to the synthetic images, in chunks.

    `image_sgd` clips these gradients; you can also use them in your own private optimizer. Let phi be the embedding and
    mu_c the mean of phi over the synthetic images of class c. The loss of a real image x_i of class c is l(phi(x_i),
    mu_c), where l is the argument `loss`. Its gradient is zero for the synthetic images of all other classes. For those
    of class c, it is a vector-Jacobian product: the gradient of l with respect to mu_c, times the Jacobian of mu_c with
    respect to these images. The Jacobian does not depend on x_i, so the synthetic images are embedded only once per
    class. Of the real images, only the embeddings are used.

    Args:
        images: synthetic images, float [K, ipc, C, H, W].
        embed: function phi that maps N images to embeddings [N, F]; or a `PublicEmbedder`. The code of a function
            is traced once, and only the resulting graph of operators uses private values (see `per_example_gradients`).
        embedding: embeddings phi(x_i) of n real examples, float [n, F], without an autograd graph.
        labels: class indices of the real examples, int [n].
        loss: separable loss l; see `separable`.
        chunk: maximum number of examples per yielded tensor.
        batched: whether to compute the vector-Jacobian products of a chunk together. Default: True on an accelerator
            and False on a CPU, where computing them one by one is faster.

    Yields:
        Gradients [m, K, ipc, C, H, W] of m <= chunk examples, ordered by class and not as in `labels`.
    """
    embedder = embed if isinstance(embed, PublicEmbedder) else PublicEmbedder(cast(Network, _Function(embed)), None)
    labels = check.class_labels(labels, len(embedding), len(images))
    yield from _image_gradients(images, embedder, embedding, labels, _row_gradients(loss, embedding), chunk, batched)


def _image_gradients(
    images: Tensor,
    embedder: PublicEmbedder,
    embedding: Tensor,
    labels: Tensor,
    pull: Callable[[Tensor, Tensor], Tensor],
    chunk: int = 8,
    batched: bool | None = None,
) -> Iterator[Tensor]:
    """Compute `image_gradients` with the gradients `pull` of the loss."""
    batched = images.device.type != "cpu" if batched is None else batched
    embed_public = embedder.embedding if embedder.own else embedder.embed_private
    for c in range(len(images)):  # also classes without examples: which classes occur must not decide what fails
        own = embedding[labels == c]
        with torch.no_grad():
            mean = embed_public(images[c]).mean(0)
        cotangents, back = pull(own, mean.expand_as(own)), embedder.pull_back(images[c], batched=batched)
        for some in cotangents.split(chunk):
            grads = images.new_zeros((len(some), *images.shape))
            grads[:, c] = back(some)
            if len(some):
                yield grads


class _Function:
    """Wrapper that lets a function of images be used as a network: the function becomes its method `features`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.features = function


def _row_gradients(loss: SeparableLoss, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the gradient of each example's loss l(z, mu) with respect to mu.

    Here z is the embedding of a real example, and mu is the mean embedding of the synthetic images of its class. The
    returned function maps the rows z, float [n, F], and mu, float [n, F], of n examples to gradients [n, F].
    """
    if loss is squared_distance:
        return lambda embedding, means: 2 * (means - embedding)

    def one(shared: list[Tensor], embedding: Tensor, mean: Tensor) -> list[Tensor]:
        leaf = mean.detach().requires_grad_()
        with torch.enable_grad():
            rows = loss(embedding[None], leaf[None])
        return [torch.autograd.grad(rows, leaf)[0] if rows.requires_grad else torch.zeros_like(leaf)]

    captured = capture(
        one, [], [like, like], function_name=f"the loss {getattr(loss, '__name__', type(loss).__name__)}"
    )
    if captured.draws:
        raise NotCapturable("the loss draws random numbers; use a fixed function of embedding and mean")
    return lambda embedding, means: captured([], embedding, means)[0]


@on_device()
@apart_from_records()
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
    device: torch.device | str | None = None,
    progress: bool = True,
    callback: Callable[[int, Tensor], None] | None = None,
) -> LabeledImages:
    """Condense a private set into a set that may be published, by DP-SGD on the synthetic images.

    Prefer the cheaper `condense_private` unless you study FedDM. Every step draws records by Poisson sampling over the
    *whole* set. It clips each record's gradient with respect to the synthetic images of all classes. It sums the
    clipped gradients and adds noise to every pixel of every class, also of classes without records.

    Paper: Xiong et al., "FedDM" (CVPR 2023), section 3.3, Eq. 8 and Eq. 16. The following deviations from the paper are
    all needed for the guarantee. We draw records from the whole set. The paper draws 256 records *per class*, so a
    record of a class with 500 records takes part with probability one half. This is ten times the rate in the paper's
    accounting. We divide by the expected number of records, and the paper by the number of records drawn. We release
    all classes, and the paper only the classes that have records. We compute epsilon with an accountant. The paper's
    noise scale (Theorem 3.2) covers only one round, and is sound only for a sample rate q < 1 / (16 sigma).

    Args:
        images, labels, num_classes, ipc, init, ledger, generator, progress: see `condense_private`.
        size: public number of records, not the private `len(images)`. It scales the mean gradient. A delta
            of 1 / size or more is refused.
        epsilon: target for all steps of this call, from which sigma is computed. Give either `epsilon` or `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, and the ledger then records that no guarantee holds.
        delta: target delta, below 1 / size, and equal to the delta of a given ledger.
        networks: sampler or `EmbeddingNetworks`, as for `condense_private`. By default, embeddings and logits are
            matched (`match="embedding+logits"`, Eq. 8). The sampler may be `NetworkBall(network, rho)`, which
            draws networks at distance rho from `network`, if the weights of `network` are public or were released under
            this ledger.
        loss: separable loss between the embedding of a real example and the mean embedding of the synthetic images of
            the same class; see `separable`.
        clip: largest l2 norm of one record's gradient. Default: the median gradient norm on public smooth noise, which
            costs no privacy.
        rate: sample rate: the probability with which each record takes part in a step.
        steps, lr, momentum: number of steps, learning rate and momentum of SGD. All steps are charged before the first
            step. Use a smaller learning rate than for distribution matching without noise.
        callback: function that is called as `callback(step, gradient)` with a copy of every released gradient
            [K, ipc, C, H, W]. It may not use the private images.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.

    Returns:
        The synthetic set. As for `condense_private`, its `info` contains the guarantee.

    Raises:
        PrivacyError: the guarantee cannot be given; see `condense_private`. The error is `NotSeparable` if the loss is
            not a sum over examples.
        TypeError, ValueError: the images, the labels or an option are invalid.
    """
    loss = require_separable(loss)
    size, steps = check.positive_int(size, "size"), check.positive_int(steps, "steps")
    rate = check.real_number(rate, "rate", above=0.0, most=1.0)
    check.learning_rate(lr)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    sigma = resolve_sigma(epsilon, sigma, delta=delta, count=steps, rate=rate)
    require_in_memory(images, "images")
    real = open_private_set(images, labels, num_classes=num_classes, delta=delta, size=size)
    assert isinstance(real, LabeledImages)
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
    width = real.images.new_zeros(0, embedders.dim)
    pull = _row_gradients(loss, width)
    public_clip = _public_clip(synthetic, embedders[0], pull, real, seed)  # refuses unsuitable code before the charge
    clip = public_clip if clip is None else clip

    private = PrivateGradient(
        [synthetic], sigma=sigma, clip=clip, denominator=rate * size / real.num_classes, secret=secret
    )
    account.ledger.assume("image_sgd")
    remark_start(account.ledger, init)
    account.spend("image_sgd", sigma, rate=rate, count=steps)
    velocity, records = torch.zeros_like(synthetic), active_records()
    with bar(steps, "private image steps", progress=progress) as shown:
        for step in range(steps):
            phi = embedders[step]
            phi.prepare(synthetic[0].detach(), gradients=True)
            rows = secret.poisson(len(real), rate).to(real.images.device)
            drawn = real.images.index_select(0, rows)
            embedding = torch.cat([width, *(phi.embed_private(x) for x in drawn.split(chunk) if len(x))])
            for grads in _image_gradients(synthetic, phi, embedding, real.labels[rows], pull):
                private.add([grads])
            (gradient,) = private.take()
            if callback is not None:
                with Untouched(records, "the callback", shape=True):
                    callback(step, gradient.clone())
            sgd_step([synthetic], [gradient], [velocity], lr=lr, momentum=momentum)
            shown.update()

    info = {"method": "image_sgd", "derived": "image_sgd", **account.guarantee().info()}
    info |= {"sigma": sigma, "clip": clip, "rate": rate, "steps": steps, "match": match, "ipc": ipc, "init": init_name}
    classes = torch.arange(real.num_classes, device=real.labels.device).repeat_interleave(ipc)
    learned = check.converged(synthetic.detach().flatten(0, 1), "lr")
    with without_warnings():  # noise may drive pixels far out of their range, which is no error here
        return LabeledImages(
            learned,
            classes,
            num_classes=real.num_classes,
            normalization=real.normalization,
            info=info,
            class_names=real.class_names,
        )


def _public_clip(
    images: Tensor, phi: PublicEmbedder, pull: Callable[[Tensor, Tensor], Tensor], like: LabeledImages, seed: int
) -> float:
    noise = public_noise(32, like, derive(seed, "clip"))
    with torch.no_grad():
        embedding = phi.embedding(noise)
    labels = torch.arange(len(noise), device=noise.device) % images.shape[0]
    parts = _image_gradients(images, phi, embedding, labels, pull)
    return float(torch.cat([g.flatten(1).double().norm(dim=1) for g in parts]).median())
