"""Reader of the 8x8 digits that scikit-learn contains."""

from __future__ import annotations

from typing import Any

import torch

from distillkit.data._assembly import assemble_raw
from distillkit.data._hold_out import hold_out
from distillkit.data.split import Split


def load_digits(root: None = None, **options: Any) -> Split:
    """Load the 1,797 real 8x8 digits that scikit-learn contains. A fixed fifth of each class is the test set.

    Args:
        root: ignored; the digits need no files.
        options: the options `size`, `channels` and `normalization` of `distillkit.data.load`.
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    images, labels = torch.from_numpy(bunch.images).float()[:, None] / 16, torch.from_numpy(bunch.target).long()
    raw = {part: (images[rows], labels[rows]) for part, rows in zip(("train", "test"), hold_out(labels, 0.2))}
    return assemble_raw(raw, tuple("0123456789"), "digits", **options)
