"""Distribution matching: one function for DM, FedLGD's iterative distribution matching, and FedDM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit._utils.display import stable_repr
from distillkit._utils.progress import bar
from distillkit.augment import Augmentation, require_augmentation
from distillkit.condense._class_embeddings import (
    MATCHES,
    Embed,
    Loss,
    check_counts,
    class_distance,
    class_means,
    embed_classes,
    embed_images,
    embedding_means,
)
from distillkit.condense._condensation import Condensation
from distillkit.condense._parallel import ParallelMap, class_threads
from distillkit.condense._state import Progress, Resume
from distillkit.networks._base import Network
from distillkit.networks._validation import require_sampler
from distillkit.networks.samplers import NetworkSampler
from distillkit.normalization import Normalization
from distillkit.sets import Images, LabeledImages, Labels, StoredImages, Tiles
from distillkit.sets._devices import on_device
from distillkit.sets.as_set import open_set

Match = Callable[[Tensor, Tensor], Tensor]
"""Loss of one class: a function of the embeddings of its real images [n, d] and synthetic images [m, d]."""


@on_device("images")
def distribution_matching(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    networks: NetworkSampler,
    ipc: int = 10,
    steps: int = 1000,
    match: str | Match = "embedding",
    init: str | LabeledImages = "real",
    parametrize: Tiles | None = None,
    classes: Sequence[int] | None = None,
    batch_real: int | None = 256,
    lr: float | None = 1.0,
    momentum: float = 0.5,
    augment: Augmentation | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    callback: Callable[[Progress], object] | None = None,
    resume: Resume | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Condense a set by matching the mean embeddings of real and synthetic images of each class.

    Each step samples a network phi, and takes one step of SGD with momentum on the pixels to reduce

        sum over classes c of || mean phi(real images of c) - mean phi(synthetic images of c) ||^2.

    The squared norm is a sum over the dimensions of the embedding, so a good `lr` depends on the number of dimensions.
    These settings reproduce the papers:

    | paper | networks | match | augment | steps |
    |---|---|---|---|---|
    | DM (Zhao and Bilen, WACV 2023) | `RandomNetworks(factory)` | embedding | `DSA()` | 20,000 |
    | FedLGD (Huang et al., TMLR 2024), section 3.3.1 | `FixedNetwork(network)` | embedding | `DSA()` | 100 |
    | FedDM (Xiong et al., CVPR 2023), Eq. 8 | `NetworkBall(network, 5.0)` | embedding+logits | none | 1,000 |

    Args:
        images: the real images: a tensor, float [N, C, H, W], in the normalized space; or a `LabeledImages`, in which
            case `labels` are omitted; or a `StoredImages`, from which each step reads its batches.
        labels: class indices, int [N].
        networks: sampler of the networks phi, which must have the images' device and dtype. If their batch norm uses
            batch statistics, all classes share one forward pass, which is not chunked. In separate passes, batch norm
            would normalize every class to the same mean.
        ipc: number of synthetic images per class. A set that is passed as `init` determines the number instead, and
            `info["ipc"]` records it: an int, or a list if the classes differ.
        steps: number of optimization steps.
        match: `"embedding"`, or `"embedding+logits"` to add the squared distance of the mean logits (FedDM). You can
            also pass your own loss: a function of the embeddings of one class's real images [n, d] and synthetic images
            [m, d] that returns a scalar. The losses of all classes are added. With your own loss, each step samples
            `batch_real` images of each class. A call that resumes needs a function with the same name as before.
        init: initial images, see `initial_images`. A `LabeledImages` is optimized further, and determines the classes
            and their counts.
        parametrize: `sets.Tiles(f)`, for example with f = 2, or None to optimize pixels. With `Tiles(f)`, the result is
            a `TiledImages` with `ipc` stored images per class, which are decoded to `ipc * f ** 2` images.
        classes: the classes to condense; default: all classes with a real image.
        batch_real: number of real images per class and step, sampled without replacement. If a class has fewer images,
            all are used. None always uses all images. This argument has no effect if the sampler is
            `FixedNetwork(network)` and there is no augmentation: the means of whole classes are then computed once.
            Pass `FixedNetwork(network, cache=False)` to use random batches.
        lr: learning rate of SGD on the pixels. The papers use 1; DM uses 10 for 100 or more images per class. None
            chooses a rate for the image size, network and objective: one step along the gradient at noise images
            changes pixels in [0, 1] by 0.05 (root mean square). `info["lr"]` is the rate. If you condense different
            classes in separate calls, pass the same number as `lr` to all calls.
        momentum: momentum of SGD, in [0, 1).
        augment: augmentation of real and synthetic images. In each step, the real and synthetic images of a class get
            the same random transformation (Siamese).
        num_classes, normalization: properties of the data if `images` is a tensor; see `LabeledImages`.
        generator: an int seed, or a CPU generator from which one seed is drawn. All randomness derives from this seed.
        chunk: number of real images per forward pass; the default depends on device and image size (see
            `chunking.chunk_size`). It bounds memory and changes results only by rounding.
        callback: function that is called with a `Progress` after each step.
        resume: a state from `Progress.state()`, or the path of a file written by `save_state`. The result is
            bit-identical to that of an uninterrupted call. Pass the other arguments again. `steps` includes the steps
            already taken, and may be larger than before.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show a progress bar.

    Returns:
        A set of `ipc` images per class, sorted by class, in the same normalized space. Pixels are never clipped. If
        they move far outside [0, 1], a warning advises a lower `lr`. The `info` of the set describes how the set was
        made: the options, versions and `seed`. It also lists the classes without real images (`absent`) and the classes
        whose initial images repeat (`with_replacement`).

    Raises:
        TypeError, ValueError: an argument is invalid; the message says which.
        FloatingPointError: the loss is not finite; lower `lr`.

    On a CPU, up to `torch.get_num_threads()` classes are processed at once, each with one thread and a copy of the
    network, so the result is the same as with one thread. If the network cannot be copied, classes are processed one
    after the other. If all classes share a single pass, because of batch statistics or few images, the pass uses all
    threads.

    Deviations: the code of DM's authors seeds its augmentation from the clock and runs `steps + 1` steps; here
    `generator` determines all randomness, and `steps` steps are run. In the code of FedLGD and DM, averages over absent
    classes are NaN; here absent classes are left out. FedDM's paper also samples a batch of the synthetic images; here
    all synthetic images are used.
    """
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    networks = require_sampler(networks)
    ipc = check.positive_int(ipc, "ipc")
    steps = check.positive_int(steps, "steps", least=0)
    outputs, loss, embed = _objective(match, chunk)
    require_augmentation(augment, real.normalization)
    batch_real = len(real) if batch_real is None else check.positive_int(batch_real, "batch_real")
    options = {"match": stable_repr(match) if callable(match) else match, "lr": lr, "momentum": momentum}
    options["batch_real"] = batch_real
    run = Condensation(
        "distribution matching",
        real,
        networks,
        ipc=ipc,
        init=init,
        parametrize=parametrize,
        classes=classes,
        augment=augment,
        lr=lr,
        momentum=momentum,
        steps=steps,
        generator=generator,
        resume=resume,
        callback=callback,
        arguments={**options, "cache": getattr(networks, "cache", True)},
    )
    logits = real.num_classes if match == "embedding+logits" else None
    smallest = min(sum(run.counts), sum(run.batch_sizes(batch_real)))
    targets = None
    with (
        bar(steps, "distribution matching", progress=progress, done=run.done) as shown,
        class_threads(run.images) as threads,
        run.samples(batch_real, steps, lambda step, c: (step, c, "real")) as read,
    ):
        for step, network in run.draw_networks(smallest=smallest, classes=logits, features=True):
            parallel = ParallelMap(network, threads)
            # Sample and embed real images of each class. The means of all images with a fixed network never change.
            fixed = networks.fixed and augment is None and not callable(match) and not uses_batch_statistics(network)
            if fixed and targets is None:
                targets = class_means(parallel, run.real, [*run.rows.values()], match=outputs, chunk=chunk)
            elif not fixed:
                batch, sizes = partial(_real_batch, run, read, step), run.batch_sizes(batch_real)
                targets = embed_classes(parallel, batch, sizes, embed, like=run.images, chunk=chunk)
            assert targets is not None
            # Embed the synthetic images, and take a step against the gradient of their distance to the targets.
            distance = partial(
                class_distance,
                parallel=parallel,
                counts=run.counts,
                targets=targets,
                loss=loss,
                match=outputs,
                augment=None if augment is None else partial(_siamese, run, step),
                chunk=chunk,
            )
            run.report(run.step(distance), shown)
    return run.result(run.loss, {**options, "lr": run.lr, "ipc": ipc, "steps": steps})


