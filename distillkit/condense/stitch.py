"""RDED: a small set whose images are stitched from the most recognizable crops of real images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit._utils.user_warnings import warn
from distillkit.chunking import chunk_size
from distillkit.labels._teacher import describe_teacher, teacher_logits, try_teacher
from distillkit.networks._factory import frozen_copy
from distillkit.normalization import Normalization
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, LabeledImages, Labels, StoredImages
from distillkit.sets._class_index import class_rows, warn_of_repeats
from distillkit.sets._info import derived_info
from distillkit.sets._stored import RealImages
from distillkit.sets.as_set import open_set

_SMALL = 96
"""By default, images with a shorter side below this number of pixels are not divided into several crops."""


@torch.no_grad()
def stitch(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    observer: nn.Module,
    ipc: int = 10,
    factor: int | None = None,
    pool: int | None = 300,
    crops: int = 5,
    min_scale: float = 0.08,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    device: torch.device | str | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Select the crops of real images that a trained observer network recognizes best, and stitch them together (RDED).

    The function makes `crops` random crops of each of `pool` random images of a class. For each image, it selects the
    crop to which the observer gives the largest probability of the true class. The best `ipc * factor**2` of these
    crops are combined into `ipc` images, each a grid of `factor` x `factor` crops. **Every pixel of the result comes
    from a real image**, so publishing the set publishes parts of training images.

    With `factor=1`, each image of the result is one crop. With `factor=1` and `min_scale=1`, the function selects the
    `ipc` whole images of each class with the largest probability of the true class.

    Args:
        images: the real images, a set or anything that `sets.as_set` accepts. A `StoredImages` is read class by class.
        labels: class indices int [N]; omit them if `images` is a set.
        observer: network that was trained on the same classes, with the same normalization. A copy in eval mode is
            used.
        ipc: number of images per class.
        factor: number of crops along each side of an image. Default: 1 for images whose shorter side is below 96
            pixels, otherwise 2. Small images are not divided, because a network that is trained on 32-pixel grids of
            smaller crops does not recognize whole images. The authors also use 1 for CIFAR and Tiny-ImageNet.
        pool: number of images per class that are drawn at random, without replacement, and whose crops are scored. With
            None, all images are used.
        crops: number of random crops of each image in the pool.
        min_scale: smallest area of a crop, as a fraction of the image's area. 1 keeps the whole image.
        classes: the classes to select; default: all classes with an image.
        num_classes, normalization: properties of the data if `images` is a tensor; see `LabeledImages`.
        device: device on which crops are made and scored. Default: the device of the observer's parameters.
        generator: an int seed, or a CPU generator from which one seed is drawn. Each class derives its own generators
            from the seed, so several machines can each process some of the classes.
        chunk: number of crops per forward pass; the default depends on device and image size.
        progress: whether to show a progress bar.

    Returns:
        A set, sorted by class, on the device of the images. Its `info` states that the set publishes real pixels
        (`publishes`). It also records the observer's fingerprint and accuracy (`observer`), the mean probability of the
        true class (`confidence`), the classes without images (`absent`), and the classes with repeated crops
        (`with_replacement`).

    Raises:
        TypeError, ValueError: an argument is invalid, or the observer's accuracy on the pool is not clearly better than
            chance.

    Paper: Sun et al., "On the Diversity and Realism of Distilled Dataset: An Efficient Dataset Distillation Paradigm"
    (RDED, CVPR 2024), section 4. As in the authors' code, the observer sees each crop in the middle of an image of
    zeros in the normalized space; the crop is not enlarged.

    Deviations: crops have the aspect ratio of the image, while those of the authors' code are square. The authors' code
    saves the images as JPEG; here they are not compressed. A class with too few images repeats its best crops; the
    authors' code fails.
    """
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    ipc = check.positive_int(ipc, "ipc")
    crops = check.positive_int(crops, "crops")
    min_scale = check.real_number(min_scale, "min_scale", least=0.0, most=1.0)
    factor = _checked_factor(factor, real.shape)
    wanted = ipc * factor**2
    if pool is not None and check.positive_int(pool, "pool") < wanted:
        raise ValueError(f"pool must be at least ipc * factor**2 = {wanted}, one image for each crop, got {pool}")
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    rows = {
        c: own[torch.randperm(len(own), generator=derive(seed, c, "pool"))[:pool].sort().values]
        for c, own in class_rows(real, classes).items()
    }
    warn_of_repeats("ipc * factor**2", wanted, {c: len(own) for c, own in rows.items()})
    twin = frozen_copy(observer) if isinstance(observer, nn.Module) else observer
    if device is not None and isinstance(twin, nn.Module):
        twin = twin.to(check.device(device))
    accuracy = try_teacher(twin, real[torch.cat(list(rows.values()))], "the pool", role="observer")
    scoring = _Scoring(twin, factor, crops, min_scale, chunk)
    made, confidences = [], []
    with bar(len(rows), "stitch", unit="class", progress=progress) as shown:
        for c, own in rows.items():
            best, scores = scoring.best_crops(real, own, c, derive(seed, c, "crops"))
            index = scores.argsort(descending=True, stable=True)[:wanted]
            index = index.repeat(-(-wanted // len(index)))[:wanted]
            made.append(_mosaics(best[index], factor, real.shape))
            confidences.append(scores[index].exp())
            shown.update()
    info = {
        "method": "stitch", "publishes": "pixels of real images", "ipc": ipc, "factor": factor, "pool": pool,
        "crops": crops, "min_scale": min_scale, "device": str(best.device),
        "observer": {**describe_teacher(observer), "accuracy": accuracy},
        "confidence": float(torch.cat(confidences).mean()),
        "absent": [c for c in range(real.num_classes) if c not in rows] if classes is None else [],
        "with_replacement": [c for c, own in rows.items() if len(own) < wanted],
        **provenance(generator, seed=seed),
    }  # fmt: skip
    like = real._empty
    found = torch.cat(made).to(like.images.device)
    own_labels = torch.tensor(list(rows)).repeat_interleave(ipc).to(found.device)
    info = derived_info(info, [real.info], "stitch", "selection by an observer of unknown origin")
    return like.replace(images=found, labels=own_labels, columns={}, info=info)


@dataclass(frozen=True)
class _Scoring:
    """Selection of the best of several random crops of each real image.

    The score of a crop is the log-probability that the trained network `observer` predicts for its true class.
    """

    observer: nn.Module
    factor: int
    crops: int
    min_scale: float
    chunk: int | None

    def best_crops(self, real: RealImages, rows: Tensor, c: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the best of several random crops of each image of class `c`, and the scores of these crops."""
        _, h, w = real.shape
        boxes = _boxes(len(rows), self.crops, self.min_scale, (h, w), generator)
        like = next(self.observer.parameters(), torch.empty(0))
        best, scores = [], []
        size = max(1, chunk_size(like.new_empty(0, *real.shape), self.chunk) // self.crops)
        for some, own in zip(rows.split(size), boxes.split(size), strict=True):
            pictures = real._take(some).to(like.device)
            cut = torch.stack(
                [self._cut(picture, box) for picture, five in zip(pictures, own.tolist()) for box in five]
            )
            score = self._score(cut.to(like.dtype), c, (h, w)).view(len(some), self.crops)
            first = score.argsort(dim=1, descending=True, stable=True)[:, 0]
            best.append(cut[(first + self.crops * torch.arange(len(some))).to(cut.device)])
            scores.append(score.gather(1, first[:, None])[:, 0])
        return torch.cat(best), torch.cat(scores)

    def _cut(self, picture: Tensor, box: Sequence[int]) -> Tensor:
        """Crop a picture [C, H, W] to `box` (top, left, height, width), and resize the crop.

        The size of the result is [C, H // f, W // f], where f is `self.factor`.
        """
        top, left, height, width = box
        crop = picture[:, top : top + height, left : left + width]
        size = (picture.shape[1] // self.factor, picture.shape[2] // self.factor)
        if crop.shape[1:] == size:
            return crop
        crop = crop[None].float() if crop.dtype.itemsize < 4 else crop[None]  # not defined in half precision on the CPU
        return F.interpolate(crop, size, mode="bilinear", antialias=True, align_corners=False)[0].to(picture)

    def _score(self, cut: Tensor, c: int, size: tuple[int, int]) -> Tensor:
        """Return the log-probabilities of class `c` that the network `observer` predicts for crops, float64 on the CPU.

        Each crop in `cut` is placed in the middle of an image of zeros with the given `size` (height, width).
        """
        down, right = size[0] - cut.shape[2], size[1] - cut.shape[3]
        framed = F.pad(cut, (right // 2, right - right // 2, down // 2, down - down // 2))
        logits = teacher_logits(self.observer, framed, self.chunk)
        score = logits.double().log_softmax(1)[:, c].cpu()
        if not bool(score.isfinite().all()):
            raise ValueError(f"observer must return finite logits, but it does not for crops of class {c}")
        return score


def _checked_factor(factor: int | None, shape: tuple[int, int, int]) -> int:
    side = min(shape[1:])
    if factor is None:
        return 1 if side < _SMALL else 2
    factor = check.positive_int(factor, "factor")
    if factor > side:
        raise ValueError(f"factor must be at most the shorter side of the images, {side}, got {factor}")
    if factor > 1 and side < _SMALL:
        warn(
            f"factor={factor} makes mosaics of crops of {shape[1] // factor}x{shape[2] // factor} pixels. Below "
            f"{_SMALL} pixels, networks that are trained on mosaics may not recognize whole images; pass factor=1"
        )
    return factor


def _boxes(count: int, crops: int, min_scale: float, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw `crops` random crops for each of `count` images.

    The result, int64 [count, crops, 4], contains the top, left, height and width of each crop in pixels. The area of a
    crop, as a fraction of the image's area, is uniform in [min_scale, 1].
    """
    area, down, right = torch.rand(3, count, crops, generator=generator, dtype=torch.float64)
    share = (min_scale + (1 - min_scale) * area).sqrt()
    height, width = ((share * side).round().clamp_min(1) for side in size)
    top, left = (down * (size[0] - height + 1)).floor(), (right * (size[1] - width + 1)).floor()
    return torch.stack([top, left, height, width], -1).long()


def _mosaics(crops: Tensor, factor: int, shape: tuple[int, int, int]) -> Tensor:
    """Stitch n * factor^2 crops, sorted by decreasing score, into n images of `factor` x `factor` cells.

    The best n crops fill the first cells of the n images, the next n crops the second cells, and so on. If `factor`
    does not divide a side of the image, the first rows or columns of cells are one pixel larger.
    """
    n = len(crops) // factor**2
    cells = crops.unflatten(0, (factor, factor, n))
    heights, widths = ([side // factor + (k < side % factor) for k in range(factor)] for side in shape[1:])
    return torch.cat(
        [
            torch.cat([F.interpolate(cell, (h, w)) for cell, w in zip(line, widths, strict=True)], 3)
            for line, h in zip(cells, heights, strict=True)
        ],
        2,
    )
