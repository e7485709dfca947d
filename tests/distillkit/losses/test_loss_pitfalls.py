"""One test for each way in which public implementations of these losses are wrong or ambiguous."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillkit.losses import (
    clip_logit_norm,
    gradient_distance,
    mean_embedding_distance,
    rbf_mmd,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradient_distance_adds_eps_to_the_product_of_the_norms():
    g = torch.full((1, 1), 1e-3)
    assert float(gradient_distance([g], [g])) == pytest.approx(0.5)  # 1 - 1e-6 / (1e-6 + 1e-6)
    assert float(gradient_distance([g], [g], eps=0)) == pytest.approx(0)


def test_class_means_of_half_precision_use_float32():
    rows = torch.full((4096, 1), 1.0).bfloat16()
    loss = mean_embedding_distance(rows, rows + 2**-7)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(2**-14)


def test_rbf_mmd_stores_no_difference_for_each_pair():
    n, d, kept = 20, 300, []
    x, y = normal(0, n, d).requires_grad_(), normal(1, n, d)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rbf_mmd(x, y)
    assert max(kept) == max((2 * n) ** 2, 2 * n * d)


def test_rbf_mmd_is_accurate_far_from_the_origin():
    x, y = normal(0, 8, 4), normal(1, 8, 4) + 1
    far = rbf_mmd((x + 1000).float(), (y + 1000).float())
    assert float(far) == pytest.approx(float(rbf_mmd(x, y)), rel=2e-3)


def test_rbf_mmd_of_half_precision_uses_float32():
    x, y = (300 * normal(seed, 6, 4).half() for seed in (0, 1))  # squares overflow half precision
    value = rbf_mmd(x, y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, rbf_mmd(x.float(), y.float()))


def test_released_clipping_stretches_short_logits():
    below, above = torch.tensor([[0.399, 0.0]]), torch.tensor([[0.401, 0.0]])
    assert torch.equal(clip_logit_norm(below), below)
    assert float(clip_logit_norm(above)[0, 0]) == pytest.approx(2.5)
    assert torch.equal(clip_logit_norm(above, continuous=True), above)
    assert clip_logit_norm(torch.tensor([[3.0, 4.0]]), continuous=True).tolist() == [[1.5, 2.0]]