def _real_batch(run: Condensation, read: Callable[[int, int], Tensor], step: int, position: int) -> Tensor:
    """Sample real images of the class at `position` in `run.classes`, and augment them."""
    return _siamese(run, step, read(step, position), position)


def _siamese(run: Condensation, step: int, images: Tensor, position: int) -> Tensor:
    """Augment real or synthetic images of a class, both with the same transformation in a step."""
    return run.transform(images, step, run.classes[position])


def _mean_distance(means: Sequence[Tensor], embeddings: Sequence[Tensor]) -> Tensor:
    """Return the sum over classes of || mean embedding of real images - mean embedding of synthetic images ||^2."""
    return (torch.stack(list(means)) - torch.stack([own.mean(0) for own in embeddings])).square().sum()


def _objective(match: str | Match, chunk: int | None) -> tuple[str, Loss, Embed]:
    """Check the argument `match`. Return the compared output, the loss, and the function that embeds real images."""
    if callable(match):
        check.callable_with(match, "match", ("real", "synthetic"), "a function of two embeddings, [n, d] and [m, d]")
        return "embedding", partial(_own_distance, match), partial(embed_images, chunk=chunk)
    check.one_of(match, "match", MATCHES)
    return match, _mean_distance, partial(embedding_means, match=match, chunk=chunk)


