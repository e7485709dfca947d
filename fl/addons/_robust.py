"""Robust means of several vectors, which a few arbitrary vectors cannot move far."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.message import Tensors

__all__ = ["krum_choice", "trimmed_mean"]


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of each coordinate without its `trim` smallest and `trim` largest values.

    The coordinate-wise trimmed mean of Yin et al., ICML 2018 (beta = trim / n). With trim = (n - 1) // 2 one value is
    left, or the middle two: the coordinate-wise median.

    Args:
        rows: [n, ...], one vector per row.
        trim: from 0, less than n / 2.

    Returns:
        [...] in float64.
    """
    return rows.double().sort(dim=0).values[trim : len(rows) - trim].mean(0)


def krum_choice(rows: Tensors, attackers: int, keep: int) -> list[int]:
    """Return the numbers of the vectors that Krum selects: those with the `keep` smallest scores, ascending.

    s(i) is the sum of |V_i - V_j|^2 over the n - f - 2 vectors V_j closest to V_i (Blanchard et al., NeurIPS 2017).
    Among equal scores the smaller number wins, as in the paper.

    Args:
        rows: name -> [n, ...]; a vector V_i is row i of all tensors together.
        attackers: f; n is at least 2 f + 3.
        keep: how many to select; 1 is Krum, more is Multi-Krum.
    """
    flat = [tensor.reshape(len(tensor), -1).double() for tensor in rows.values()]
    apart = [torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist").square() for f in flat]
    squares = torch.stack(apart).sum(0)
    nearest = squares.sort(dim=1).values[:, 1 : len(squares) - attackers - 1]  # the first is its distance to itself
    return sorted(nearest.sum(1).sort(stable=True).indices[:keep].tolist())
