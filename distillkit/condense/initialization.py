"""Initial synthetic images of a condensation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages, StoredImages, TiledImages, Tiles
from distillkit.sets._class_index import (
    class_indices,
    class_labels,
    class_rows,
    random_rows,
    warn_of_repeats,
    with_class_labels,
)
from distillkit.sets._info import derived_info
from distillkit.sets._stored import RealImages
from distillkit.sets.as_set import open_set

_CHUNK = 256
"""Number of images that are read at a time."""

_INITS = ("real", "noise", "statistics", "statistics-whole-set")


def class_statistics(real: LabeledImages | StoredImages, *, whole_set: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of the pixels of each class and channel, in the set's normalized space.

    FedLGD samples its initial images from these statistics.

    Args:
        real: a set with class indices. Classes without images get mean 0 and std 0.
        whole_set: whether to divide by the number of pixels of the whole set, as the code of FedLGD's authors does. By
            default, the divisor is the number of pixels of the class. In both cases, the mean m is the sum of the
            class's pixel values, divided by the divisor. The standard deviation is sqrt(s - m^2), where s is the sum of
            the squared pixel values, divided by the divisor. With K balanced classes, `whole_set` thus multiplies the
            means by 1/K.

    Returns:
        The means [K, C] and the standard deviations [K, C]. The standard deviations use the population formula
        (correction 0).
    """
    real = open_set(real, name="real")
    check.boolean(whole_set, "whole_set")
    means = real._empty.images.new_zeros(real.num_classes, real.shape[0])
    stds, area = torch.zeros_like(means), real.shape[1] * real.shape[2]
    for c, rows in class_rows(real).items():
        pixels = means.new_empty(real.shape[0], len(rows) * area)
        for some, out in zip(rows.split(_CHUNK), pixels.split(_CHUNK * area, 1)):
            out.copy_(real._take(some).transpose(0, 1).flatten(1))
        if whole_set:
            share = len(rows) / len(real)
            mean = pixels.mean(1) * share
            variance = pixels.square().mean(1) * share - mean.square()
            means[c], stds[c] = mean, variance.clamp_min(0).sqrt()
        else:
            means[c], stds[c] = pixels.mean(1), pixels.std(1, correction=0)
    return means, stds


def images_from_statistics(
    means: Tensor, stds: Tensor, *, ipc: int, size: tuple[int, int], generator: int | torch.Generator = 0
) -> Tensor:
    """Sample images with normally distributed pixels, given a mean and a standard deviation per class and channel.

    In federated learning, a client can send these statistics instead of images. The result, [K * ipc, C, H, W], is
    sorted by class.

    Args:
        means: means, float [K, C], from `class_statistics`, possibly averaged over clients.
        stds: standard deviations, float [K, C].
        ipc: number of images per class.
        size: height and width (H, W) of the images.
        generator: an int seed, or a CPU generator.
    """
    check.matrix(means, "means")
    check.matrix(stds, "stds")
    size = cast(tuple[int, int], check.sequence(size, "size", "numbers of pixels (H, W)", 2))
    for side in size:
        check.positive_int(side, "size")
    if means.shape != stds.shape or bool((stds < 0).any()):
        raise ValueError(
            f"means and stds must be [K, C], no std below 0, got {list(means.shape)} and {list(stds.shape)}"
        )
    ipc = check.positive_int(ipc, "ipc")
    k, c = means.shape
    noise = torch.randn(k, ipc, c, *size, generator=as_generator(generator), dtype=means.dtype).to(means.device)
    images = (means.view(k, 1, c, 1, 1) + noise * stds.view(k, 1, c, 1, 1)).flatten(0, 1)
    return check.finite(images, "the images", f"means or stds are too large for {means.dtype}")


