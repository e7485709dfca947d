"""Comparison of a published set with training records and held-out records, to measure what the set reveals."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attacks.membership import nearest
from attacks.reporting._rates import evaluate_scores, is_significant
from attacks.reporting.copies import find_copies
from attacks.reporting.similarity import PSNR_LEVELS
from attacks.statistics import OperatingPoint, Rate
from distillkit._utils import check
from distillkit._utils.tables import Table
from distillkit.sets import Images, LabeledImages, StoredImages, as_set
from distillkit.sets.as_set import open_set

_CLOSE_DB = float(PSNR_LEVELS[1])
_VALUES = 1 << 24
"""Number of pixel values of records that are read at a time."""
_FEW = 200
"""Number of held-out records below which the rates are imprecise."""
SHARED = 0.01
"""Largest share of the held-out records that may be left out because they are training records, too."""


@dataclass(frozen=True)
class Leaks:
    """Leaks of a published set, as `leaks` returns them. Print it to see a table.

    A published image, or one of its tiles, may be an altered copy of a record: flipped, rotated by 90 degrees, shifted,
    recolored (darker or inverted, for example) or smaller. It then counts like an unaltered copy; see `leaks`.

    Attributes:
        images: number of published images.
        publishes: what the set itself says that it publishes (`info["publishes"]`), such as "pixels of real images"; ""
            if it says nothing.
        copies: share of the images that equal a training record up to the rounding of 8-bit pixels, as it is or
            altered.
        close: share of the images that have a PSNR of at least 25 dB to some training record, as it is or altered,
            including the copies.
        close_held_out: share of the images that have a PSNR of at least 25 dB to some held-out record, as it is or
            altered. Compare `close` with this share, which is not due to training. If there are fewer held-out records
            than training records, this share is too small for the comparison.
        nearest: rates of the attack `attacks.membership.nearest` at about 1 % false positives. The threshold is chosen
            on half of the held-out records. The rates are counted on the other half, and on the training records from
            which the set was made (argument `used` of the function `leaks`).
        auc: area under the ROC curve of this attack.
        altered: the same rates for the attack that scores a record by the PSNR of its closest copy, as it is or
            altered.
    """

    images: int
    publishes: str
    copies: float
    close: float
    close_held_out: float
    nearest: OperatingPoint
    auc: float
    altered: OperatingPoint

    @property
    def found(self) -> bool:
        """True if a leak was found: the set says that it publishes real data, an image is a copy of a training record,
        clearly more images are close to training records than to held-out ones, or an attack is better than guessing.
        """
        shares = self.close, self.close_held_out
        close, chance = (Rate.of(round(share * self.images), self.images) for share in shares)
        attacks = is_significant(self.nearest) or is_significant(self.altered)
        return bool(self.publishes) or self.copies > 0 or close.low > chance.high or attacks

    def record(self) -> dict[str, Any]:
        """Return the results as JSON values, with the counts and the confidence interval of each rate."""
        found: dict[str, Any] = {"images": self.images, "publishes": self.publishes, "copies": self.copies}
        found |= {"within_25_db": self.close, "within_25_db_of_held_out": self.close_held_out}
        for name, point in (("nearest", self.nearest), ("altered", self.altered)):
            found[name] = {"tpr": asdict(point.tpr), "fpr": asdict(point.fpr)}
        found["nearest"]["auc"] = self.auc
        return found

    def table(self) -> Table:
        """Return the results as a table of questions and answers, which a notebook shows as HTML."""
        verdict = "it leaks" if self.found else "no leak found, smaller leaks remain possible"
        cells = (
            ("verdict", f"{verdict}; it publishes {self.publishes}" if self.publishes else verdict),
            ("images that copy a training record", f"{100 * self.copies:.1f} %"),
            (f"images within {_CLOSE_DB:g} dB of a training record", f"{100 * self.close:.1f} %"),
            (f"images within {_CLOSE_DB:g} dB of a held-out record", f"{100 * self.close_held_out:.1f} %"),
            ("used records that the attack `nearest` reveals", str(self.nearest.tpr)),
            ("held-out records that it takes for used ones", str(self.nearest.fpr)),
            ("used records with a copy, maybe altered", str(self.altered.tpr)),
            ("held-out records that seem to have one", str(self.altered.fpr)),
        )
        return Table(["question", "answer"], cells, left=2)

    def __str__(self) -> str:
        return "\n".join(f"{name:<46} {value}" for name, value in self.table().cells)

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
    [0, 1]. It finds records that were flipped, rotated by 90 or 180 degrees, shifted by up to an eighth of the side,
    changed in brightness, contrast or color, inverted, halved in resolution, or put together as tiles, and combinations
    of these. It does not look for crops, zooms, other rotations, mixtures of records or strong noise, which it finds
    only while the image is still similar to the record. The result is a lower bound: other attacks may find more, and
    labels, which are not examined, may also reveal records. The same alterations are tried on held-out records, so that
    chance matches show.

    Cost: 100 images of 32 x 32 pixels and 5,000 records take a few CPU seconds.

    Args:
        small: the published set, with at least two different images.
        train: the training records from which `small` was made. A `StoredImages` is read in parts.
        held_out: records from the same distribution that were not used to make the set; fewer than 200 give a warning,
            because a rate of 1 % false positives cannot be measured with them.
        used: indices of the records in `train` that the set was made from, int [k], if not all were used: for a
            coreset, the selected records. Only these records then count as members when the membership attacks are
            evaluated. Default: all records.
        device: device on which the images are compared. Default: the device of `small`.

    Raises:
        TypeError, ValueError: the sets differ in normalization or shape; one of them is empty; `used` does not contain
            indices of records in `train`; all images of `small` are equal; more than 1 % of the held-out records are
            training records (up to 1 % are left out, with a warning); `held_out` contains images of `small`; or `small`
            contains all of `train` and more images. Exchanged arguments are the usual reason.
    """
    small = as_set(small, name="small")
    real, others = _opened(train, "train", 1), _opened(held_out, "held_out", 2)
    for name, data in (("train", real), ("held_out", others)):
        small.require_compatible(data._empty, names=("small", name))
    images = small.to(small.images.device if device is None else check.device(device)).pixels().float()
    if len(images.flatten(1).unique(dim=0)) < 2:
        raise ValueError(f"small must hold at least 2 different images to compare, but its {len(small)} are all equal")
    members = torch.arange(len(real))
    if used is not None:
        members = checked_indices(used, "used", len(real), "a record of train").unique()
    kept = _distinct(images, real, others)
    known, chance = _compared(images, real, torch.arange(len(real))), _compared(images, others, kept)
    area, point = evaluate_scores(known.scores[members], chance.scores, 2)
    altered = evaluate_scores(known.record_levels[members], chance.record_levels, 2)[1]
    shares = (known.copied, known.levels >= _CLOSE_DB, chance.levels >= _CLOSE_DB)
    copies, close, by_chance = (float(one.double().mean()) for one in shares)
    said = small.info.get("publishes") or ""
    publishes = said if isinstance(said, str) else ", ".join(map(str, said)) if isinstance(said, list) else "data"
    return Leaks(len(small), publishes, copies, close, by_chance, point, area, altered)


