"""Alignment of brightness, contrast and order of reconstructed images for scoring."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import align, match
from distillkit.rng import derive
from tests.refused import refused

SEEDS = st.integers(0, 2**16)


def pixels(n: int, seed: int, *purpose: str, channels: int = 3) -> torch.Tensor:
    return torch.rand(n, channels, 4, 4, generator=derive(seed, *purpose), dtype=torch.float64)


def test_alignment_by_hand() -> None:
    """x = (0, 0, 1, 1), target (.2, .4, .6, .8): slope .4, through the means (.5, .5)."""
    x = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 1, 2, 2)
    target = torch.tensor([0.2, 0.4, 0.6, 0.8]).view(1, 1, 2, 2)
    torch.testing.assert_close(align(x, target.double()), torch.tensor([0.3, 0.3, 0.7, 0.7]).view(1, 1, 2, 2))
    half = align(x.half() / 2**13, target)  # of a contrast whose square is 0 in half precision
    assert (half.dtype, half.flatten().tolist()) == (torch.float16, pytest.approx([0.3, 0.3, 0.7, 0.7], abs=1e-3))
    assert align(1 - x, target).flatten().tolist() == pytest.approx([0.5] * 4)  # a negative is no contrast
    assert align(0 * x, target).flatten().tolist() == pytest.approx([0.5] * 4)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, contrast=st.sampled_from([0.01, 1.0, 5.0]))
def test_fit_of_each_image_is_the_least_squares_one(seed: int, contrast: float) -> None:
    truth, guess = pixels(3, seed), contrast * pixels(3, seed, "guess") - 1
    for fitted, x, y in zip(align(guess, truth), guess, truth, strict=True):
        a, b = np.polyfit(x.flatten().numpy(), y.flatten().numpy(), 1)
        wanted = a * x + b if a > 0 else torch.full_like(y, float(y.mean()))
        assert torch.allclose(fitted, wanted.clamp(0, 1), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 5))
def test_assignment_is_the_best_of_all_orders(seed: int, n: int) -> None:
    truth, guess = pixels(n, seed), torch.arange(n).view(-1, 1, 1, 1) * pixels(n, seed, "guess")
    found = match(guess.clone().requires_grad_(), truth)
    assert sorted(found.tolist()) == list(range(n))
    cost = float((guess[found] - truth).square().sum())
    assert cost == pytest.approx(min(float((guess[list(p)] - truth).square().sum()) for p in permutations(range(n))))


IMAGES = torch.zeros(2, 1, 4, 4)


@pytest.mark.parametrize("function", [align, match])
def test_invalid_arguments_are_named(function: Any) -> None:
    refused(lambda: function(IMAGES, IMAGES[:1]), ValueError, r"same shape, got \[2, 1, 4, 4\] and \[1, 1, 4, 4\]")
    refused(lambda: function(IMAGES, IMAGES.view(2, 2, 2, 4)), ValueError, r"and \[2, 2, 2, 4\]")
    refused(lambda: function(IMAGES, IMAGES.int()), TypeError, "references must be floating point")
    refused(lambda: function(IMAGES / 0, IMAGES), ValueError, "images must be finite")


@pytest.mark.parametrize("pixel", [-0.011, 1.011, 255.0])
def test_references_in_another_range_are_not_clamped_in_silence(pixel: float) -> None:
    words = rf"pixels in \[0, 1\], got {min(pixel, 0):.3g} to {max(pixel, 0):.3g}; decode"
    align(IMAGES, IMAGES + min(max(pixel, -0.0099), 1.0099))
    refused(lambda: align(IMAGES, IMAGES.index_fill(0, torch.tensor([1]), pixel)), ValueError, words)
