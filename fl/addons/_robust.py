"""Robust averages of vectors: a few arbitrary vectors cannot move the result far."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.message import Tensors

__all__ = ["krum_choice", "trimmed_mean"]


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of each coordinate without its `trim` smallest and `trim` largest values.

    This is the coordinate-wise trimmed mean of Yin et al., ICML 2018 (beta = trim / n). With trim = (n - 1) // 2 only
    the middle value or the middle two remain, so the result is the coordinate-wise median.

    Args:
        rows: tensor [n, ...], one vector per row.
        trim: number of values to remove at each end, at least 0 and less than n / 2.

    Returns:
        Trimmed mean, float64 [...].
    """
    return rows.double().sort(dim=0).values[trim : len(rows) - trim].mean(0)


def krum_choice(rows: Tensors, attackers: int, keep: int) -> list[int]:
    """Return the ascending indices of the vectors that Krum selects: those with the `keep` smallest scores.

    The score s(i) is the sum of |V_i - V_j|^2 over the n - f - 2 vectors V_j closest to V_i (Blanchard et al., NeurIPS
    2017). Ties go to the smaller index, as in the paper.

    Args:
        rows: tensors [n, ...] by name; the vector V_i is row i of all tensors together.
        attackers: f, the number of attackers; n must be at least 2 f + 3.
        keep: number of vectors to select; 1 is Krum, more is Multi-Krum.
    """
    flat = [tensor.reshape(len(tensor), -1).double() for tensor in rows.values()]
    apart = [torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist").square() for f in flat]
    squares = torch.stack(apart).sum(0)
    nearest = squares.sort(dim=1).values[:, 1 : len(squares) - attackers - 1]  # the first is its distance to itself
    return sorted(nearest.sum(1).sort(stable=True).indices[:keep].tolist())