@dataclass(frozen=True, eq=False)
class _Compared:
    """Comparison of M published images with N records: level of each image, and whether it copies a record, [M]; each
    record's score by `nearest`, [N], and level, [N]."""

    levels: Tensor
    copied: Tensor
    scores: Tensor
    record_levels: Tensor


def _compared(images: Tensor, data: LabeledImages | StoredImages, rows: Tensor) -> _Compared:
    levels = torch.full((len(images),), -torch.inf, dtype=torch.float64)
    copied = torch.zeros(len(images), dtype=torch.bool)
    scores, record_levels = [], []
    for part in _parts(data, rows, max(1, _VALUES // images[0].numel())):
        records = part.to(images.device).pixels().float()
        found = find_copies(images, records)
        levels, copied = torch.maximum(levels, found.level.cpu()), copied | found.copied.cpu()
        scores.append(nearest(images, records).cpu())
        record_levels.append(found.record_level.cpu())
    return _Compared(levels, copied, torch.cat(scores), torch.cat(record_levels))


def _distinct(images: Tensor, real: LabeledImages | StoredImages, others: LabeledImages | StoredImages) -> Tensor:
    """Check that train and held-out records are different, and return the rows of the held-out records to use."""
    shown, known, aside = (digests(one) for one in (images, real, others))
    train, small = set(known), set(shown)
    kept = [row for row, digest in enumerate(aside) if digest not in train]
    shared, advice = len(aside) - len(kept), "held-out records must not have been used for the set"
    told = f"{shared} of {len(aside)} held-out records are also in train"
    if shared > SHARED * len(aside):
        usage = "the arguments are leaks(published set, its training records, other records)"
        raise ValueError(f"train and held_out must not share records, but {told}: {advice}; {usage}")
    if shared:
        warnings.warn(f"held_out: {told} and are left out", UserWarning, stacklevel=3)
    if taken := sum(aside[row] in small for row in kept):
        said = f"{taken} held-out records are in small: {advice}; are train and held_out exchanged?"
        raise ValueError(f"small and held_out must not share images, but {said}")
    if len(small) > len(train) and train <= small:
        exchanged = "are small and train exchanged?"
        raise ValueError(f"small contains all {len(train)} records of train and more images: {exchanged}")
    if len(kept) < _FEW:
        why = "a false-positive rate of 1 % cannot be measured and the rates say little"
        warnings.warn(f"held_out holds {len(kept)} records; with fewer than {_FEW}, {why}", UserWarning, stacklevel=3)
    return torch.tensor(kept)


def digests(data: LabeledImages | StoredImages | Tensor) -> list[bytes]:
    """Return a hash of the pixels of each image in `data`, a set or pixels [N, C, H, W]."""
    every, size = torch.arange(len(data)), max(1, _VALUES // math.prod(data.shape[-3:]))
    parts = [data] if isinstance(data, Tensor) else (part.pixels() for part in _parts(data, every, size))
    rows = (row for part in parts for row in (part.float() * 65535).round().to(torch.int32).cpu())
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in rows]


def _parts(data: LabeledImages | StoredImages, rows: Tensor, size: int) -> Iterator[LabeledImages]:
    for some in rows.split(size):
        yield data._part(some)


def _opened(data: Images | StoredImages, name: str, least: int) -> LabeledImages | StoredImages:
    found = open_set(data, name=name)
    if len(found) < least:
        raise ValueError(f"{name} must hold at least {least} image{'s' * (least > 1)}, got {len(found)}")
    return found


def checked_indices(given: object, name: str, count: int, of: str) -> Tensor:
    """Check that `given`, the argument `name`, holds indices of `count` records (each is `of`); return int64 [k]."""
    if not isinstance(given, Tensor) or given.is_floating_point() or given.dtype == torch.bool:
        got = getattr(given, "dtype", type(given).__name__)
        raise TypeError(f"{name} must be an int tensor [k] of indices, got {got}")
    if given.ndim != 1 or not len(given) or int(given.min()) < 0 or int(given.max()) >= count:
        raise ValueError(f"{name} must hold at least one index of {of}, 0 to {count - 1}; got {given}")
    return given.cpu().long()
