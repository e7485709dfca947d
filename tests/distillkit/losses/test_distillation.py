"""Properties of the distillation and disagreement losses, each against a loop written from the equation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distillkit.losses import binary_distillation, clamped_disagreement, jensen_shannon, knowledge_distillation

seeds = st.integers(0, 2**16)
temperatures = st.sampled_from([0.5, 1.0, 4.0])
LOSSES = [knowledge_distillation, binary_distillation, jensen_shannon, clamped_disagreement]


@st.composite
def logit_pairs(draw) -> tuple[Tensor, Tensor]:
    n, k, scale = draw(st.integers(1, 5)), draw(st.integers(2, 5)), draw(st.sampled_from([0.1, 1.0, 5.0]))
    both = torch.randn(2, n, k, generator=torch.Generator().manual_seed(draw(seeds)), dtype=torch.float64)
    return scale * both[0], scale * both[1]


def softmax(row: Tensor) -> list[float]:
    exponentials = [math.exp(v) for v in row.tolist()]
    return [e / sum(exponentials) for e in exponentials]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q))


@given(logit_pairs(), temperatures)
def test_knowledge_distillation_equals_the_loop(pair, temperature):
    student, teacher = pair
    slow = [temperature**2 * kl(softmax(t / temperature), softmax(s / temperature)) for s, t in zip(student, teacher)]
    options = {"temperature": temperature}
    assert knowledge_distillation(*pair, **options, reduction="none").tolist() == pytest.approx(slow)
    assert float(knowledge_distillation(*pair, **options)) == pytest.approx(sum(slow) / len(slow))
    assert float(knowledge_distillation(*pair, **options, reduction="sum")) == pytest.approx(sum(slow))


@given(logit_pairs(), temperatures)
def test_binary_distillation_equals_softmax_distillation_by_label(pair, temperature):
    slow = torch.zeros(len(pair[0]), dtype=torch.float64)
    for k in range(pair[0].shape[1]):
        student, teacher = (torch.stack([side[:, k], torch.zeros(len(side))], dim=1) for side in pair)
        slow += knowledge_distillation(student, teacher, temperature=temperature, reduction="none")
    ours = binary_distillation(*pair, temperature=temperature, reduction="none")
    torch.testing.assert_close(ours, slow)
    torch.testing.assert_close(binary_distillation(*pair, temperature=temperature), slow.mean())


@given(logit_pairs())
def test_jensen_shannon_equals_the_loop_and_is_between_zero_and_ln_2(pair):
    slow = []
    for a, b in zip(*pair):
        p, q = softmax(a), softmax(b)
        m = [(x + y) / 2 for x, y in zip(p, q)]
        slow.append(kl(p, m) / 2 + kl(q, m) / 2)
    value = jensen_shannon(*pair, reduction="none")
    assert value.tolist() == pytest.approx(slow, abs=1e-12)
    assert float(jensen_shannon(*pair)) == pytest.approx(sum(slow) / len(slow), abs=1e-12)
    assert bool(((value >= -1e-12) & (value <= math.log(2) + 1e-12)).all())
    torch.testing.assert_close(jensen_shannon(*reversed(pair), reduction="none"), value)


@given(logit_pairs(), st.sampled_from([(0.01, 0.99), (0.2, 0.6)]))
def test_clamped_disagreement_equals_the_loop_and_is_in_the_unit_interval(pair, limits):
    low, high = limits

    def clamp(values: list[float]) -> list[float]:
        return [min(max(v, low), high) for v in values]

    slow = []
    for a, b in zip(*pair):
        p, q = softmax(a), softmax(b)
        m = clamp([(x + y) / 2 for x, y in zip(p, q)])
        slow.append(kl(m, clamp(p)) / 2 + kl(m, clamp(q)) / 2)
    mean = sum(slow) / len(slow)
    options = {"low": low, "high": high}
    free = clamped_disagreement(*pair, **options, clamp_result=False, reduction="none")
    assert free.tolist() == pytest.approx(slow, abs=1e-12)
    assert float(clamped_disagreement(*pair, **options)) == pytest.approx(min(max(mean, 0), 1), abs=1e-12)
    each = [min(max(v, 0), 1) for v in slow]
    assert clamped_disagreement(*pair, **options, reduction="none").tolist() == pytest.approx(each, abs=1e-12)
    assert float(clamped_disagreement(*pair, **options, reduction="sum")) == pytest.approx(sum(each), abs=1e-12)
    assert 0 <= float(clamped_disagreement(*pair)) <= 1
    torch.testing.assert_close(clamped_disagreement(*reversed(pair)), clamped_disagreement(*pair))


@pytest.mark.parametrize("loss", LOSSES)
@given(pair=logit_pairs(), seed=seeds)
def test_losses_are_zero_at_equality_positive_elsewhere_and_equivariant(loss, pair, seed):
    p, q = pair
    assert float(loss(p, p)) == pytest.approx(0, abs=1e-12)
    assert float(loss(p, q)) >= 0
    singles = torch.stack([loss(p[[i]], q[[i]]) for i in range(len(p))])
    torch.testing.assert_close(loss(p, q, reduction="none"), singles)
    generator = torch.Generator().manual_seed(seed)
    rows, classes = torch.randperm(len(p), generator=generator), torch.randperm(p.shape[1], generator=generator)
    torch.testing.assert_close(loss(p[rows][:, classes], q[rows][:, classes]), loss(p, q))
    if loss is not binary_distillation:  # softmax ignores a shift of a row, a sigmoid does not
        shift = torch.randn(2, len(p), 1, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(loss(p + shift[0], q + shift[1]), loss(p, q))


@pytest.mark.parametrize("loss", LOSSES)
@given(n=st.integers(1, 3), k=st.integers(2, 5), scale=st.sampled_from([50.0, 1e4]))
def test_certain_and_opposed_predictions_give_no_nan(loss, n, k, scale):
    p = torch.zeros(n, k)
    p[:, 0] = scale
    q = p.flip(1).requires_grad_()
    p.requires_grad_()
    value = loss(p, q)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value, [p, q]))
