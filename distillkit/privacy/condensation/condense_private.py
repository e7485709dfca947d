"""Condensation of a private set into a set that may be published, in one call."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn, without_warnings
from distillkit.chunking import chunk_size
from distillkit.networks.samplers import NetworkSampler, RandomNetworks
from distillkit.privacy.accounting.gaussian import gaussian_sigma
from distillkit.privacy.condensation.class_means import class_sums, fit_to_means, release
from distillkit.privacy.condensation.condensation_options import EmbeddingNetworks, Passes
from distillkit.privacy.condensation.histogram import private_histogram
from distillkit.privacy.condensation.public_embedders import PublicEmbedders
from distillkit.privacy.condensation.trained_networks import TrainedNetworks
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._arguments import initial_images, open_account, open_private_set, remark_start
from distillkit.privacy.validation._private_records import apart_from_records
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages, StoredImages, TiledImages, Tiles
from distillkit.sets._devices import on_device

_DEFAULT_PASSES = Passes()
_READ = 256
"""Number of images of a stored set that are read at a time."""


@on_device()
@apart_from_records()
def condense_private(
    images: Tensor | LabeledImages | StoredImages,
    labels: Tensor | None = None,
    *,
    epsilon: float,
    delta: float = 1e-5,
    num_classes: int | None = None,
    size: int | Tensor | None = None,
    ipc: int = 10,
    networks: NetworkSampler | EmbeddingNetworks | None = None,
    num_networks: int = 20,
    clip: float | None = None,
    passes: Passes = _DEFAULT_PASSES,
    init: str | LabeledImages = "noise",
    parametrize: Tiles | None = None,
    steps: int = 300,
    lr: float = 200.0,
    momentum: float = 0.5,
    ledger: Ledger | Account | None = None,
    generator: int | torch.Generator = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Condense a private set to `ipc` images per class that are (epsilon, delta) differentially private.

    The result may be published and trained on like any other set. Each image is embedded by `num_networks` public
    random networks. A public center is subtracted from the embedding, and the difference is scaled to norm 1, so one
    record changes one class sum by at most 1, and you need not tune a clip. Gaussian noise is added to the class sums,
    and images are fitted to the noised class means by distribution matching. The fit costs no further privacy.
    Neighboring data sets differ by one added or removed record.

    The condensation has two or more `passes`. The first pass produces a rough set with a small share of the budget. The
    center of this pass is the mean embedding of smooth noise images. The second pass starts from the rough set and uses
    the mean embedding of that set as its center. Subtracting this center removes the part of the embedding that all
    images have in common, so the class sums differ more between classes at the same noise.

    No code of your networks or augmentation runs on private images: every sampled network is captured as a function of
    one image (see `per_example_gradients`), unless it consists of unchanged layers of this package and of PyTorch.

    Papers: distribution matching is from Zhao and Bilen (WACV 2023), Eq. 6. Noise is added to the class sums by the
    Gaussian mechanism (Balle and Wang, ICML 2018). The composition of releases is exact even if a release depends on
    earlier ones (Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022, corollary 2). The use of several
    passes is new here. The option `Passes(train=...)`, which trains the networks on the synthetic set of the previous
    pass, follows IDM (Zhao et al., CVPR 2023).

    Args:
        images: private images: a set, which may be a `StoredImages`, or float [N, C, H, W] in the normalized space. The
            normalization of a set must consist of public constants; a measured normalization (`Normalization.of`, the
            default of `load_folder`) is refused unless it was declared public (`Normalization.of(images,
            public=True)`).
        labels: private class indices, int [N]; omit them if `images` is a set.
        epsilon: target for the whole call, > 0. Infinity adds no noise, to measure how much accuracy the noise costs;
            the ledger then records that no guarantee holds.
        delta: target delta, well below 1 / N, and equal to the delta of a given ledger. It is compared with `size`,
            never with the private N. Without `size`, you get a warning if delta is not below 1 / (N plus noise).
        num_classes: public number of classes K; required unless the set was created with it. The images of a class
            without records are noise.
        size: public number of records, or an upper bound on it, with which delta is compared. You can also pass public
            class sizes [K]. They are the denominators of the class means; by default, the denominators are the private
            class sizes plus noise.
        ipc: number of images per class.
        networks: sampler of the networks that embed the images, or `EmbeddingNetworks`, which also sets the network
            output that is matched, the augmentation and the batch size.
        num_networks: number of networks in each pass after the first, with one release per network. The standard
            deviation of the noise grows with the square root of this number.
        clip: length to which centered embeddings are clipped. With None, all of them are scaled to length 1 instead.
            Epsilon does not cover a clip that was tuned on the private data: record the tuning with
            `Ledger.add_remark`.
        passes: number of passes and split of the budget; see `Passes`.
        init: initial images: `"noise"`, or a public set with `ipc` images per class.
        parametrize: parametrization of the images, such as `sets.Tiles(factor)`, or None. With tiles, the result is a
            `TiledImages` with `ipc` stored images per class, which are decoded to `ipc * factor ** 2` images. Only
            synthetic images are decoded, so the releases and epsilon are the same as without tiles. A public set as
            `init` must then be a `TiledImages` with the same factor, or have `ipc * factor ** 2` images per class,
            which are shrunk to tiles.
        steps: number of fitting steps in each pass after the first.
        lr, momentum: learning rate and momentum of all fits (SGD, cosine schedule); the default learning rate suits
            embeddings of length 1.
        ledger: ledger to charge; or an `Account`, which combines a ledger with the client, the round and the source of
            the noise. Default: a new ledger, whose epsilon covers this call alone; pass the same ledger to all calls
            on the same records.
        generator: generator (or its seed) of the public randomness: networks, initial images and augmentation.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show progress bars on a terminal.

    Returns:
        A set of K * ipc (stored) images, sorted by class. `info["epsilon"]`, which is saved with the set, is the
        epsilon that the ledger guarantees after this call. If `ledger` is an `Account`, it is the epsilon of the
        account's client. It is None if no guarantee holds; `info["reason"]` then gives the reason.

    Raises:
        PrivacyError: the guarantee cannot be given. The error is one of the subclasses BudgetExhausted,
            BatchStatistics, NotCapturable, PrivateStatistics, PrivateInitialization and NotAccountable; its message
            gives the remedy.
        TypeError, ValueError: the images, the labels or an option are invalid.
    """
    sizes = size if isinstance(size, Tensor) else None
    if size is not None and not isinstance(size, Tensor):
        check.positive_int(size, "size")
    if sizes is not None and (sizes.ndim != 1 or not bool((sizes > 0).all())):
        raise ValueError(f"size must be one positive number, or one per class, got {sizes.tolist()}")
    real = open_private_set(images, labels, num_classes=num_classes, delta=delta, size=size)
    if sizes is not None and len(sizes) != real.num_classes:
        raise ValueError(f"size must hold {real.num_classes} positive numbers, one per class, got {sizes.tolist()}")
    check.boolean(progress, "progress")
    check.positive_int(num_networks, "num_networks")
    check.positive_int(steps, "steps", least=0)
    check.learning_rate(lr)
    check.real_number(momentum, "momentum", least=0.0, below=1.0)
    check.instance(passes, Passes, "passes", "a Passes(count=..., ...)")
    embedding = EmbeddingNetworks.of(networks)
    chunk, match = embedding.chunk, embedding.match or "embedding"
    like = real._empty
    size_read = max(1, _READ // (own := chunk_size(like.images, chunk))) * own  # whole chunks
    first_share, train = passes.first_share, passes.train
    histogram_share = passes.histogram_share if sizes is None else 0.0
    seed, first_seed, *more = torch.randint(2**62, (passes.count,), generator=as_generator(generator)).tolist()
    fitted, init_name = initial_images(init, real, ipc=ipc, parametrize=parametrize, generator=derive(seed, "start"))
    tiles = parametrize or Tiles(1)
    classes = torch.arange(real.num_classes, device=like.labels.device).repeat_interleave(ipc * tiles.count)
    sampler = embedding.sampler_for(like)
    if train is not None and not isinstance(sampler, RandomNetworks):
        raise ValueError(
            f"networks must be RandomNetworks(factory) if `train` is to train them, got {type(sampler).__name__}"
        )
    options: dict[str, Any] = {"like": like, "clip": clip, "match": match, "augment": embedding.augment}
    embedders = PublicEmbedders(sampler, num_networks, seed=seed, **options)
    account = open_account(ledger, delta)

    sigma_one = 0.0 if epsilon == math.inf else gaussian_sigma(epsilon, delta)
    later = num_networks * (passes.count - 1)
    sigma = sigma_one * math.sqrt(later / (1 - histogram_share - first_share))
    sigma_first = sigma_one * math.sqrt(passes.first_num_networks / first_share) if first_share else 0.0
    sigma_sizes = sigma_one / math.sqrt(histogram_share) if histogram_share else 0.0
    events = [account.event("histogram", sigma_sizes)] if histogram_share else []
    events += [account.event("class_means", sigma_first, count=passes.first_num_networks)] if first_share else []
    account.ledger.assume("condense_private")
    remark_start(account.ledger, init)
    account.ledger.check(*events, account.event("class_means", sigma, count=later))

    if sizes is None:
        counts = private_histogram(real.labels, num_classes=real.num_classes, sigma=sigma_sizes, ledger=account)
        if size is None and float(counts.sum()) * delta >= 1:
            warn(
                f"delta={delta:g} is not below one over the (noised) number of records; publishing a random record "
                "would satisfy it. Choose a smaller delta"
            )
        sizes = counts.clamp_min(max(1.0, 2 * sigma_sizes))
    denominators = sizes.view(1, -1, 1)

    fit: dict[str, Any] = {"lr": lr, "momentum": momentum, "parametrize": parametrize}
    fit |= {"chunk": chunk, "progress": progress}

    def release_and_fit(start: Tensor, embedders: PublicEmbedders, sigma: float, steps: int) -> Tensor:
        if isinstance(real, LabeledImages):
            parts = iter([real])
        else:  # the sums of parts are exact, so they add up to the sums of the set
            parts = map(real._part, torch.arange(len(real)).split(size_read))
        sums = functools.reduce(
            torch.add,
            (class_sums(x.images, x.labels, embedders, num_classes=x.num_classes, chunk=chunk) for x in parts),
        )
        noised = release(sums, sigma=sigma, sensitivity=embedders.sensitivity, ledger=account)
        targets = noised / denominators.to(noised)
        return fit_to_means(start, embedders, targets, steps=steps, **fit)

    if first_share:
        first = PublicEmbedders(sampler, passes.first_num_networks, seed=first_seed, **options)
        fitted = release_and_fit(fitted, first, sigma_first, passes.first_steps)
    trained: NetworkSampler | None = None
    for number, own_seed in enumerate((seed, *more)):
        if first_share or number:
            shown = fitted if parametrize is None else tiles.decode(fitted)
            released = like.replace(images=shown, labels=classes, columns={}, info={})
            if train is not None and isinstance(sampler, RandomNetworks):
                redraw = sampler.redraw
                trained = TrainedNetworks(sampler.factory, released, train, redraw=redraw, progress=progress)
            embedders = PublicEmbedders(trained or sampler, num_networks, seed=own_seed, centers=shown, **options)
        fitted = release_and_fit(fitted, embedders, sigma, steps)
    info = {"method": "class_means", "derived": "class_means", **account.guarantee().info()}
    info |= {"size": None if isinstance(size, Tensor) else size, "sigma": sigma, "draws": num_networks}
    info |= {"first_share": first_share, "passes": passes.count, "trained": train is not None, "match": match}
    info |= {"ipc": ipc, "init": init_name, "steps": steps}
    if parametrize is not None:
        info |= {"parametrize": repr(tiles), "ipc_decoded": ipc * tiles.count}
    with without_warnings():  # noise may drive pixels far out of their range, which is no error here
        facts: dict[str, Any] = {"num_classes": real.num_classes, "normalization": real.normalization}
        facts |= {"info": info, "class_names": real.class_names}
        if parametrize is not None:
            return TiledImages(fitted, classes, tiles=tiles, **facts)
        return LabeledImages(fitted, classes, **facts)
