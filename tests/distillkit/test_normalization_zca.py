from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from distillkit import LabeledImages, Normalization
from distillkit.normalization import ZCA
from distillkit.rng import derive
from tests.refused import refused


def correlated(n: int = 400, c: int = 2, side: int = 3, seed: int = 0) -> Tensor:
    g, d = derive(seed, "zca"), c * side * side
    mix = torch.randn(d, d, generator=g, dtype=torch.float64)
    flat = torch.randn(n, d, generator=g, dtype=torch.float64) @ mix + 0.7
    return flat.view(n, c, side, side)


def test_whitening_is_symmetric_and_decode_inverts_encode() -> None:
    x = correlated()
    zca = ZCA.fit(x)
    torch.testing.assert_close(zca.decode(zca.encode(x)), x)
    torch.testing.assert_close(zca.encode(zca.decode(x)), x)
    torch.testing.assert_close(zca.matrix, zca.matrix.T)
    assert bool((torch.linalg.eigvalsh(zca.matrix) > 0).all())


def test_covariance_becomes_the_identity_shrunk_by_eps() -> None:
    x = correlated()
    values, vectors = torch.linalg.eigh(torch.cov(x.flatten(1).T))
    for eps in (1e-6, 0.1, 3.0):
        white = ZCA.fit(x, eps=eps).encode(x).flatten(1)
        want = vectors @ torch.diag(values / (values + eps)) @ vectors.T
        torch.testing.assert_close(torch.cov(white.T), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(white.mean(0), torch.zeros(18, dtype=white.dtype), rtol=0, atol=1e-8)


def test_other_sizes_are_refused() -> None:
    zca = ZCA.fit(correlated())
    refused(lambda: zca.encode(torch.zeros(2, 2, 4, 4)), ValueError, "have 32 values each, .* fitted on 18$")
    refused(lambda: zca.decode(torch.zeros(2, 1, 3, 3)), ValueError, "have 9 values each, .* fitted on 18$")
    for name in ("matrix", "inverse"):
        words = rf"^{name} must have shape \[18, 18\] as center has, got \[18, 3\]$"
        refused(lambda n=name: replace(zca, **{n: torch.zeros(18, 3)}), ValueError, words)


def test_invalid_fits_are_refused() -> None:
    refused(lambda: ZCA.fit(torch.zeros(1, 1, 2, 2)), ValueError, "at least 2 images")
    refused(lambda: ZCA.fit(correlated(), eps=0), ValueError, "eps must be greater than 0")
    refused(lambda: ZCA.fit(torch.zeros(4, 1, 2, 2, dtype=torch.uint8)), TypeError, "floating point")


def test_equality_compares_values() -> None:
    x = correlated()
    assert ZCA.fit(x) == ZCA.fit(x)
    assert hash(ZCA.fit(x)) == hash(ZCA.fit(x))
    zca = ZCA.fit(x)
    assert all(zca != replace(zca, **{part: 2 * getattr(zca, part)}) for part in ("center", "matrix", "inverse"))
    assert ZCA.fit(x) != ZCA.fit(correlated(side=2))
    assert Normalization((0.5,), (0.5,), ZCA.fit(x)) != Normalization((0.5,), (0.5,))


def test_set_keeps_and_saves_its_whitening(tmp_path: Path) -> None:
    pixels = torch.rand(60, 1, 4, 4, generator=derive(1))
    plain = Normalization.of(pixels)
    normalization = Normalization(plain.mean, plain.std, ZCA.fit(plain.encode(pixels)))
    made = LabeledImages.from_pixels(pixels, torch.arange(60) % 3, normalization=normalization)
    torch.testing.assert_close(made.pixels(), pixels, rtol=1e-4, atol=1e-4)
    back = LabeledImages.load(made.save(tmp_path / "set.safetensors"))
    assert back.normalization == normalization
    assert [one.measured for one in (normalization, Normalization((0.5,), (0.5,)))] == [True, False]
    assert "then ZCA" in repr(back)
    torch.testing.assert_close(back.pixels(), made.pixels())
    refused(lambda: made.require_compatible(made.renormalize(plain)), ValueError, "renormalize")
    torch.testing.assert_close(made.renormalize(plain).renormalize(normalization).images, made.images)
