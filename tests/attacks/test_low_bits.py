from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.audit import audit_claim, low_bit_scores
from attacks.statistics import roc
from distillkit.privacy import Secret, gaussian_delta
from distillkit.rng import derive

STD, VALUES, RUNS = 17.3, 2000, 40
PROFILE = [(e, gaussian_delta(STD, e)) for e in (0.0, 0.1, 0.5, 1.0)]


def box_muller(secret: Secret, values: Tensor) -> Tensor:
    """Add the former noise of this library: four Box-Muller draws of 53-bit uniforms, divided by two."""
    radius = (-2 * secret.uniform(2 * values.numel()).log()).sqrt().view(2, -1)
    angle = 2 * math.pi * secret.uniform(2 * values.numel()).view(2, -1)
    return values + ((radius * (angle.cos() + angle.sin())).sum(0) * (STD / 2)).view(values.shape)


def single_precision(secret: Secret, values: Tensor) -> Tensor:
    return values + STD * secret.add_noise(torch.zeros(values.shape), 1.0).float()


def rounded(secret: Secret, values: Tensor) -> Tensor:
    return secret.add_noise(values, STD)


def worlds(add: Callable[[Secret, Tensor], Tensor], records: int) -> tuple[Tensor, Tensor]:
    vectors = torch.randn(records + 1, VALUES, generator=derive(records), dtype=torch.float64)
    vectors /= vectors.norm(dim=1, keepdim=True)
    sums, secret = vectors.sum(0), Secret(records)
    inside, outside = (add(secret, s.expand(RUNS, -1)) for s in (sums, sums - vectors[0]))
    return low_bit_scores(inside, sums, STD), low_bit_scores(outside, sums, STD)


def best_auc(inside: Tensor, outside: Tensor) -> float:
    """Return the AUC, on the second half of the runs, of the column that is best on the first half."""
    half, member = RUNS // 2, torch.arange(RUNS) < RUNS // 2
    first = [roc(torch.cat([a[:half], b[:half]]), member).auc for a, b in zip(inside.T, outside.T)]
    column = first.index(max(first))
    return roc(torch.cat([inside[half:, column], outside[half:, column]]), member).auc


@pytest.mark.parametrize("records", [0, 200])
@pytest.mark.parametrize("add", [box_muller, single_precision])
def test_floating_point_noise_is_found(add: Any, records: int) -> None:
    """A record of length 1 under noise of 17.3, of which the honest AUC is .52."""
    inside, outside = worlds(add, records)
    assert best_auc(inside, outside) > 0.95
    assert audit_claim(inside, outside, PROFILE).refuted


@pytest.mark.parametrize("records", [0, 1000])
def test_nothing_is_found_on_a_public_grid(records: int) -> None:
    inside, outside = worlds(rounded, records)
    assert best_auc(inside, outside) < 0.9
    assert not audit_claim(inside, outside, PROFILE).refuted


@pytest.mark.parametrize("std", [0.3, 4.0, 5e3])
@pytest.mark.parametrize(("shared", "dtype"), [(False, torch.float64), (True, torch.float64), (False, torch.float32)])
def test_scores_count_the_multiples_of_each_unit(std: float, shared: bool, dtype: torch.dtype) -> None:
    """Run by run, of the difference from the sums; 2^48 units and more cannot be resolved."""
    g = derive(1)
    sums = torch.randn(*(() if shared else (3,)), 2, 40, generator=g, dtype=torch.float64)
    noise = std * torch.randn(3, 2, 40, generator=g, dtype=torch.float64)
    noise[0], noise[1, :, ::2] = (noise[0] * 2**8).round() / 2**8, noise[1, :, ::2] * 1e-9
    sums, released = sums.to(dtype), (sums + noise).to(dtype)
    for run, row in zip(released.double() - sums, low_bit_scores(released, sums, std)):
        wanted = []
        for unit in (std, 2.0 ** math.floor(math.log2(std))):
            for k in range(16, 60):
                multiples = [m for gap in run.flatten().tolist() if abs(m := gap * (2.0**k / unit)) < 2**48]
                hits, n = sum(abs(m - round(m)) < 1 / 8 for m in multiples), len(multiples)
                wanted.append((hits - n / 4) / max(1.0, math.sqrt(n * 1 / 4 * 3 / 4)))
        assert row.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("released", "sums", "std", "why"),
    [
        (torch.zeros(2, 3), torch.zeros(4), 1.0, r"released must be \[runs, ...\] .* got \[2, 3\] and \[4\]"),
        (torch.zeros(3), torch.zeros(3), 1.0, r"got \[3\] and \[3\]"),
        (torch.zeros(2, 0), torch.zeros(0), 1.0, r"at least one value, .* got \[2, 0\] and \[0\]"),
        (torch.full((2, 3), math.inf), torch.zeros(3), 1.0, "released must be finite, but 6 of 6"),
        (torch.zeros(2, 3).long(), torch.zeros(3), 1.0, "released must be a floating tensor, got torch.int64"),
        (torch.zeros(2, 3), [0.0] * 3, 1.0, "sums must be a floating tensor, got list"),
        (torch.zeros(2, 3), torch.full((3,), math.nan), 1.0, "sums must be finite, but 3 of 3"),
        (torch.zeros(2, 3), torch.zeros(3), 0.0, "std must be greater than 0"),
    ],
)
def test_invalid_arguments_are_explained(released: Any, sums: Any, std: float, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        low_bit_scores(released, sums, std)
