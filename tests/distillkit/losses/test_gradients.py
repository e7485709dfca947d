"""Properties of the distance between gradients, against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distillkit.losses import gradient_distance

seeds = st.integers(0, 2**16)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = [(3, 2, 2, 2), (3,), (4, 3), (4,), (2, 5, 2)]


def parameters(seed: int) -> list[Tensor]:
    return [normal(seed + i, *shape) for i, shape in enumerate(SHAPES)]


def slow_row_cosine(gradients: list[Tensor], targets: list[Tensor], eps: float) -> float:
    total = 0.0
    for g, t in zip(gradients, targets):
        if g.ndim == 1:
            continue
        for row, target in zip(g.reshape(g.shape[0], -1), t.reshape(t.shape[0], -1)):
            total += 1 - float(row @ target) / (float(row.norm()) * float(target.norm()) + eps)
    return total


@given(seeds, st.sampled_from([0.0, 1e-6, 0.1]))
def test_gradient_distance_equals_the_loop(seed, eps):
    g, t = parameters(seed), parameters(seed + 100)
    flat, target = torch.cat([v.reshape(-1) for v in g]), torch.cat([v.reshape(-1) for v in t])
    assert float(gradient_distance(g, t, eps=eps)) == pytest.approx(slow_row_cosine(g, t, eps))
    squares = sum((a - b) ** 2 for a, b in zip(flat.tolist(), target.tolist()))
    assert float(gradient_distance(g, t, metric="mse")) == pytest.approx(squares)
    cosine = float(flat @ target) / (float(flat.norm()) * float(target.norm()) + eps)
    assert float(gradient_distance(g, t, metric="cos", eps=eps)) == pytest.approx(1 - cosine)


@given(seeds, st.sampled_from(["row_cosine", "mse", "cos"]), st.sampled_from([0.0, 1e-6]), st.booleans())
def test_rows_of_zeros_give_no_nan_under_double_backward(seed, metric, eps, all_zero):
    g, t = parameters(seed), parameters(seed + 100)
    for side, row in ((g, 0), (t, 1)):
        for v in side:
            v[slice(None) if all_zero else row] = 0
    g = [v.requires_grad_() for v in g]
    loss = gradient_distance(g, t, metric=metric, eps=eps)
    first = torch.autograd.grad(loss, g, create_graph=True, allow_unused=True, materialize_grads=True)
    size = sum(v.square().sum() for v in first)
    assert loss.isfinite()
    assert size.isfinite()
    if size.requires_grad:
        second = torch.autograd.grad(size, g, allow_unused=True, materialize_grads=True)
        assert all(v.isfinite().all() for v in second)
    if all_zero and metric == "row_cosine":
        assert float(loss) == sum(shape[0] for shape in SHAPES if len(shape) > 1)
        assert float(size) == 0


@settings(max_examples=5)
@given(seeds)
def test_gradient_distance_gradcheck_to_second_order(seed):
    t = [normal(seed, 2, 3), normal(seed + 1, 2, 1, 2)]
    inputs = tuple(normal(seed + 2 + i, *v.shape).requires_grad_() for i, v in enumerate(t))
    for metric in ("row_cosine", "mse", "cos"):

        def loss(*g: Tensor, metric: str = metric) -> Tensor:
            return gradient_distance(g, t, metric=metric, eps=0.1)

        assert torch.autograd.gradcheck(loss, inputs)
        assert torch.autograd.gradgradcheck(loss, inputs)
