"""Distribution matching: one function for DM, FedLGD's iterative distribution matching, and FedDM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit._utils.display import stable_repr
from distillkit._utils.progress import bar
from distillkit.augment import Augmentation, require_augmentation
from distillkit.condense._condensation import Condensation
from distillkit.condense._mean_matching import (
    MATCHES,
    Match,
    class_distance,
    class_groups,
    distance_to_means,
    embed_real,
    embedding_means,
)
from distillkit.condense._parallel import ParallelMap, parallel_map
from distillkit.condense._state import Progress, Resume
from distillkit.networks._base import Network
from distillkit.networks._validation import require_sampler
from distillkit.networks.samplers import NetworkSampler
from distillkit.normalization import Normalization
from distillkit.sets import Images, LabeledImages, Labels, Tiles, as_set

__all__ = ["distribution_matching"]


def distribution_matching(
    images: Images,
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
            case `labels` are omitted.
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
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    networks = require_sampler(networks)
    ipc = check.positive_int(ipc, "ipc")
    steps = check.positive_int(steps, "steps", least=0)
    if callable(match):
        check.callable_with(match, "match", ("real", "synthetic"), "a function of two embeddings, [n, d] and [m, d]")
    else:
        check.one_of(match, "match", MATCHES)
    require_augmentation(augment, real.normalization)
    batch_real = len(real) if batch_real is None else check.positive_int(batch_real, "batch_real")
    named = stable_repr(match) if callable(match) else match
    options = {"match": named, "lr": lr, "momentum": momentum, "batch_real": batch_real}
    run = Condensation(
        "distribution matching", real, networks, ipc=ipc, init=init, parametrize=parametrize, classes=classes,
        augment=augment, lr=lr, momentum=momentum,
        steps=steps, generator=generator, resume=resume, callback=callback,
        arguments={**options, "cache": getattr(networks, "cache", True)},
    )  # fmt: skip
    needs = {"features": True, "classes": real.num_classes if match == "embedding+logits" else None}
    shared = sum(run.counts), sum(min(len(rows), batch_real) for rows in run.rows.values())
    loss, fixed_means = None, None
    with (
        bar(steps, "distribution matching", progress=progress, done=run.done) as shown,
        parallel_map(real.images) as parallel,
    ):
        matching = _ClassMatching(run, parallel, "embedding" if callable(match) else match, chunk)
        for step, network in run.draw_networks(real.images, smallest=min(shared), **needs):
            parallel.set_network(network)
            if callable(match):
                compute = partial(matching.own_distance, network, step, batch_real, match)
            else:
                if loss is None and networks.fixed and augment is None and not uses_batch_statistics(network):
                    fixed_means = matching.real_means(network, step, len(real))
                means = matching.real_means(network, step, batch_real) if fixed_means is None else fixed_means
                compute = partial(matching.distance, network, step, means)
            run.choose_lr(compute)
            loss = run.step(*compute())
            run.report(loss, shown)
    return run.result(run.loss, {**options, "lr": run.lr, "ipc": ipc, "steps": steps})


@dataclass(frozen=True)
class _ClassMatching:
    """Computation of the distribution-matching loss and its gradient, with groups of classes in parallel."""

    run: Condensation
    parallel: ParallelMap
    match: str
    chunk: int | None

    def own_distance(self, network: Network, step: int, limit: int, loss: Match) -> tuple[Tensor, Tensor]:
        """Compute the loss with the user's function, and the gradient of the loss with respect to the synthetic images.

        The loss is the sum over classes of the function's value for the embeddings of real and synthetic images.
        """
        run, classes, images = self.run, list(self.run.rows), self.run.synthetic().split(self.run.counts)

        def group_distance(network: Network, group: slice) -> tuple[Tensor, Tensor]:
            batches = [run.transform(run.sample(c, limit, step, c, "real"), step, c) for c in classes[group]]
            real = embed_real(network, torch.cat(batches), self.chunk).split([len(batch) for batch in batches])

            def augment(images: Tensor, position: int) -> Tensor:
                return run.transform(images, step, classes[group][position])

            def distance(part: slice, synthetic: Sequence[Tensor]) -> Tensor:
                return torch.stack([_own_loss(loss, *pair) for pair in zip(real[part], synthetic, strict=True)]).sum()

            return class_distance(
                network, torch.cat(images[group]), run.counts[group], distance,
                augment=None if run.augment is None else augment, chunk=self.chunk,
            )  # fmt: skip

        groups = list(class_groups(network, run.images, run.counts, self.chunk))
        distances, gradients = zip(*self.parallel(group_distance, groups), strict=True)
        return torch.stack(distances).sum(), torch.cat(gradients)

    def real_means(self, network: Network, step: int, limit: int) -> Tensor:
        """Return the mean embeddings [K, d] of at most `limit` real images of each class."""
        run, classes = self.run, list(self.run.rows)
        sizes = [min(len(rows), limit) for rows in run.rows.values()]

        def group_means(network: Network, group: slice) -> Tensor:
            batches = [run.transform(run.sample(c, limit, step, c, "real"), step, c) for c in classes[group]]
            return embedding_means(network, torch.cat(batches), sizes[group], match=self.match, chunk=self.chunk)

        groups = list(class_groups(network, run.images, sizes, self.chunk))
        return torch.cat(self.parallel(group_means, groups))

    def distance(self, network: Network, step: int, means: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance of the mean embeddings of synthetic images from the `means` of real images.

        Also return its gradient with respect to the synthetic images.
        """
        run, classes, images = self.run, list(self.run.rows), self.run.synthetic().split(self.run.counts)

        def group_distance(network: Network, group: slice) -> tuple[Tensor, Tensor]:
            def augment(images: Tensor, position: int) -> Tensor:
                return run.transform(images, step, classes[group][position])

            return distance_to_means(
                network, means[group], torch.cat(images[group]), run.counts[group],
                match=self.match, augment=None if run.augment is None else augment, chunk=self.chunk,
            )  # fmt: skip

        groups = list(class_groups(network, run.images, run.counts, self.chunk))
        distances, gradients = zip(*self.parallel(group_distance, groups), strict=True)
        return torch.stack(distances).sum(), torch.cat(gradients)


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
