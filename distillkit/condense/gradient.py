"""Gradient matching: DC and DSA, with an inner training of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.augment import Augmentation, augmented, require_augmentation
from distillkit.condense._descent import Descent
from distillkit.condense._inner_loop import fix_statistics, inner_epochs, trainable
from distillkit.condense._parameter_gradient import Metric, distance_to_target, parameter_gradient
from distillkit.condense._state import Progress, Resume, identity_of, named
from distillkit.condense.initialization import class_starts
from distillkit.networks._validation import check_network, require_sampler
from distillkit.networks.samplers import NetworkSampler
from distillkit.normalization import Normalization
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, LabeledImages, Labels, as_set

__all__ = ["gradient_matching", "loops_for"]

_INNER = ((1, 1), (10, 50), (20, 25), (30, 20), (40, 15), (50, 10), (100, 2))
_STATISTICS_IMAGES = 16


def loops_for(ipc: int) -> tuple[int, int]:
    """How long DC trains for a number of images per class: (outer, inner) loops, the published ones and those between.

    Outer are the matching steps for each network, inner the epochs of its training between two of them.

    The outer number is `ipc`, images per class. The inner one is linear between the published points (1, 1), (10, 50),
    (20, 25), (30, 20), (40, 15), (50, 10), and (100, 2), which the authors gave later; rounded half up; 2 from there
    on. So every published pair comes out as published, and every other ipc, at which the released code exits, has one.

    >>> loops_for(10), loops_for(15), loops_for(200)
    ((10, 50), (15, 38), (200, 2))
    """
    ipc = check.positive_int(ipc, "ipc")
    for (low, at_low), (high, at_high) in pairwise(_INNER):
        if ipc <= high:
            return ipc, math.floor(at_low + (at_high - at_low) * (ipc - low) / (high - low) + 0.5)
    return ipc, _INNER[-1][1]


@torch.enable_grad()
def gradient_matching(
    images: Images,
    labels: Labels | None = None,
    *,
    networks: NetworkSampler,
    ipc: int = 10,
    iterations: int = 1000,
    loops: tuple[int, int] | None = None,
    metric: Metric = "row_cosine",
    init: str | LabeledImages = "noise",
    classes: Sequence[int] | None = None,
    batch_real: int | None = 256,
    lr: float = 0.1,
    momentum: float = 0.5,
    lr_net: float = 0.01,
    batch_net: int = 256,
    augment: Augmentation | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    callback: Callable[[Progress], object] | None = None,
    resume: Resume | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Condense a set by gradient matching (DC, DSA): images that train a network as the real ones would.

    They are learned to give a network the parameter gradient that the real images give it, while it trains on them.

    Each iteration draws a network and goes `outer` times through: (1) one step of SGD with momentum on the pixels,
    down the sum over classes c of D(grad CE(synthetic images of c), grad CE(real images of c)); (2) `inner` epochs of
    SGD on the network, with the synthetic set (not after the last matching step). Algorithm 1 of Zhao, Mopuri and
    Bilen, "Dataset condensation with gradient matching" (DC, ICLR 2021); with `augment=DSA()`, Algorithm 1 of Zhao and
    Bilen, "Dataset condensation with differentiable Siamese augmentation" (ICML 2021).

    Args:
        images: the real images, float [N, C, H, W] in the normalised space, or a `LabeledImages` (then no `labels`).
        labels: their class indices, int [N].
        networks: where networks come from, `RandomNetworks(factory)` in the papers; what is drawn is copied, so its
            parameters may be frozen. Batch norm that uses batch statistics is given, before each matching step, those
            of a real batch of all classes (16 each) and keeps them for that step: a class alone would be normalised
            to the same mean as any other. It uses the batch's again while the network is trained. Dropout stays off.
        ipc: synthetic images per class.
        iterations: networks that are drawn.
        loops: (outer, inner); default `loops_for(ipc)`.
        metric: D; see `losses.matching.gradient_distance`.
        init: see `initial_images`. The papers start from noise.
        classes: the classes to condense; default those that own a real image.
        batch_real: real images per class and matching step, without replacement; a class that has fewer gives all.
            None: always all.
        lr: step size on the pixels.
        momentum: of the pixels' SGD, in [0, 1).
        lr_net: step size on the network (SGD without momentum).
        batch_net: images per step of the network's training.
        augment: applied with one draw per class and matching step to its real and its synthetic images (Siamese), and
            image by image while the network is trained.
        num_classes, normalization: of the data, when `images` is a tensor; see `LabeledImages`.
        generator: an int seed, or a CPU generator, from which one number is drawn; all else derives from it, the
            iteration, the matching step and the class.
        chunk: images per pass through the network; default by device and size (see `chunking.chunk_size`). It bounds
            memory and changes results by rounding only.
        callback: called with a `Progress` after each iteration; its `step` counts iterations, its `loss` is the mean
            over the iteration's matching steps.
        resume: a state of `Progress.state()`, or the file that `save_state` wrote: go on from there, to the same bits
            as without the interruption. Pass the other arguments again; `iterations` counts from the very beginning.
        progress: whether long work shows a bar (see `distillkit._utils.progress`), which counts matching steps.

    Returns:
        A set of `ipc` images per class, class-major, in the same normalised space, never clipped; `info` says how it
        was made, which classes were `absent` in the data, and for which ones the start repeats images.

    Raises:
        TypeError, ValueError: what is wrong with which argument.
        FloatingPointError: the loss is no longer finite.

    Deviations from the released code: randomness is derived, not taken from the clock; loops exist for every ipc;
    `iterations`, not one more; running statistics of batch norm are set to the mixed batch's, where the code moves
    them a tenth of the way from their initial 0 and 1.
    """
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    networks = require_sampler(networks)
    ipc = check.positive_int(ipc, "ipc")
    iterations = check.positive_int(iterations, "iterations", least=0)
    batch_net = check.positive_int(batch_net, "batch_net")
    lr_net = check.real_number(lr_net, "lr_net", least=0.0)
    require_augmentation(augment, real.normalization)
    outer, inner = loops_for(ipc) if loops is None else check.sequence(loops, "loops", "numbers (outer, inner)", 2)
    check.positive_int(outer, "loops[0]")
    check.positive_int(inner, "loops[1]", least=0)
    limit = len(real) if batch_real is None else check.positive_int(batch_real, "batch_real")

    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    rows, start, counts = class_starts(real, ipc, init, classes, seed)
    options: dict[str, object] = {"loops": [outer, inner], "metric": metric, "batch_real": batch_real}
    options |= {"lr_net": lr_net, "batch_net": batch_net}
    arguments = {
        "method": "gradient matching",
        "networks": type(networks).__name__,
        "augment": None if augment is None else named(augment),
        **options,
        "classes": {str(c): [len(own), n] for (c, own), n in zip(rows.items(), counts, strict=True)},
    }
    run = Descent(start.images, lr, momentum, iterations, arguments, seed, resume, lambda: identity_of(real, networks))

    def batch(c: int, count: int, *keys: int | str) -> Tensor:
        index = rows[c]
        if len(index) > count:
            index = index[torch.randperm(len(index), generator=derive(run.seed, *keys, c))[:count]]
        return real.images.index_select(0, index.to(real.images.device))

    loss = None
    total = iterations * outer
    with bar(total, "gradient matching", progress=progress, done=run.done * outer) as shown:
        for i in range(run.done, iterations):
            drawn = networks.draw(derive(run.seed, i, "network"))
            if loss is None:
                check_network(drawn, run.images, classes=real.num_classes, name="networks")
            network, parameters, norms = trainable(drawn)
            losses = []
            for j in range(outer):
                if norms:
                    fix_statistics(
                        network, norms, torch.cat([batch(c, _STATISTICS_IMAGES, i, j, "mixed") for c in rows])
                    )
                distances, gradients = [], []
                for c, own in zip(rows, run.images.split(counts), strict=True):
                    seen, leaf = batch(c, limit, i, j, "real"), own
                    if augment is not None:
                        draw, leaf = derive(run.seed, i, j, c, "augment"), own.clone().requires_grad_()
                        seen = augmented(augment, seen, draw.clone_state(), siamese=True)
                        own = augmented(augment, leaf, draw, siamese=True)
                    of_class = start.labels.new_full((max(len(seen), len(own)),), c)
                    target = parameter_gradient(network, parameters, seen, of_class[: len(seen)], chunk=chunk)
                    distance, gradient = distance_to_target(
                        network, parameters, own, of_class[: len(own)], target, metric=metric, chunk=chunk
                    )
                    if augment is not None:
                        (gradient,) = torch.autograd.grad(own, leaf, gradient)
                    distances.append(distance)
                    gradients.append(gradient)
                losses.append(run.descend(torch.stack(distances).sum(), torch.cat(gradients)))
                shown.update()
                if j < outer - 1:
                    inner_epochs(
                        network,
                        parameters,
                        norms,
                        run.images,
                        start.labels,
                        epochs=inner,
                        lr=lr_net,
                        batch=batch_net,
                        augment=augment,
                        generator=derive(run.seed, i, j, "train"),
                        chunk=chunk,
                    )
            loss = sum(losses) / outer
            run.report(callback, loss)
    info = {
        "method": "gradient matching",
        "networks": repr(networks),
        "augment": None if augment is None else repr(augment),
        **options,
        "lr": lr,
        "momentum": momentum,
        "ipc": ipc,
        "iterations": iterations,
        "loss": loss,
        **start.info,
        "absent": (real.counts() == 0).nonzero().flatten().tolist(),
        **provenance(generator, seed=run.seed),
    }
    return start.replace(images=run.images, info=info)
