"""Search for copies of records among published images, also of flipped, shifted, recolored or tiled records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.metrics import psnr

COPY_DB = 48.13
"""PSNR of a root mean squared difference of 1/255, one level of 8-bit pixels."""
CONTRAST = 0.25
"""Standard deviation of a record's pixels at which the level of an altered copy is its PSNR."""

_SIDE, _GRID, _LEAST_TILE = 32, 12, 8
"""Largest side of the squares compared, side of the grid on which candidates are found, and smallest side of a tile."""
_TILES, _CANDIDATES, _LEAST_MATCH = (2, 3), 5, 0.7
"""Numbers of tiles along a side; records that are compared in full with each published image and tile; and smallest
correlation of their gray pixels."""
_ELEMENTS = 1 << 24
_PAIRS = 256


@dataclass(frozen=True, eq=False)
class Copies:
    """Result of `find_copies` for M published images and N records.

    Attributes:
        level: largest level of each published image to a record, in decibels, float64 [M].
        copied: whether each published image equals a record up to the rounding of 8-bit pixels, as it is or altered,
            bool [M].
        record_level: largest level of each record to a published image or to one of its tiles, float64 [N].
    """

    level: Tensor
    copied: Tensor
    record_level: Tensor


def closest_images(images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the PSNR and the index of the image that is nearest to each candidate.

    Args:
        images: pixels [M, C, H, W] in [0, 1].
        candidates: pixels [n, C, H, W] in [0, 1].

    Returns:
        PSNR in decibels, float [n], infinite for equal images; and indices into `images`, int64 [n].
    """
    flat, others = images.double().flatten(1), candidates.double().flatten(1)
    squares, found = flat.square().sum(1), []
    for part in others.split(max(1, _ELEMENTS // len(flat))):
        found.append((squares - 2 * part @ flat.T).argmin(1))
    index = torch.cat(found)
    return psnr(images[index].double(), candidates.double()), index


@torch.no_grad()
def find_copies(images: Tensor, records: Tensor) -> Copies:
    """Compare published images and their tiles with records, under changes that leave a record recognizable.

    The level of a published image and a record is the largest of the PSNR of the two images and the levels of altered
    copies. The alterations may be combined:

    - flips, and rotations by 90 or 180 degrees (these only of square images, and by 180 degrees of all);
    - shifts by up to an eighth of the shorter side; flipped or rotated images other than mirrored ones: by one pixel;
    - linear changes of the color channels: brightness, contrast, inversion, gray scale, exchanged channels;
    - half the resolution;
    - grids of 2 x 2 or 3 x 3 tiles of at least 8 pixels, each of which is a smaller record.

    Let r be the share of an altered image's variance that no linear change of the record's colors explains. Its level
    is -10 log10(r max(v, 1/16)), where v is the variance of the record's pixels. This is the PSNR after the alteration
    is undone. The smallest variance, a standard deviation of 1/4, keeps flat records from matching anything.

    Crops, zooms, other rotations, blends of records and noise are found only as far as the result is still similar.
    For altered copies, images of more than 32 x 32 pixels are first shrunk to this size.

    Cost: for 32 x 32 pixels, 216 inner products of 144 numbers for each published image and record. 100 images and
    5,000 records take a few CPU seconds.

    Args:
        images: pixels of the published images, [M, C, H, W] in [0, 1].
        records: pixels of the records, [N, C, H, W] in [0, 1], on the same device.
    """
    level, record_level = closest_images(records, images)[0], closest_images(images, records)[0]
    copied = level >= COPY_DB
    small, real = _shrunk(images), _shrunk(records)
    side = min(small.shape[2:])
    for found in (_search(small, real, tiles) for tiles in (1, *_TILES) if tiles == 1 or side // tiles >= _LEAST_TILE):
        for image, index, value, equal in found:
            level.scatter_reduce_(0, image, value, "amax")
            record_level.scatter_reduce_(0, index, value, "amax")
            copied[image[equal]] = True
    return Copies(level, copied, record_level)


def _shrunk(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    ratio = _SIDE / (height * width) ** 0.5
    if ratio >= 1:
        return images.float()
    size = [max(1, round(ratio * side)) for side in (height, width)]
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True)


def _search(images: Tensor, records: Tensor, tiles: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield pairs of an altered image and a record: index of the image, of the record, level, and whether it copies.

    Candidates are the records whose gray, centred and pooled pixels correlate most with those of an image, and for each
    record the image that correlates most.
    """
    sides = images.shape[2:]
    if tiles > 1:
        height, width = (side // tiles for side in sides)
        whole = images[:, :, : tiles * height, : tiles * width]
        images = torch.cat([x for row in whole.chunk(tiles, 2) for x in row.chunk(tiles, 3)])
        variants = [F.adaptive_avg_pool2d(records, (height, width))]
        variants += [F.interpolate(records, size=(height, width), mode="bilinear", antialias=True)]
    else:
        variants = [records, _blurred(records)]
    count = len(images) // tiles**2
    reach = min(images.shape[2:]) // 8 if tiles == 1 else 0
    variants = [_View(False, 0, 0, 0, reach)(one) for one in variants]
    keys, views = _keys(variants[0]).T, _views(images.shape[2:], reach)
    size = max(1, _ELEMENTS // len(records))
    pairs = torch.cat([_candidates(part, first * size, keys, views) for first, part in enumerate(images.split(size))])
    for number, view in enumerate(views):
        for part in pairs[pairs[:, 2] == number].split(_PAIRS):
            image, index = part[:, 0], part[:, 1]
            seen = view(images[image])
            (first, equal), (second, also) = (_levels(seen, one[index]) for one in variants)
            yield image % count, index, torch.maximum(first, second), equal | also


def _candidates(images: Tensor, first: int, keys: Tensor, views: Sequence[_View]) -> Tensor:
    """Return triples of an image (counted from `first`), a record and the number of the best view, int64 [P, 3]."""
    best = images.new_zeros(len(images), keys.shape[1])
    turn = torch.zeros_like(best, dtype=torch.int16)
    for number, view in enumerate(views):
        match = (_keys(view(images)) @ keys).abs_()
        turn.masked_fill_(match > best, number)
        torch.maximum(best, match, out=best)
    rows = torch.arange(len(images), device=images.device)[:, None]
    top = best.topk(min(_CANDIDATES, best.shape[1]), dim=1).indices
    pairs = torch.zeros_like(best, dtype=torch.bool)
    pairs[rows, top] = True
    pairs[best.argmax(0), torch.arange(best.shape[1], device=best.device)] = True
    image, record = (pairs & (best > _LEAST_MATCH)).nonzero().unbind(1)
    return torch.stack([image + first, record, turn[image, record].long()], 1)


def _views(sides: Sequence[int], reach: int) -> list[_View]:
    found = []
    for flip in (False, True):
        for turn in range(4) if sides[0] == sides[1] else (0, 2):
            far = reach if turn == 0 else min(reach, 1)
            shifts = range(-far, far + 1)
            found += [_View(flip, turn, dy, dx, reach) for dy in shifts for dx in shifts]
    return found


@dataclass(frozen=True)
class _View:
    """A flip, a rotation by quarter turns and a shift that undo an alteration, and a crop to the part in common."""

    flip: bool
    turn: int
    dy: int
    dx: int
    reach: int

    def __call__(self, images: Tensor) -> Tensor:
        images = images.flip(-1) if self.flip else images
        images = images.rot90(self.turn, (2, 3)) if self.turn else images
        height, width = (side - 2 * self.reach for side in images.shape[2:])
        top, left = self.reach + self.dy, self.reach + self.dx
        return images[:, :, top : top + height, left : left + width]


def _keys(images: Tensor) -> Tensor:
    """Return gray, pooled, centred pixels of length 1, float32 [N, D]; 0 for constant images."""
    height, width = (max(1, side // max(1, round(side / _GRID))) for side in images.shape[2:])
    rows = F.adaptive_avg_pool2d(images.mean(1, keepdim=True), (height, width)).flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6)


def _blurred(images: Tensor) -> Tensor:
    height, width = (max(1, side // 2) for side in images.shape[2:])
    less = F.adaptive_avg_pool2d(images, (height, width))
    return F.interpolate(less, size=images.shape[2:], mode="bilinear")


def _levels(seen: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels of P altered images to one record each, float64 [P], and whether each is a copy, bool [P]."""
    y, x = (one.double().flatten(2) for one in (seen, records))
    y, x = (one - one.mean(2, keepdim=True) for one in (y, x))
    gram, cross = x @ x.mT, x @ y.mT
    ridge = 1e-12 + 1e-9 * gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]  # channels may be equal
    fitted = torch.linalg.solve(gram + ridge * torch.eye(gram.shape[1]).to(gram), cross)
    power, pixels = y.square().sum((1, 2)), y.shape[1] * y.shape[2]
    rest = (power - (cross * fitted).sum((1, 2))).clamp_min(0)
    free = y.shape[2] / max(1, y.shape[2] - x.shape[1] - 1)  # the fit has one number per channel, and a mean
    share = torch.where(power > 1e-9 * pixels, free * rest / power, 1.0).clamp(1e-12, 1)
    spread = (x.square().sum((1, 2)) / pixels).clamp_min(CONTRAST**2)
    error = 10 ** (-COPY_DB / 10)
    return -10 * (share * spread).log10(), (free * rest / pixels <= error) & (share <= 0.01)
