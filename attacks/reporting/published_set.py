"""Comparison of a published set with training records and held-out records, to measure what the set reveals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attacks.membership import nearest
from attacks.reporting._findings import evaluate_scores
from attacks.reporting.similarity import PSNR_LEVELS, closest_images
from attacks.statistics import OperatingPoint
from distillkit._utils import check
from distillkit.sets import Images, LabeledImages, StoredImages, as_set

__all__ = ["Leaks", "leaks"]

_COPY_DB = 48.13
"""PSNR of a root mean squared difference of 1/255, one level of 8-bit pixels."""

_CLOSE_DB = float(PSNR_LEVELS[1])
_VALUES = 1 << 24
"""Number of pixel values of records that are read at a time."""


@dataclass(frozen=True)
class Leaks:
    """Leaks of a published set, as `leaks` returns them. Print it to see a table.

    Attributes:
        images: number of published images.
        copies: share of the images that equal a training record up to the rounding of 8-bit pixels, that is, have a
            PSNR of at least 48.13 dB to it.
        close: share of the images that have a PSNR of at least 25 dB to some training record, including the copies.
        close_held_out: share of the images that have a PSNR of at least 25 dB to some held-out record. Compare `close`
            with this share, which is not due to training. If there are fewer held-out records than training records,
            this share is too small for the comparison.
        nearest: rates of the attack `attacks.membership.nearest` at about 1 % false positives. The threshold is chosen
            on half of the held-out records. The rates are counted on the other half, and on the training records from
            which the set was made (argument `used` of the function `leaks`).
        auc: area under the ROC curve of this attack.
    """

    images: int
    copies: float
    close: float
    close_held_out: float
    nearest: OperatingPoint
    auc: float

    def record(self) -> dict[str, Any]:
        """Return the results as JSON values, with the counts and the confidence interval of each rate."""
        rates = {name: asdict(rate) for name, rate in (("tpr", self.nearest.tpr), ("fpr", self.nearest.fpr))}
        return {
            "images": self.images, "copies": self.copies, "within_25_db": self.close,
            "within_25_db_of_held_out": self.close_held_out, "nearest": {**rates, "auc": self.auc},
        }  # fmt: skip

    def __str__(self) -> str:
        found = (
            ("images that copy a training record", f"{100 * self.copies:.1f} %"),
            (f"images within {_CLOSE_DB:g} dB of a training record", f"{100 * self.close:.1f} %"),
            (f"images within {_CLOSE_DB:g} dB of a held-out record", f"{100 * self.close_held_out:.1f} %"),
            ("used records that the attack `nearest` reveals", str(self.nearest.tpr)),
            ("held-out records that it takes for used ones", str(self.nearest.fpr)),
        )
        return "\n".join(f"{name:<46} {value}" for name, value in found)

    __repr__ = __str__


def leaks(
    small: Images,
    train: Images | StoredImages,
    held_out: Images | StoredImages,
    *,
    used: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Leaks:
    """Measure what the images of a set reveal of the records that the set was made from.

    Call it on every set before you publish it. The measurement needs no model, because it compares pixels, clamped to
    [0, 1]. The result is a lower bound: other attacks may find more, and labels, which are not examined, may also
    reveal records.

    Args:
        small: the published set, with at least two different images.
        train: the training records from which `small` was made. A `StoredImages` is read in parts.
        held_out: records from the same distribution that were not used to make the set; at least 200, so that a rate of
            1 % false positives can be measured.
        used: indices of the records in `train` that the set was made from, int [k], if not all were used: for a
            coreset, the selected records. Only these records then count as members when the membership attack `nearest`
            is evaluated. Default: all records.
        device: device on which the images are compared. Default: the device of `small`.

    Raises:
        TypeError, ValueError: the sets differ in normalization or shape; one of them is empty; `used` does not contain
            indices of records in `train`; or all images of `small` are equal.
    """
    small = as_set(small, name="small")
    real, others = _opened(train, "train", 1), _opened(held_out, "held_out", 2)
    for name, data in (("train", real), ("held_out", others)):
        small.require_compatible(data[:0].read() if isinstance(data, StoredImages) else data, names=("small", name))
    images = small.to(small.images.device if device is None else check.device(device)).pixels().float()
    if len(images.flatten(1).unique(dim=0)) < 2:
        raise ValueError(
            f"small must hold at least 2 different images, because the attack compares two; got {len(small)} images"
        )
    members = torch.arange(len(real)) if used is None else _used(used, len(real))
    levels, scores = zip(*(_compared(images, data) for data in (real, others)), strict=True)
    area, point = evaluate_scores(scores[0][members], scores[1], 1)
    pairs = ((levels[0], _COPY_DB), (levels[0], _CLOSE_DB), (levels[1], _CLOSE_DB))
    copies, close, close_held_out = (float((found >= decibels).double().mean()) for found, decibels in pairs)
    return Leaks(len(small), copies, close, close_held_out, point, area)


def _compared(images: Tensor, data: LabeledImages | StoredImages) -> tuple[Tensor, Tensor]:
    """Compute how similar published images and real images (records) are.

    Args:
        images: pixels of the M published images.
        data: set of N real images.

    Returns:
        The PSNR between each published image and its nearest record, [M]; and each record's membership score by
        `attacks.membership.nearest`, [N].
    """
    levels, scores = torch.full((len(images),), -torch.inf, dtype=torch.float64), []
    for part in _parts(data, max(1, _VALUES // images[0].numel())):
        records = part.to(images.device).pixels().float()
        levels = torch.maximum(levels, closest_images(records, images)[0].cpu())
        scores.append(nearest(images, records).cpu())
    return levels, torch.cat(scores)


def _parts(data: LabeledImages | StoredImages, size: int) -> Iterator[LabeledImages]:
    for rows in torch.arange(len(data)).split(size):
        yield data.read(rows) if isinstance(data, StoredImages) else data[slice(int(rows[0]), int(rows[-1]) + 1)]


def _opened(data: Images | StoredImages, name: str, least: int) -> LabeledImages | StoredImages:
    found = data if isinstance(data, StoredImages) else as_set(data, name=name)
    if len(found) < least:
        raise ValueError(f"{name} must hold at least {least} image{'s' * (least > 1)}, got {len(found)}")
    return found


def _used(used: Tensor, count: int) -> Tensor:
    if not isinstance(used, Tensor) or used.is_floating_point() or used.dtype == torch.bool:
        raise TypeError(f"used must be an int tensor [k] of indices, got {getattr(used, 'dtype', type(used).__name__)}")
    if used.ndim != 1 or not len(used) or int(used.min()) < 0 or int(used.max()) >= count:
        raise ValueError(f"used must hold at least one index of a record of train, 0 to {count - 1}, [k]")
    return used.cpu().unique()
