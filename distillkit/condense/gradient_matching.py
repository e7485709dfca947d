"""Gradient matching (DC, DSA): synthetic images whose parameter gradients match those of real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.shares import require_unsplit
from distillkit.augment import Augmentation, require_augmentation
from distillkit.condense._condensation import Condensation
from distillkit.condense._inner_training import InnerTraining, TrainedNetwork, loops_for
from distillkit.condense._parameter_gradient import Metric, distance_to_target, parameter_gradient
from distillkit.condense._state import Progress, Resume
from distillkit.networks._validation import require_sampler
from distillkit.networks.samplers import NetworkSampler
from distillkit.normalization import Normalization
from distillkit.rng import derive
from distillkit.sets import Images, LabeledImages, Labels, StoredImages, Tiles
from distillkit.sets._class_index import with_class_labels
from distillkit.sets._devices import on_device
from distillkit.sets.as_set import open_set

_INNER = InnerTraining()

_MOMENTUM = 0.5
"""Momentum of SGD on the pixels, a constant in the authors' code."""

_STATISTICS_IMAGES = 16
"""Number of real images per class in the batch that provides the statistics of batch norm."""


@on_device("images")
@torch.enable_grad()
def gradient_matching(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    networks: NetworkSampler,
    ipc: int = 10,
    iterations: int = 1000,
    metric: Metric = "row_cosine",
    init: str | LabeledImages = "noise",
    parametrize: Tiles | None = None,
    classes: Sequence[int] | None = None,
    batch_real: int | None = 256,
    lr: float | None = 0.1,
    inner: InnerTraining = _INNER,
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
    """Condense a set by gradient matching (DC, DSA).

    The synthetic images are optimized so that a network's parameter gradient on them matches the gradient on the real
    images, while the network trains on the synthetic images. Each iteration samples a network and repeats two steps:

    1. a matching step: one step of SGD with momentum 0.5 on the pixels, to reduce the sum over classes c of
       D(grad CE(synthetic images of c), grad CE(real images of c));
    2. some epochs of training the network by SGD on the synthetic set, except after the last matching step.

    Papers: Zhao, Mopuri and Bilen, "Dataset condensation with gradient matching" (DC, ICLR 2021), Algorithm 1; with
    `augment=DSA()` Zhao and Bilen, "Dataset condensation with differentiable Siamese augmentation" (DSA, ICML 2021),
    Algorithm 1.

    Args:
        images: the real images: a tensor, float [N, C, H, W], in the normalized space; or a `LabeledImages`, in which
            case `labels` are omitted; or a `StoredImages`, from which each step reads its batches.
        labels: class indices, int [N].
        networks: sampler of networks, `RandomNetworks(factory)` in the papers. A sampled network is copied, and the
            copy is trained, so the sampled network's parameters may be frozen. Before each matching step, batch norm
            layers that use batch statistics get the statistics of a real batch with 16 images from each class. While
            the network trains, they use the statistics of the training batch. Dropout is disabled.
        ipc: number of synthetic images per class. If `init` is a set, the numbers of its images replace it.
        iterations: number of iterations; each one uses a new network.
        metric: distance D between gradients; see `losses.matching.gradient_distance`.
        init: initial images, see `initial_images`. The papers start from noise.
        parametrize: `sets.Tiles(f)`, for example with f = 2, or None to optimize pixels. With `Tiles(f)`, the result is
            a `TiledImages` with `ipc` stored images per class, which are decoded to `ipc * f ** 2` images.
        classes: the classes to condense; default: all classes with a real image.
        batch_real: number of real images per class and matching step, sampled without replacement. If a class has fewer
            images, all are used. None always uses all images.
        lr: learning rate of SGD on the pixels. The papers use 0.1. None chooses a rate as in `distribution_matching`;
            see `info["lr"]`.
        inner: options for training each network between matching steps; see `InnerTraining`.
        augment: augmentation. In a matching step, the real and synthetic images of a class get the same random
            transformation (Siamese). While the network trains, each image gets its own.
        num_classes, normalization: properties of the data if `images` is a tensor; see `LabeledImages`.
        generator: an int seed, or a CPU generator from which one seed is drawn. All randomness derives from this seed.
        chunk: number of images per pass through the network; the default depends on device and image size (see
            `chunking.chunk_size`). It bounds memory and changes results only by rounding.
        callback: function that is called with a `Progress` after each iteration. Its `step` counts iterations, and its
            `loss` is the mean over the matching steps of the iteration.
        resume: a state from `Progress.state()`, or the path of a file written by `save_state`. Pass the other
            arguments again. `iterations` includes the iterations already run.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show a progress bar, which counts matching steps.

    Returns:
        A set of `ipc` images per class, sorted by class, in the same normalized space. Pixels are never clipped. If
        they move far outside [0, 1], a warning advises a lower `lr`. The `info` of the set describes how the set was
        made. It also lists the classes without real images (`absent`) and the classes whose initial images repeat
        (`with_replacement`).

    Raises:
        TypeError, ValueError: an argument is invalid; the message says which.
        FloatingPointError: the loss is not finite.

    Deviations from the authors' code: Random draws derive from the seed, not from the clock. Default numbers of
    matching steps and of training epochs exist for every `ipc` (see `loops_for`), not only for the published values.
    Exactly `iterations` iterations are run; the authors' code runs one more. Before a matching step, the running
    statistics of batch norm are set to those of a batch of all classes. In the authors' code, the running statistics
    keep nine tenths of their initial values (mean 0, variance 1).
    """
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    networks = require_sampler(networks)
    ipc = check.positive_int(ipc, "ipc")
    iterations = check.positive_int(iterations, "iterations", least=0)
    require_augmentation(augment, real.normalization)
    if not isinstance(inner, InnerTraining):
        raise TypeError(f"inner must be an InnerTraining(loops=..., lr=..., batch=...), got {type(inner).__name__}")
    if isinstance(init, LabeledImages):
        tiles = Tiles.require(parametrize) or Tiles(1)
        ipc = max(1, int(with_class_labels(init).counts().max()) // tiles.count)
    matching_steps, epochs = inner.loops or loops_for(ipc)
    if matching_steps > 1 and epochs:
        require_unsplit("networks train on the images of all classes; pass inner with loops=(1, 0)", "over_classes")
    limit = len(real) if batch_real is None else check.positive_int(batch_real, "batch_real")
    options: dict[str, object] = {"loops": [matching_steps, epochs], "metric": metric, "batch_real": batch_real}
    options |= {"lr_net": float(inner.lr), "batch_net": inner.batch}
    run = Condensation(
        "gradient matching", real, networks, ipc=ipc, init=init, parametrize=parametrize, classes=classes,
        augment=augment, lr=lr, momentum=_MOMENTUM,
        steps=iterations, generator=generator, resume=resume, callback=callback, arguments=options,
    )  # fmt: skip
    total, done = iterations * matching_steps, run.done * matching_steps
    smallest = sum(run.batch_sizes(_STATISTICS_IMAGES))
    if matching_steps > 1 and epochs:
        smallest = min(smallest, inner.batch, sum(run.counts))

    def keys(kind: str) -> Callable[[int, int], Sequence[int | str]]:
        return lambda n, c: (*divmod(n, matching_steps), kind, c)

    with (
        bar(total, "gradient matching", progress=progress, done=done) as shown,
        run.samples(limit, total, keys("real")) as read,
        run.samples(_STATISTICS_IMAGES, total, keys("mixed")) as mixed,
    ):
        for i, drawn in run.draw_networks(smallest=smallest, classes=real.num_classes):
            trained, losses = TrainedNetwork(drawn, chunk), []
            for j in range(matching_steps):
                n = i * matching_steps + j
                if trained.norms:
                    trained.fix_statistics(torch.cat([mixed(n, position) for position in range(len(run.classes))]))
                losses.append(run.step(partial(_distance, run, trained, partial(read, n), (i, j), metric)))
                shown.update()
                if j < matching_steps - 1:
                    order = derive(run.seed, i, j, "train")
                    trained.train(run.synthetic(), run.start.labels, epochs, inner, augment, order)
            run.report(sum(losses) / matching_steps)
    return run.result(run.loss, {**options, "lr": run.lr, "momentum": _MOMENTUM, "ipc": ipc, "iterations": iterations})


def _distance(
    run: Condensation,
    trained: TrainedNetwork,
    batch: Callable[[int], Tensor],
    step: tuple[int, int],
    metric: Metric,
    images: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum over classes of D(gradient on synthetic images, gradient on real images), and its gradient.

    D compares the gradients of the cross-entropy with respect to the network's parameters. The gradient of the sum is
    with respect to the synthetic `images` of all classes.
    """
    network, parameters, chunk = trained.network, trained.parameters, trained.chunk
    distances, gradients = [], []
    for position, (c, own) in enumerate(zip(run.classes, images.split(run.counts), strict=True)):
        real = run.transform(batch(position), *step, c)
        target = parameter_gradient(network, parameters, real, _labels(c, real), chunk=chunk)
        leaf = own if run.augment is None else own.requires_grad_()
        synthetic = run.transform(leaf, *step, c)
        distance, gradient = distance_to_target(
            network, parameters, synthetic, _labels(c, synthetic), target, metric=metric, chunk=chunk
        )
        if run.augment is not None:
            check.differentiable(synthetic, "augment", "its images")
            (gradient,) = torch.autograd.grad(synthetic, leaf, gradient)
        distances.append(distance)
        gradients.append(gradient)
    return torch.stack(distances).sum(), torch.cat(gradients)


def _labels(c: int, images: Tensor) -> Tensor:
    return torch.full((len(images),), c, device=images.device)
