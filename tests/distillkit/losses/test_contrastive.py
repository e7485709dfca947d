"""Properties of the contrastive losses, each against a loop written from the equation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distillkit.losses import model_contrastive, supervised_contrastive

seeds = st.integers(0, 2**16)
temperatures = st.sampled_from([0.07, 0.5, 1.0, 3.0])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def batches(draw, least: int = 1) -> tuple[Tensor, Tensor]:
    n, d = draw(st.integers(least, 7)), draw(st.integers(1, 5))
    labels = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    return normal(draw(seeds), n, d), labels


def slow_anchor_losses(embeddings: Tensor, labels: Tensor, temperature: float) -> list[Tensor]:
    """Return the loss of each anchor with a positive, from the equation, pair by pair."""
    z = [row / row.norm() for row in embeddings]
    losses = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        if positives:
            normalizer = sum(torch.exp(z[i] @ z[a] / temperature) for a in others)
            terms = [torch.log(torch.exp(z[i] @ z[p] / temperature) / normalizer) for p in positives]
            losses.append(-sum(terms) / len(positives))
    return losses


@given(batches(), temperatures)
def test_supervised_contrastive_equals_the_loop(batch, temperature):
    embeddings, labels = batch
    slow = slow_anchor_losses(embeddings, labels, temperature)
    total = float(sum(slow))
    options = {"temperature": temperature}
    assert float(supervised_contrastive(*batch, **options, reduction="sum")) == pytest.approx(total, abs=1e-10)
    assert float(supervised_contrastive(*batch, **options)) == pytest.approx(total / max(len(slow), 1), abs=1e-10)
    zero = float(supervised_contrastive(*batch, **options, empty="zero"))
    assert zero == pytest.approx(total / len(labels), abs=1e-10)


@given(batches(), batches(), temperatures, st.booleans())
def test_other_side_provides_anchors_and_detach_stops_only_its_gradient(first, second, temperature, detach):
    embeddings, labels = first
    other = normal(len(second[0]), len(second[0]), embeddings.shape[1])
    embeddings, other = embeddings.requires_grad_(), other.requires_grad_()
    loss = supervised_contrastive(
        embeddings, labels, other, second[1], temperature=temperature, detach_other=detach, reduction="sum"
    )
    joined = torch.cat([embeddings, other.detach() if detach else other])
    slow = torch.stack(slow_anchor_losses(joined, torch.cat([labels, second[1]]), temperature) or [joined.sum() * 0])
    torch.testing.assert_close(loss, slow.sum(), atol=1e-10, rtol=1e-10)
    wanted = torch.autograd.grad(slow.sum(), [embeddings, other], allow_unused=True, materialize_grads=True)
    given_ = torch.autograd.grad(loss, [embeddings, other], allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(given_, wanted):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert not detach or float(given_[1].abs().sum()) == 0


@given(st.integers(1, 6), seeds, st.sampled_from(["drop", "zero"]), st.sampled_from(["mean", "sum"]))
def test_batch_without_positives_gives_zero_with_a_graph(n, seed, empty, reduction):
    embeddings = normal(seed, n, 3).requires_grad_()
    loss = supervised_contrastive(embeddings, torch.arange(n), empty=empty, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss, embeddings)
    assert float(loss.detach()) == 0
    assert torch.equal(gradient, torch.zeros(n, 3, dtype=torch.float64))


@given(batches(3), st.sampled_from([1e-3, 0.07]), st.sampled_from([torch.float32, torch.float64]))
def test_degenerate_embeddings_and_small_temperatures_give_no_nan(batch, temperature, dtype):
    embeddings, labels = batch[0].to(dtype), batch[1]
    embeddings[0] = 0
    embeddings[1] = embeddings[2]
    embeddings.requires_grad_()
    loss = supervised_contrastive(embeddings, labels, temperature=temperature)
    (gradient,) = torch.autograd.grad(loss, embeddings)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert float(gradient[0].norm()) <= 4 / temperature


@given(seeds, st.integers(1, 6), st.integers(1, 5), temperatures)
def test_model_contrastive_equals_the_loop(seed, n, d, temperature):
    z, near, far = normal(seed, 3, n, d)

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    slow = []
    for i in range(n):
        up = math.exp(cosine(z[i], near[i]) / temperature)
        down = math.exp(cosine(z[i], far[i]) / temperature)
        slow.append(-math.log(up / (up + down)))
    options = {"temperature": temperature}
    assert model_contrastive(z, near, far, **options, reduction="none").tolist() == pytest.approx(slow)
    assert float(model_contrastive(z, near, far, **options)) == pytest.approx(sum(slow) / n)
    assert float(model_contrastive(z, near, far, **options, reduction="sum")) == pytest.approx(sum(slow))


@settings(max_examples=5)
@given(seeds)
def test_model_contrastive_is_stable_and_differentiable(seed):
    z, near, far = (t.requires_grad_() for t in normal(seed, 3, 4, 3))
    assert torch.autograd.gradcheck(lambda *args: model_contrastive(*args), (z, near, far))
    extreme = model_contrastive(z, -z, z, temperature=1e-4)
    assert float(extreme.detach()) == pytest.approx(2e4)
    zero = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model_contrastive(zero, near, far), zero)
    assert gradient.isfinite().all()