def distance_to_means(
    network: Network,
    targets: Tensor,
    images: Tensor,
    counts: Sequence[int],
    *,
    match: str = "embedding",
    augment: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the distance between the mean embeddings of synthetic and real images, and its gradient.

    To write your own loop, call `embedding_means` on real images, call this function, and take an optimizer step with
    the gradient.

    The distance is a sum over classes. The function therefore divides the classes into groups that fit into a chunk,
    and runs one forward and backward pass for each group. A class that exceeds a chunk is passed in pieces. On a CPU,
    this is faster than a single pass, and the gradient is the same. If batch norm uses batch statistics, all classes
    are processed together.

    Args:
        network: network with `features` and `classifier`. The function is faster if the parameters do not require
            gradients.
        targets: the mean embeddings of real images [K, d], from `embedding_means` with the same `match`.
        images: the synthetic images [N, C, H, W], sorted by class.
        counts: number of synthetic images of each of the K classes. All counts are positive, and their sum is N.
        match: quantity whose means are compared, `"embedding"` or `"embedding+logits"`; see `embedding_means`.
        augment: function that augments the images of one class, or None. Its arguments are the images and the index of
            the class in `counts`, 0 to K-1.
        chunk: number of images per pass. Default: see `chunking.chunk_size`.

    Returns:
        The distance, a scalar, and its gradient with respect to the images, [N, C, H, W]. The distance is the sum over
        k of ||targets[k] - mean embedding of class k||^2.
    """
    counts = check_counts(network, images, counts, match)
    k = len(counts)
    if not isinstance(targets, Tensor) or targets.ndim != 2 or (len(targets), targets.dtype) != (k, images.dtype):
        came = f"{targets.dtype} {list(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets must be {images.dtype} [{k}, d], a mean for each of the counts, got {came}")
    check.has_values(targets, "targets")
    return class_distance(
        images, ParallelMap(network), counts, [*targets], _mean_distance, match=match, augment=augment, chunk=chunk
    )


def _own_distance(match: Match, real: Sequence[Tensor], synthetic: Sequence[Tensor]) -> Tensor:
    """Return the sum over classes of a user's loss of the embeddings of real and synthetic images."""
    return torch.stack([_own_loss(match, *pair) for pair in zip(real, synthetic, strict=True)]).sum()


def _own_loss(match: Match, real: Tensor, synthetic: Tensor) -> Tensor:
    """Return the user's loss of one class, after checking that it is a differentiable scalar."""
    shapes, versions = f"{list(real.shape)} and {list(synthetic.shape)}", (real._version, synthetic._version)
    try:
        value = match(real, synthetic)
    except Exception as error:
        raise ValueError(
            f"match fails on real and synthetic embeddings of shapes {shapes}: {type(error).__name__}: {error}"
        ) from error
    if (real._version, synthetic._version) != versions:
        raise ValueError("match must not change its arguments in place; use new tensors, such as x - y for x.sub_(y)")
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad or not value.is_floating_point():
        came = f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        came += " without a gradient" if isinstance(value, Tensor) and not value.requires_grad else ""
        raise ValueError(
            "match must return a real scalar tensor that depends on the synthetic embeddings, its second argument; "
            f"got {came}"
        )
    return value
