"""Similarity of the sent images to records, measured by the PSNR of the nearest image and by membership attacks.

As a baseline, `random_baseline` draws random records, which are then compared in place of the sent images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.membership import nearest
from attacks.reporting.copies import closest_images
from distillkit.rng import derive

PSNR_LEVELS = (20, 25, 30)
"""Smallest PSNR, in decibels, of a recovered record at three levels: recognizable, close and nearly identical."""


def record_scores(rounds: list[Tensor], candidates: Tensor) -> dict[str, Tensor]:
    """Return the membership scores of candidate records, by two attacks that need only the images sent in a run.

    Args:
        rounds: pixels of the images sent in each round, [M, C, H, W].
        candidates: pixels of the candidate records, [n, C, H, W].

    Returns:
        Scores [n] by attack. "distance" is the PSNR of the nearest image of all rounds. "nearest" is the largest score
        of `attacks.membership.nearest` over the rounds; it is left out if no round has two different images. This score
        is high if the nearest image is much closer to the record than the second nearest. It is computed for each round
        separately, because images of several rounds may be equally close to the same record.
    """
    found = {"distance": closest_images(torch.cat(rounds), candidates)[0]}
    several = [one for one in rounds if len(one.unique(dim=0)) > 1]
    if several:
        found["nearest"] = torch.stack([nearest(one, candidates) for one in several]).amax(0).cpu()
    return found


def random_baseline(rounds: list[Tensor], records: Tensor) -> list[Tensor]:
    """Draw random private records for each round, as many as images were sent in this round.

    As a baseline, they stand for a client that sends its records unprotected.

    Args:
        rounds: pixels of the images sent in each round, [M, C, H, W].
        records: pixels of all private records, [N, C, H, W].

    Returns:
        Pixels of M different records for each round.
    """
    return [
        records[torch.randperm(len(records), generator=derive(0, "baseline", number))[: len(one)]]
        for number, one in enumerate(rounds)
    ]
