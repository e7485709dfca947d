"""Properties of the clients' regularizers and of logit clipping, each against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.losses import clip_logit_norm, feature_decorrelation, prototype_distance, proximal

seeds = st.integers(0, 2**16)
sizes = st.integers(1, 6)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds, st.floats(0, 5), st.lists(st.sampled_from([(2,), (2, 3), ()]), min_size=1, max_size=3))
def test_proximal_equals_the_loop_and_has_gradient_mu_times_distance(seed, mu, shapes):
    weights = [normal(seed + i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    reference = [normal(seed + 9 + i, *shape) for i, shape in enumerate(shapes)]
    value = proximal(weights, reference, mu)
    pairs = [(a, b) for w, r in zip(weights, reference) for a, b in zip(w.flatten().tolist(), r.flatten().tolist())]
    assert float(value.detach()) == pytest.approx(mu / 2 * sum((a - b) ** 2 for a, b in pairs))
    for gradient, w, r in zip(torch.autograd.grad(value, weights), weights, reference):
        torch.testing.assert_close(gradient, mu * (w - r).detach())
    assert float(proximal(weights, [w.detach() for w in weights], mu).detach()) == 0
    torch.testing.assert_close(proximal(reference, weights, mu), value)
    torch.testing.assert_close(proximal(weights, reference, 3 * mu), 3 * value)


def slow_correlations(x: Tensor) -> list[list[float]]:
    n, d = x.shape
    columns = [x[:, j].tolist() for j in range(d)]
    means = [sum(c) / n for c in columns]
    covariance = [
        [sum((a - means[i]) * (b - means[j]) for a, b in zip(columns[i], columns[j])) / n for j in range(d)]
        for i in range(d)
    ]
    return [[covariance[i][j] / (covariance[i][i] * covariance[j][j]) ** 0.5 for j in range(d)] for i in range(d)]


@given(seeds, st.integers(2, 8), st.integers(1, 6))
def test_feature_decorrelation_equals_the_loop(seed, n, d):
    x = normal(seed, n, d)
    k = slow_correlations(x)
    paper = sum(k[i][j] ** 2 for i in range(d) for j in range(d)) / d**2
    apart = sum(k[i][j] ** 2 for i in range(d) for j in range(d) if i != j) / max(d * (d - 1), 1)
    assert float(feature_decorrelation(x, eps=1e-14)) == pytest.approx(paper, rel=1e-6)
    released = float(feature_decorrelation(x, variant="released", eps=1e-14))
    assert released == pytest.approx(apart * (n - 1) ** 2 / n, rel=1e-6, abs=1e-12)


@given(seeds, sizes, st.sampled_from(["paper", "released"]))
def test_feature_decorrelation_of_one_image_or_constant_dimensions(seed, d, variant):
    one = normal(seed, 1, d).requires_grad_()
    value = feature_decorrelation(one, variant=variant)
    assert float(value.detach()) == 0
    assert torch.equal(torch.autograd.grad(value, one)[0], torch.zeros_like(one))
    constant = torch.cat([normal(seed, 4, d), torch.ones(4, 1)], dim=1).requires_grad_()
    value = feature_decorrelation(constant, variant=variant)
    assert value.isfinite()
    assert torch.autograd.grad(value, constant)[0].isfinite().all()


@st.composite
def prototype_cases(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, k, d, seed = draw(sizes), draw(sizes), draw(sizes), draw(seeds)
    labels = torch.tensor(draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)))
    present = torch.tensor(draw(st.lists(st.booleans(), min_size=k, max_size=k)))
    return normal(seed, n, d), labels, normal(seed + 1, k, d), present


@given(prototype_cases())
def test_prototype_distance_equals_the_loop(case):
    embeddings, labels, prototypes, present = case
    embeddings.requires_grad_()
    slow = [float(((e - prototypes[y]) ** 2).sum().detach()) for e, y in zip(embeddings, labels.tolist()) if present[y]]
    value = prototype_distance(*case)
    assert float(value.detach()) == pytest.approx(sum(slow) / max(len(slow), 1))
    assert float(prototype_distance(*case, reduction="sum").detach()) == pytest.approx(sum(slow))
    (gradient,) = torch.autograd.grad(value, embeddings)
    wanted = 2 * (embeddings - prototypes[labels]) * present[labels].unsqueeze(1) / max(len(slow), 1)
    torch.testing.assert_close(gradient, wanted.detach())
    everywhere = prototype_distance(embeddings, labels, prototypes)
    assert torch.equal(prototype_distance(embeddings, labels, prototypes, torch.ones_like(present)), everywhere)
    assert float(prototype_distance(prototypes[labels], *case[1:])) == 0


@given(prototype_cases())
def test_prototype_distance_ignores_absent_prototypes(case):
    embeddings, labels, prototypes, present = case
    value = prototype_distance(*case)
    broken = torch.where(present.unsqueeze(1), prototypes, torch.nan)
    assert torch.equal(prototype_distance(embeddings, labels, broken, present), value)


@given(seeds, sizes, st.integers(2, 5), st.sampled_from([0.01, 0.1, 1.0, 10.0]))
def test_clipped_logits_have_the_released_norm_and_threshold(seed, n, k, scale):
    logits = scale * normal(seed, n, k)
    at_threshold = logits.clone()
    at_threshold[0, 0], at_threshold[0, 1:] = 0.4, 0
    for rows in (logits, at_threshold):
        clipped = clip_logit_norm(rows)
        for before, after in zip(rows, clipped):
            long = float(before.norm()) > 0.4
            wanted = 2.5 * before / before.norm() if long else before
            torch.testing.assert_close(after, wanted)
        assert torch.equal(clipped.argmax(1), rows.argmax(1))


@given(seeds, sizes, st.sampled_from([0.01, 1.0, 10.0]), st.floats(0.5, 5), st.booleans())
def test_clipping_invariances(seed, n, scale, max_norm, continuous):
    logits = scale * normal(seed, n, 4)
    clipped = clip_logit_norm(logits, max_norm, continuous=continuous)
    assert torch.equal(clipped.argmax(1), logits.argmax(1))
    singles = torch.cat([clip_logit_norm(row[None], max_norm, continuous=continuous) for row in logits])
    torch.testing.assert_close(singles, clipped)
    if continuous:
        torch.testing.assert_close(clipped.norm(dim=1), logits.norm(dim=1).clamp(max=max_norm))
        torch.testing.assert_close(clip_logit_norm(clipped, max_norm, continuous=True), clipped)
