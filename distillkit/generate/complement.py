"""Computation of labels for images that would balance the classes of a dataset."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check


def complement_targets(counts: Tensor, *, total: int = 256, rounding: str = "truncate") -> Tensor:
    """Return labels for images that would balance a client's classes. FedCOG uses them as targets of `invert`.

    The number of labels of a class is proportional to its deficit, `max(counts) - counts`.

    Args:
        counts: number of images of each class, int [K], for example `LabeledImages.counts()`.
        total: number of labels.
        rounding: "truncate" rounds the number of labels of each class down, as in the authors' code, so the result may
            have up to K - 1 labels fewer than `total`. "largest_remainder" returns exactly `total` labels.

    Returns:
        Labels int64, in ascending order. The class with the most images does not occur, because its deficit is 0. The
        tensor is empty if the classes are balanced; in this case the authors' code divides 0 by 0.

    Raises:
        TypeError, ValueError: `counts` is not a tensor [K] of non-negative integers, or `rounding` is unknown.

    Paper: FedCOG (Ye et al., "Fake It Till Make It: Federated Learning with Consensus-Oriented Generation", ICLR 2024),
    appendix A.1.1.
    """
    check.class_labels(counts, None, None, "counts")
    total = check.positive_int(total, "total")
    check.one_of(rounding, "rounding", ("truncate", "largest_remainder"))
    if not len(counts):
        raise ValueError("counts must have one entry per class, got none")
    deficit = counts.max() - counts
    total_deficit = int(deficit.sum())
    if total_deficit == 0:
        return torch.empty(0, dtype=torch.long, device=counts.device)
    each = total * deficit // total_deficit
    if rounding == "largest_remainder":
        remainder = total * deficit % total_deficit
        each[remainder.argsort(descending=True, stable=True)[: total - int(each.sum())]] += 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(each)
