from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit.normalization import IDENTITY, ZCA, Normalization
from tests.refused import refused

channel = st.tuples(st.floats(-2, 2), st.floats(0.01, 5))
channels = st.lists(channel, min_size=1, max_size=4).map(lambda c: Normalization(*zip(*c, strict=True)))


def pixels(n: int, c: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(n, c, 3, 2, generator=torch.Generator().manual_seed(n), dtype=dtype)


@given(channels, st.integers(0, 4))
def test_decode_inverts_encode(normalization: Normalization, n: int) -> None:
    x = pixels(n, len(normalization.mean))
    assert torch.allclose(normalization.decode(normalization.encode(x)), x, atol=1e-12)
    assert torch.allclose(normalization.encode(normalization.decode(x)), x, atol=1e-11)


@given(channels)
def test_encode_follows_the_formula_channel_by_channel(normalization: Normalization) -> None:
    x = pixels(2, len(normalization.mean))
    encoded = normalization.encode(x)
    for c, (mean, std) in enumerate(zip(normalization.mean, normalization.std, strict=True)):
        assert torch.allclose(encoded[:, c], (x[:, c] - mean) / std, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_number_applies_to_every_channel_in_any_precision(dtype: torch.dtype) -> None:
    found, wanted = (Normalization([0.5] * n, [0.25] * n).encode(pixels(2, 3, dtype)) for n in (1, 3))
    assert (found.dtype, torch.equal(found, wanted)) == (dtype, True)
    assert Normalization([0.5], [0.5]).encode(pixels(2, 1, dtype)).dtype == dtype


@pytest.mark.parametrize("shape", [(700, 1, 8, 8), (40, 3, 32, 32), (1, 1, 300, 300)])
def test_measurement_is_independent_of_the_number_of_threads(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(Normalization.of(x))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    assert all(v == float(f"{v:.13g}") for v in (*found[0].mean, *found[0].std))
    exact = x.double().transpose(0, 1).flatten(1)
    assert found[0].mean == pytest.approx(exact.mean(1).tolist(), rel=1e-12)
    assert found[0].std == pytest.approx(exact.std(1, correction=0).tolist(), rel=1e-12)


@given(st.floats(0, 1, width=32))
def test_constant_channel_gets_std_one(value: float) -> None:
    x = torch.full((7, 1, 5, 3), value)
    assert Normalization.of(x).std == (1.0,)
    y = torch.tensor([0.2, 0.8]).view(2, 1, 1, 1).expand(2, 1, 5, 3)  # each image is constant
    assert Normalization.of(y).std == (pytest.approx(0.3),)


def test_equality_and_hash() -> None:
    assert Normalization([0.5], [0.25]) == Normalization(torch.tensor([0.5]), np.array([0.25]))  # type: ignore[arg-type]
    assert Normalization([0.5], [0.25]) != Normalization([0.5], [0.5])
    assert len({Normalization([0.5], [0.25]), Normalization([0.5], [0.25]), IDENTITY}) == 2


def test_repr_is_readable() -> None:
    assert (str(IDENTITY), str(Normalization([0], [0.5]))) == ("pixels in [0, 1]", "mean (0) std (0.5)")
    assert str(Normalization([0.5, 1 / 3], [0.25, 1])) == "mean (0.5, 0.3333) std (0.25, 1)"


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        ([0.5], [0.0], "std must be at least 1e-12"),
        ([math.nan], [1.0], "mean must be finite"),
        ([0.5, 0.5], [1.0], "one value a channel, got 2 and 1"),
        ([], [], "one value a channel, got 0 and 0"),
    ],
)
def test_invalid_numbers_are_refused(mean: Any, std: Any, words: str) -> None:
    refused(lambda: Normalization(mean, std), ValueError, words)


def test_other_channels_are_refused() -> None:
    two = Normalization([0.5, 0.5], [1.0, 1.0])
    for move in (two.encode, two.decode):
        with pytest.raises(ValueError, match="images have 3 channels, but the normalization has 2"):
            move(pixels(1, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integer_pixels_are_refused_not_truncated(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"must be floating point, got torch.*divide uint8 pixels by 255"):
        Normalization([0.5], [0.25]).encode(torch.ones(1, 1, 2, 2, dtype=dtype))


def test_other_whitening_and_statistics_of_invalid_pixels_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="covariance of the images: standardize"):
        ZCA.fit(torch.tensor([3e38, -3e38]).view(2, 1, 1, 1))
    with pytest.raises(TypeError, match=r"zca must be a ZCA, such as ZCA.fit\(images\), or None, got Tensor"):
        Normalization([0.5], [0.25], torch.eye(4))  # type: ignore[arg-type]
    refused(lambda: Normalization.of(torch.zeros(0, 1, 2, 2)), ValueError, "pixels must not be empty")
    with pytest.raises(TypeError, match="pixels must be floating point"):
        Normalization.of(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
