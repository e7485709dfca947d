"""How close the images that were sent come to records: in decibels, as shares, and beside random real images."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.membership import nearest
from attacks.metrics import psnr
from distillkit.rng import derive

__all__ = ["LEVELS", "closest", "random_rounds", "record_scores"]

LEVELS = (20, 25, 30)
"""Decibels from which on a record counts as recovered: recognisable, close, hardly to be told apart."""

_ELEMENTS = 2**24


def closest(images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """For each candidate the nearest of some images: how close it is, and which.

    Args:
        images: pixels [M, C, H, W] in [0, 1].
        candidates: pixels [n, C, H, W] in [0, 1].

    Returns:
        PSNR in decibels float [n], infinite for equal images, and int64 [n].
    """
    flat, others = images.double().flatten(1), candidates.double().flatten(1)
    squares, found = flat.square().sum(1), []
    for part in others.split(max(1, _ELEMENTS // len(flat))):
        found.append((squares - 2 * part @ flat.T).argmin(1))
    index = torch.cat(found)
    return psnr(images[index].double(), candidates.double()), index


def record_scores(rounds: list[Tensor], candidates: Tensor) -> dict[str, Tensor]:
    """What two attacks say of each candidate: higher for records that were used.

    Args:
        rounds: for each round the pixels that were sent in it [M, C, H, W].
        candidates: pixels [n, C, H, W].

    Returns:
        "distance": PSNR of the nearest image of all rounds. "nearest": the largest of the rounds' scores
        `attacks.membership.nearest`, where some round has two different images; images of several rounds that began at
        one record would hide each other from it.
    """
    found = {"distance": closest(torch.cat(rounds), candidates)[0].double()}
    several = [one for one in rounds if len(one.unique(dim=0)) > 1]
    if several:
        found["nearest"] = torch.stack([nearest(one, candidates) for one in several]).amax(0).cpu()
    return found


def random_rounds(rounds: list[Tensor], records: Tensor) -> list[Tensor]:
    """The baseline: as many real images in every round as were sent in it, drawn at random, each record once a round.

    Args:
        rounds: as for `record_scores`.
        records: pixels of all private records [N, C, H, W].
    """
    return [
        records[torch.randperm(len(records), generator=derive(0, "baseline", number))[: len(one)]]
        for number, one in enumerate(rounds)
    ]
