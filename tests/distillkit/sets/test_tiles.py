"""`Tiles`: golden values, laws of decoding, files, and sets that keep their parametrization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages, TiledImages, Tiles
from fl._codec import decode, encode
from fl.message import Message
from tests.refused import refused

HALF = Normalization((0.5,), (0.25,))


def noise(n: int, side: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, 1, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiled(factor: int = 2) -> TiledImages:
    labels = torch.tensor([0, 2]).repeat_interleave(factor**2)
    stored = noise(2, 12).float()
    return TiledImages(stored, labels, tiles=Tiles(factor), num_classes=3, normalization=HALF, info={"method": "x"})


def test_decoding_is_bilinear_and_row_by_row() -> None:
    """[1, 2] becomes [1, 1.25, 1.75, 2] (IDC's interpolation, without aligned corners)."""
    stored = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8]]).view(1, 1, 4, 4)
    row = torch.tensor([1, 1.25, 1.75, 2])
    for image, offset in zip(Tiles(2).decode(stored), (0, 2, 4, 6), strict=True):
        assert torch.equal(image[0], (row + offset).expand(4, 4))


@given(st.sampled_from([2, 3]), st.integers(1, 3), st.integers(0, 10))
def test_the_adjoint_is_the_transpose_of_decoding(factor: int, n: int, seed: int) -> None:
    tiles, stored = Tiles(factor), noise(n, 6, seed)
    gradient = noise(n * tiles.count, 6, seed + 1)
    with torch.no_grad():
        assert tiles.adjoint(gradient).dtype == gradient.dtype
    assert torch.isclose((tiles.decode(stored) * gradient).sum(), (stored * tiles.adjoint(gradient)).sum())


@given(st.sampled_from([2, 3]), st.integers(1, 3))
def test_encoding_places_the_means_of_pixels_where_decoding_finds_them(factor: int, n: int) -> None:
    tiles, h, w = Tiles(factor), 6 // factor, 12 // factor
    images = torch.randn(n * tiles.count, 2, 6, 12, generator=torch.Generator().manual_seed(n))
    stored, means = tiles.encode(images), images.view(-1, 2, h, factor, w, factor).mean((3, 5))
    for i, small in enumerate(means):
        k, row, column = i // factor**2, i % factor**2 // factor, i % factor
        assert torch.allclose(stored[k, :, row * h : (row + 1) * h, column * w : (column + 1) * w], small)
    wanted = torch.nn.functional.interpolate(means, (6, 12), mode="bilinear")
    assert torch.allclose(tiles.decode(stored), wanted, atol=1e-6)


def test_files_hold_the_stored_and_messages_the_decoded_images(tmp_path: Path) -> None:
    data = tiled(3)
    with np.load(data.export(tmp_path / "a.npz")) as file:  # other programs find an image for every label
        assert np.array_equal(file["images"], data.images.numpy())
        assert np.array_equal(file["stored"], data.stored.numpy())
    (sent,) = dict(decode(encode(Message.unchecked({"set": data})))[0].items()).values()
    assert type(sent) is LabeledImages
    assert torch.equal(sent.images, data.images)


def test_other_labels_keep_the_parametrization_and_other_images_lose_it() -> None:
    data = tiled()
    rows = torch.eye(3)[data.labels]
    soft = data.replace(labels=rows, info={"a": 1})
    assert isinstance(soft, TiledImages)
    assert torch.equal(soft.stored, data.stored)
    assert soft.labels is rows
    halves = LabeledImages(data.stored, torch.tensor([[0.5, 0.5], [0.2, 0.8]]), normalization=HALF)
    assert torch.equal(TiledImages.wrap(halves, Tiles(2)).labels, halves.labels[[0] * 4 + [1] * 4])
    twice = data.with_stored(2 * data.stored)
    assert torch.equal(twice.stored, 2 * data.stored)
    assert torch.equal(twice.images, 2 * data.images)
    half = data.to(dtype=torch.float64)
    assert isinstance(half, TiledImages)
    assert half.stored.dtype == half.images.dtype == torch.float64
    identity = Normalization((0.0,), (1.0,))
    changes: list[dict[str, Any]] = [{"images": data.images * 2}, {"normalization": identity}]
    for plain in (data[:4], data.renormalize(identity), *(data.replace(**change) for change in changes)):
        assert type(plain) is LabeledImages
    assert "2 stored images hold 8 images 1x12x12" in repr(data)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Tiles(0), "factor must be"),
        (lambda: Tiles(2).decode(torch.zeros(1, 1, 3, 4)), "Tiles.2. needs .*divisible by 2, got 3x4"),
        (lambda: Tiles(2).encode(torch.zeros(4, 1, 4, 5)), "divisible by 2, got 4x5"),
        (lambda: Tiles(2).encode(noise(6)), "multiple of 4, for Tiles.2.; got 6"),
        (lambda: Tiles.require(0), "parametrize must be a Tiles, such as Tiles.2., or None, got 0"),  # type: ignore[arg-type]
        (lambda: TiledImages(noise(1), torch.zeros(3, dtype=torch.int64), tiles=Tiles(2)), "labels"),
        (lambda: TiledImages(noise(1) * torch.nan, torch.zeros(4).long(), tiles=Tiles(2)), "^stored must be finite"),
        (lambda: TiledImages(noise(1), torch.zeros(4).long(), tiles=2), "tiles must be a Tiles, such as .*, got 2$"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(call: object, text: str) -> None:
    assert callable(call)
    refused(lambda: call(), (TypeError, ValueError), text)
