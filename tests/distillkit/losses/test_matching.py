"""Properties of the distances between sets and between gradients, each against a loop written from the equation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.losses import class_means, gradient_distance, mean_embedding_distance, rbf_mmd

seeds = st.integers(0, 2**16)
sizes = st.integers(1, 6)
CLASSES = 4


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_of(n: int):
    return st.lists(st.integers(0, CLASSES - 1), min_size=n, max_size=n).map(torch.tensor)


@st.composite
def two_sides(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, m, d, seed = draw(sizes), draw(sizes), draw(sizes), draw(seeds)
    return normal(seed, n, d), normal(seed + 1, m, d), draw(labels_of(n)), draw(labels_of(m))


@given(two_sides())
def test_class_means_equal_the_loop(sides):
    rows, _, labels, _ = sides
    means, counts = class_means(rows, labels, CLASSES)
    for k in range(CLASSES):
        mine = [rows[i] for i in range(len(rows)) if labels[i] == k]
        wanted = sum(mine) / len(mine) if mine else torch.zeros(rows.shape[1], dtype=torch.float64)
        torch.testing.assert_close(means[k], wanted)
        assert int(counts[k]) == len(mine)


@given(two_sides())
def test_mean_embedding_distance_equals_the_loop(sides):
    real, synthetic, real_labels, labels = sides
    slow = []
    for k in range(CLASSES):
        ours = [synthetic[i] for i in range(len(synthetic)) if labels[i] == k]
        theirs = [real[i] for i in range(len(real)) if real_labels[i] == k]
        gap = sum(ours) / len(ours) - sum(theirs) / len(theirs) if ours and theirs else torch.zeros(1)
        slow.append(float((gap**2).sum()))
    by_class = mean_embedding_distance(*sides, num_classes=CLASSES, reduction="none")
    assert by_class.tolist() == pytest.approx(slow, abs=1e-12)
    assert float(mean_embedding_distance(*sides)) == pytest.approx(sum(slow), abs=1e-12)


def slow_kernel(a: Tensor, b: Tensor, width: float, kernels: int, multiplier: float) -> float:
    distance = float(((a - b) ** 2).sum())
    return sum(math.exp(-distance / (width * multiplier ** (i - kernels // 2))) for i in range(kernels))


def slow_width(x: Tensor, y: Tensor) -> float:
    rows = torch.cat([x, y])
    pairs = [float(((a - b) ** 2).sum()) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    return sum(pairs) / len(pairs)


@given(two_sides(), st.integers(1, 6), st.sampled_from([1.5, 2.0, 4.0]), st.sampled_from([None, 0.7, 5.0]))
def test_rbf_mmd_equals_the_loop(sides, kernels, multiplier, bandwidth):
    x, y = sides[:2]
    n, m = len(x), len(y)
    width = slow_width(x, y) if bandwidth is None else bandwidth

    def k(a: Tensor, b: Tensor) -> float:
        return slow_kernel(a, b, width, kernels, multiplier)

    cross = sum(k(a, b) for a in x for b in y) / (n * m)
    biased = sum(k(a, b) for a in x for b in x) / n**2 + sum(k(a, b) for a in y for b in y) / m**2 - 2 * cross
    options = {"kernels": kernels, "multiplier": multiplier, "bandwidth": bandwidth}
    assert float(rbf_mmd(x, y, **options)) == pytest.approx(biased, abs=1e-9)
    if min(n, m) > 1:
        within_x = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
        within_y = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
        unbiased = float(rbf_mmd(x, y, **options, unbiased=True))
        assert unbiased == pytest.approx(within_x + within_y - 2 * cross, abs=1e-9)


@given(two_sides())
def test_rbf_mmd_does_not_differentiate_its_bandwidth(sides):
    x, y = sides[0].requires_grad_(), sides[1].requires_grad_()
    free = torch.autograd.grad(rbf_mmd(x, y), [x, y])
    fixed = torch.autograd.grad(rbf_mmd(x, y, bandwidth=slow_width(x.detach(), y.detach())), [x, y])
    for ours, wanted in zip(free, fixed):
        torch.testing.assert_close(ours, wanted, atol=1e-8, rtol=1e-8)
    assert torch.autograd.gradcheck(lambda a, b: rbf_mmd(a, b, bandwidth=2.0), (x, y))


@given(sizes, sizes)
def test_rbf_mmd_of_one_repeated_point_is_zero(n, m):
    x, y = torch.ones(n, 3, requires_grad=True), torch.ones(m, 3)
    value = rbf_mmd(x, y)
    assert float(value.detach()) == pytest.approx(0, abs=1e-6)
    assert torch.autograd.grad(value, x)[0].isfinite().all()


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
