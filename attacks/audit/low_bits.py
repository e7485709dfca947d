"""Scores of the low bits of noised releases, which reveal the data if noise was added in floating point."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillkit._utils import check

_LEVELS = range(16, 60)
"""Units 2^-k that are tried, relative to the standard deviation of the noise."""

_LARGEST, _NEAR = 2.0**48, 2.0**-3
"""Largest multiple of a unit that float64 resolves, and distance at which a number counts as a multiple."""


def low_bit_scores(released: Tensor, sums: Tensor, std: float) -> Tensor:
    """Score noised releases by their low bits, to test with `audit_claim` whether the bits reveal the data.

    Floating-point noise has few low bits. Noise that is drawn in float32, and small float64 noise from the Box-Muller
    method, are multiples of a common unit. An adversary who knows all records but one subtracts each of the two
    possible sums from the release; if only one difference consists of such multiples, it is the noise (Mironov, "On
    significance of the least significant bits for differential privacy", CCS 2012). The noise may be far larger than
    the record.

    For every unit 2^-k, relative to `std` and to the power of two below, a score counts the differences that are
    multiples of the unit, in standard deviations above chance. Use as many values per release as you can: against
    float64 noise, about one of 80 values is small enough to count. Releases on a public grid, such as
    `Secret.add_noise` of `distillkit.privacy`, give the same scores with and without the record. The scores find
    common units only, so they do not prove that a mechanism is sound.

    Args:
        released: releases of n runs, float [n, ...], in the dtype in which they are published.
        sums: values without noise that include the record, float [...] or [n, ...], in float64. Use the same sums for
            runs with and without the record.
        std: standard deviation of the noise, > 0.

    Returns:
        Scores, float64 [n, 88], which `audit_claim` accepts: for k from 16 to 59 relative to `std`, then relative to
        the power of two.

    Raises:
        TypeError, ValueError: a tensor is not finite floating-point numbers, `released` is empty, the shapes differ,
            or `std` is out of range.
    """
    std = check.real_number(std, "std", above=0.0)
    for name, value in (("released", released), ("sums", sums)):
        check.finite_tensor(value, name)
    if released.ndim < 2 or not released.numel() or sums.shape not in (released.shape, released.shape[1:]):
        raise ValueError(
            "released must be [runs, ...] with at least one value, and sums the same shape or that of one run, got "
            f"{list(released.shape)} and {list(sums.shape)}"
        )
    gaps = (released.detach().double() - sums.detach().double()).flatten(1).cpu()
    columns, chance = [], 2 * _NEAR
    for unit in (std, math.ldexp(1.0, math.frexp(std)[1] - 1)):
        for level in _LEVELS:
            multiples = gaps * (2.0**level / unit)
            tried = multiples.abs() < _LARGEST
            hits = (tried & ((multiples - multiples.round()).abs() < _NEAR)).sum(1)
            count = tried.sum(1).double()
            columns.append((hits - count * chance) / (count * chance * (1 - chance)).sqrt().clamp_min(1.0))
    return torch.stack(columns, 1)