def initial_images(
    real: LabeledImages | StoredImages,
    ipc: int,
    *,
    init: str | LabeledImages = "real",
    classes: Sequence[int] | None = None,
    parametrize: Tiles | None = None,
    generator: int | torch.Generator = 0,
) -> LabeledImages:
    """Return `ipc` initial images per class for a condensation, sorted by class, in the real set's normalized space.

    Condensers call this function with their argument `init`. Call it to inspect the initial images, or in your own
    loop.

    Args:
        real: the set to condense, labeled with class indices. Of a `StoredImages`, only the drawn images are read.
        ipc: number of images per class.
        init: source of the images. `"real"`: random real images of the class without replacement; a class with too few
            images uses all of them and repeats random ones. `"noise"`: N(0, 1) per pixel (DC, DM). `"statistics"`: each
            pixel from N(mean, std) of its class and channel (FedLGD's paper). `"statistics-whole-set"`: the same, with
            the statistics of `class_statistics(real, whole_set=True)` (the code and results of FedLGD's authors). You
            can also pass a set: its images are copied, and its labels determine the number of images per class. If its
            labels are soft, the class of an image is read from the column `class` or, without this column, is the
            largest entry of its soft label.
        classes: the classes for which to make images; default: all classes with a real image. For a class without real
            images, `init` must be `"noise"`.
        parametrize: parametrization of the images, see `sets.Tiles`, or None. The result then is a `TiledImages` with
            `ipc` stored images per class. Real images are shrunk to tiles, while noise is drawn for whole stored
            images. If `init` is a set with the same tiles, its stored images are used unchanged; the images of any
            other set are shrunk to tiles.
        generator: an int seed, or a CPU generator. The real images that are drawn for a class do not depend on the
            other `classes`, so several machines can each process some of the classes.

    Returns:
        The initial set. Its `info` records `init`, the classes without images (`absent`), and the classes with repeated
        images (`with_replacement`). If `init` is a set with soft labels, `start_classes` records whether the classes
        were read from the column `class` or from the largest entries.

    Raises:
        ValueError: the labels of `real` are soft, `init` is unknown, `init` needs real images of a class that has none,
            or the set passed as `init` has another shape or normalization than `real`.
    """
    real = open_set(real, name="real")
    ipc = check.positive_int(ipc, "ipc")
    if Tiles.require(parametrize) is not None:
        return _tiled(real, ipc, cast(Tiles, parametrize), init, classes, generator)
    generator = as_generator(generator)
    info: dict[str, object] = {"init": init if isinstance(init, str) else "given", "with_replacement": []}
    if isinstance(init, LabeledImages):
        return _given(real, init, classes, info)
    check.one_of(init, "init", _INITS)
    if init == "noise" and classes is not None:
        chosen = class_indices(classes, real.num_classes)
    else:
        chosen = list(rows := class_rows(real, classes))
    like, (c, h, w) = real._empty, real.shape
    if init == "real":
        warn_of_repeats("ipc", ipc, {c: len(own) for c, own in rows.items()})
        seed = int(torch.randint(2**62, (), generator=generator))
        drawn = [random_rows({c: own}, [ipc], derive(seed, c)) for c, own in rows.items()]
        info["with_replacement"] = [c for _, short in drawn for c in short]
        index = torch.cat([chosen for chosen, _ in drawn])
        images = real._take(index)
    elif init == "noise":
        noise = torch.randn(len(chosen) * ipc, c, h, w, generator=generator, dtype=like.images.dtype)
        images = noise.to(like.images.device)
    else:
        means, stds = class_statistics(real, whole_set=init == "statistics-whole-set")
        images = images_from_statistics(means[chosen], stds[chosen], ipc=ipc, size=(h, w), generator=generator)
    labels = torch.tensor(chosen).repeat_interleave(ipc).to(like.labels.device)
    info["absent"] = [c for c in range(real.num_classes) if c not in set(chosen)] if classes is None else []
    made = info if init == "noise" else derived_info(info, [real.info], "initial images")
    return like.replace(images=images, labels=labels, columns={}, info=made)


def _tiled(
    real: RealImages,
    ipc: int,
    tiles: Tiles,
    init: str | LabeledImages,
    classes: Sequence[int] | None,
    generator: int | torch.Generator,
) -> TiledImages:
    if isinstance(init, TiledImages) and init.tiles == tiles:
        groups = class_labels(init).view(-1, tiles.count)
        if bool((groups != groups[:, :1]).any()):
            raise ValueError("init must have images of a single class in each stored image, got mixed classes")
        init = init._with(images=init.stored, labels=groups[:, 0], columns={})
        stored = initial_images(real, ipc, init=init, classes=classes, generator=generator)
    elif init == "real" or isinstance(init, LabeledImages):
        whole = initial_images(real, ipc * tiles.count, init=init, classes=classes, generator=generator)
        if bool((whole.counts() % tiles.count).any()):
            counts = whole.counts().tolist()
            raise ValueError(
                f"init must have a multiple of {tiles.count} images in each class for {tiles}, got {counts}"
            )
        stored = whole._with(images=tiles.encode(whole.images), labels=whole.labels[:: tiles.count])
    else:
        stored = initial_images(real, ipc, init=init, classes=classes, generator=generator)
    return TiledImages.wrap(stored, tiles)


def _given(
    real: RealImages, start: LabeledImages, classes: Sequence[int] | None, info: dict[str, object]
) -> LabeledImages:
    like = real._empty
    like.require_compatible(start)
    if start.labels.ndim == 2:
        info["start_classes"] = "column" if "class" in start.columns else "largest entry of a row"
        start = with_class_labels(start)
    rows = class_rows(start, classes)
    index = torch.cat(list(rows.values())).to(start.images.device)
    info["absent"] = [c for c in range(real.num_classes) if c not in rows] if classes is None else []
    info = derived_info(info, [start.info], "initial images")
    return start[index].to(like.images.device, like.images.dtype).replace(columns={}, info=info)
