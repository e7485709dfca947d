"""Which labels to generate so that an unbalanced data set becomes balanced."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["complement_targets"]


def complement_targets(counts: Tensor, *, total: int = 256, rounding: str = "truncate") -> Tensor:
    """Which labels to generate so that an unbalanced client becomes balanced: FedCOG's, for `invert`.

    They are in proportion to what each class lacks, `max(counts) - counts`.

    Args:
        counts: int [K], the images of each class, as `LabeledImages.counts()` gives them.
        total: how many labels are wanted.
        rounding: "truncate" rounds the number of each class down, as released, so there are up to K - 1 labels fewer
            than `total`; "largest_remainder" gives exactly `total`.

    Returns:
        int64 labels, ascending; the largest class has none. Empty if the classes are balanced (the released code
        divides 0 by 0 there): there is nothing to generate.

    Raises:
        TypeError, ValueError: counts that are not non-negative integers [K], an unknown rounding.

    Paper: FedCOG (Ye et al., "Fake It Till Make It: Federated Learning with Consensus-Oriented Generation", ICLR 2024),
    appendix A.1.1.
    """
    check.class_labels(counts, None, None, "counts")
    total = check.positive_int(total, "total")
    check.one_of(rounding, "rounding", ("truncate", "largest_remainder"))
    if not len(counts):
        raise ValueError("counts must have one entry a class, got none")
    lacking = counts.max() - counts
    everything = int(lacking.sum())
    if everything == 0:
        return torch.empty(0, dtype=torch.long, device=counts.device)
    each = total * lacking // everything
    if rounding == "largest_remainder":
        remainder = total * lacking % everything
        each[remainder.argsort(descending=True, stable=True)[: total - int(each.sum())]] += 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(each)
