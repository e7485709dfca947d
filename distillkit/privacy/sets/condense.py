"""A private data set condensed to a set that may be published, in one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distillkit._sanity_checks import warn, without_warnings
from distillkit._utils import check
from distillkit.augment import Augmentation
from distillkit.chunking import chunk_size
from distillkit.networks._validation import require_sampler
from distillkit.networks.convnet import ConvNet
from distillkit.networks.samplers import NetworkSampler, RandomNetworks
from distillkit.normalization import Normalization
from distillkit.privacy._clients import ALL_CLIENTS
from distillkit.privacy.accounting.gaussian import gaussian_sigma
from distillkit.privacy.events import Event
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.sets.class_means import class_sums, fit_to_means, release
from distillkit.privacy.sets.histogram import private_histogram
from distillkit.privacy.sets.public_embedders import PublicEmbedders
from distillkit.privacy.sets.trained_networks import TrainedNetworks
from distillkit.privacy.validation._arguments import as_private_set, initial_images, ledger_or_new
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, require_protocol

__all__ = ["condense_private", "public_networks"]


def condense_private(
    images: Tensor | LabeledImages,
    labels: Tensor | None = None,
    *,
    epsilon: float,
    delta: float = 1e-5,
    num_classes: int | None = None,
    size: int | None = None,
    ipc: int = 10,
    networks: NetworkSampler | None = None,
    draws: int = 20,
    match: str = "embedding",
    augment: Augmentation | None = None,
    clip: float | None = None,
    sizes: Tensor | None = None,
    histogram_share: float = 0.05,
    first_share: float = 0.2,
    first_draws: int = 5,
    first_steps: int = 100,
    passes: int = 2,
    train: Protocol | None = None,
    init: str | LabeledImages = "noise",
    steps: int = 300,
    lr: float = 200.0,
    momentum: float = 0.5,
    normalization: Normalization | None = None,
    public_statistics: bool = False,
    ledger: Ledger | None = None,
    client: int | str = ALL_CLIENTS,
    round: int = 0,
    secret: Secret | int | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Condense a private set to `ipc` images per class that are (epsilon, delta) differentially private.

    The set that it returns may be published and trained on like any other. Each image is embedded by `draws` public
    random networks; the embedding minus a public centre is divided by its norm, so that one record moves one class sum
    by exactly 1 at most and there is no clip to tune. The sums of all classes get Gaussian noise once. Images are then
    fitted to the noised means by distribution matching, which costs no more privacy. Neighbours differ by one added or
    removed record.

    This is done twice. A first, rough set takes `first_share` of the budget and is centred on smooth noise; the second
    goes on from it, and its centre is the mean embedding of the first. What all images have in common then no longer
    fills most of a unit vector, and as much noise leaves more signal. With `train`, networks that learned from the
    first set embed for the second; more `passes` repeat the second.

    Papers: distribution matching is Zhao and Bilen (WACV 2023), Eq. 6; noising feature sums once follows from the
    Gaussian mechanism (Balle and Wang, ICML 2018), whose composition is exact also when one release depends on those
    before it (Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022, corollary 2). The passes are ours, and
    trained networks the idea of IDM (Zhao et al., CVPR 2023).

    Args:
        images: a set, or float [N, C, H, W] in the normalised space. Private.
        labels: class indices int [N]; left out with a set. Private.
        epsilon: > 0, for the whole call. Infinity adds no noise: the control for what the noise costs, without any
            guarantee, which the ledger records.
        delta: well below 1 / N; that of the ledger, if one is given. It is compared with `size`, or the sum of `sizes`,
            never with the private N; without either a warning follows if it is not below one over the noised N.
        num_classes: K, public; must be given, here or to the set when it was made. A class without records gets images
            too, of noise.
        size: a public number of records, or an upper bound; delta is compared with it, and nothing else.
        ipc: images per class.
        networks: where the networks that embed the images come from, as in `distribution_matching`; they must owe
            nothing to the private data. Default: `RandomNetworks` of a ConvNet of width 128, of depth 3 or what the
            image size allows.
        draws: how many networks are drawn, and as many maps released, in each later pass; sigma grows with its root.
        match: what is matched of each image: `"embedding"`, or `"embedding+logits"`, the two in a row.
        augment: an augmentation such as `DSA()`, one draw per map for private and synthetic images.
        clip: None for unit vectors; a number clips centred embeddings instead (a clip tuned on the private data is
            not covered by epsilon: tell the ledger with `remark`).
        sizes: how many records each class has [K], where that is public. Default: one noised histogram, paid from
            epsilon.
        histogram_share: share of the Gaussian budget (sum of 1 / sigma^2) that goes to the histogram, in (0, 0.5].
        first_share: share that goes to the first pass, in [0, 0.5]; 0 for none, and the centre is smooth noise.
        first_draws, first_steps: as `draws` and `steps`, of the first pass.
        passes: how many, the first included, at least 2; the later ones share the rest of the budget equally, each with
            `draws` and `steps`.
        train: how the networks of every later pass are trained, on the set of the pass before (`TrainedNetworks`);
            `networks` must then be `RandomNetworks`. None for random networks throughout. Trained ones embed far better
            where the noise is small, as with thousands of records a class; where it is large they learn it.
        init: `"noise"`, or a public set with `ipc` images per class.
        steps: of each later pass's fit.
        lr, momentum: of all fits (SGD, cosine schedule); lr is for unit vectors.
        normalization: how `images` came from pixels: public constants. One that was measured (`Normalization.of`, the
            default of `load_folder`) is refused.
        public_statistics: say True if the set's normalisation was measured on public data.
        ledger: where the release is charged, with whatever it holds already. Default one for this call, whose epsilon
            covers this call alone: give every call on the same records the same ledger.
        client, round: for the ledger. Default: everybody's records pay, which is safe whoever holds them.
        secret: where the noise comes from: the operating system, or a seed, which voids the guarantee.
        generator: public randomness: networks, initial images, augmentation.
        chunk: images per pass; default by device and size.
        progress: whether each pass's steps, and the trainings of `train`, show a bar where somebody watches.

    Returns:
        A set of K * ipc images, class by class. `info["epsilon"]` is what the ledger guarantees for `client` after
        this call (None where none holds, with `info["reason"]`), and is saved with the set.

    Raises:
        PrivacyError: one of its kinds, with what to do instead: BudgetExhausted, BatchStatistics, PrivateStatistics,
            PrivateInitialization, NotAccountable.
        TypeError, ValueError: bad images, labels or options.
    """
    if size is not None:
        check.positive_int(size, "size")
    if sizes is not None and (sizes.ndim != 1 or not bool((sizes > 0).all())):
        raise ValueError(f"sizes must be positive numbers, one a class, got {sizes.tolist()}")
    real = as_private_set(
        images,
        labels,
        num_classes=num_classes,
        normalization=normalization,
        public_statistics=public_statistics,
        delta=delta,
        size=float(sizes.sum()) if size is None and sizes is not None else size,
    )
    if sizes is not None and len(sizes) != real.num_classes:
        raise ValueError(f"sizes must be {real.num_classes} positive numbers, one a class, got {sizes.tolist()}")
    check.positive_int(passes, "passes", least=2)
    check.boolean(progress, "progress")
    counting = 0.0 if sizes is not None else check.real_number(histogram_share, "histogram_share", above=0.0, most=0.5)
    check.real_number(first_share, "first_share", least=0.0, most=0.5)
    check.positive_int(first_draws, "first_draws")
    for name, count in (("steps", steps), ("first_steps", first_steps)):
        check.positive_int(count, name, least=0)
    check.real_number(lr, "lr", above=0.0)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    chunk_size(real.images, chunk)
    if train is not None:
        require_protocol(train)
    seed, first_seed, *more = torch.randint(2**62, (passes,), generator=as_generator(generator)).tolist()
    fitted, init_name = initial_images(init, real, ipc=ipc, generator=derive(seed, "start"))
    classes = torch.arange(real.num_classes, device=real.labels.device).repeat_interleave(ipc)
    networks = public_networks(networks, real)
    if train is not None and not isinstance(networks, RandomNetworks):
        raise ValueError(
            f"networks must be RandomNetworks(factory) if `train` is to train them, got {type(networks).__name__}"
        )
    options: dict[str, Any] = {"like": real, "clip": clip, "match": match, "augment": augment}
    maps = PublicEmbedders(networks, draws, seed=seed, **options)
    secret, ledger = as_secret(secret), ledger_or_new(ledger, delta)
    where: dict[str, Any] = {"ledger": ledger, "client": client, "round": round, "secret": secret}

    whole = 0.0 if epsilon == math.inf else gaussian_sigma(epsilon, delta)
    sigma = whole * math.sqrt(draws * (passes - 1) / (1 - counting - first_share))
    sigma_first = whole * math.sqrt(first_draws / first_share) if first_share else 0.0
    sigma_sizes = whole / math.sqrt(counting) if counting else 0.0
    events = [Event("histogram", sigma_sizes, client=client)] if counting else []
    events += [Event("class_means", sigma_first, count=first_draws, client=client)] if first_share else []
    ledger.assume("condense_private")
    ledger.check(*events, Event("class_means", sigma, count=draws * (passes - 1), client=client))

    if sizes is None:
        counted = private_histogram(real.labels, num_classes=real.num_classes, sigma=sigma_sizes, **where)
        if size is None and float(counted.sum()) * delta >= 1:
            warn(
                f"delta={delta:g} is not below one over the (noised) number of records, where publishing a random "
                "record passes; take a smaller delta"
            )
        sizes = counted.clamp_min(max(1.0, 2 * sigma_sizes))
    denominators = sizes.view(1, -1, 1)

    def fit(start: Tensor, maps: PublicEmbedders, sigma: float, steps: int) -> Tensor:
        sums = class_sums(real.images, real.labels, maps, num_classes=real.num_classes, chunk=chunk)
        noised = release(sums, sigma=sigma, sensitivity=maps.sensitivity, **where)
        targets = noised / denominators.to(noised)
        return fit_to_means(start, maps, targets, steps=steps, lr=lr, momentum=momentum, chunk=chunk, progress=progress)

    if first_share:
        fitted = fit(
            fitted, PublicEmbedders(networks, first_draws, seed=first_seed, **options), sigma_first, first_steps
        )
    trained: NetworkSampler | None = None
    for number, own_seed in enumerate((seed, *more)):
        if first_share or number:
            shown = real.replace(images=fitted, labels=classes, columns={}, info={})
            if train is not None and isinstance(networks, RandomNetworks):
                redraw = networks.redraw
                trained = TrainedNetworks(networks.factory, shown, train, redraw=redraw, progress=progress)
            maps = PublicEmbedders(trained or networks, draws, seed=own_seed, centers=fitted, **options)
        fitted = fit(fitted, maps, sigma, steps)
    guarantee = ledger.guarantee(client)
    info = {
        "method": "class_means",
        **guarantee.info(),
        "size": size,
        "sigma": sigma,
        "draws": draws,
        "first_share": first_share,
        "passes": passes,
        "trained": train is not None,
        "match": match,
        "ipc": ipc,
        "init": init_name,
        "steps": steps,
    }
    with without_warnings():  # what noise drives far out of the pixels' range is still what was learned
        return LabeledImages(fitted, classes, num_classes=real.num_classes, normalization=real.normalization, info=info)


def public_networks(networks: NetworkSampler | None, like: LabeledImages) -> NetworkSampler:
    """Read the option `networks` of a private component: where the network of each map comes from.

    Args:
        networks: a sampler, which is returned as it is; or None, for random ConvNets of width 128 and of depth 3, or
            the depth that the size of the images allows.
        like: gives shape, class count, device and dtype of these ConvNets, and nothing else.

    Raises:
        TypeError: something else, such as a network or a factory of networks.
    """
    if networks is not None:
        return require_sampler(networks)
    depth = min(3, min(like.shape[1:]).bit_length() - 1)
    shape, classes, place = like.shape, max(2, like.num_classes), like.images
    return RandomNetworks(lambda: ConvNet(shape, classes, depth=depth).to(place.device, place.dtype))
