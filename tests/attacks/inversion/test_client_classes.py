"""Bounds on a client's classes from its messages: never wrong, and exact where a formula determines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from attacks.inversion import ClassBounds, class_bounds
from attacks.inversion.client_classes import _with_size
from distillkit.rng import derive
from tests.refused import refused

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=12)
MANY = torch.iinfo(torch.int64).max


def head(seed: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, 8, 6)
    g = derive(seed)
    layer.weight.data, layer.bias.data = scale * torch.randn(6, 8, generator=g), torch.randn(6, generator=g)
    return layer


def features(seed: int, count: int) -> Tensor:
    return torch.randn(count, 8, generator=derive(seed, "x")).relu()


def gradients(seed: int, labels: Tensor) -> tuple[Tensor, Tensor]:
    layer = head(seed)
    value = nn.functional.cross_entropy(layer(features(seed, len(labels))), labels)
    weight, bias = torch.autograd.grad(value, [layer.weight, layer.bias])
    return weight, bias


def true(held: ClassBounds, labels: Tensor) -> bool:
    counts = labels.bincount(minlength=6)
    return bool(((held.at_least <= counts) & (counts <= held.at_most)).all())


@given(LABELS, st.integers(0, 500), st.sampled_from([1.0, 0.3, 1e-4]))
def test_bounds_from_a_gradient_are_true(chosen: list[int], seed: int, clipped: float) -> None:
    labels = torch.tensor(chosen)
    weight, bias = (clipped * g for g in gradients(seed, labels))
    for held in (
        class_bounds(6, bias_gradient=bias),
        class_bounds(6, weight_gradient=weight),
        class_bounds(6, bias_gradient=bias, weight_gradient=weight, size=len(labels)),
    ):
        assert true(held, labels)
        assert bool(held.present.any())  # entries sum to 0, so one is negative
    if len(labels) == 1:
        assert torch.equal(held.at_least, held.at_most)
        assert held.at_least.argmax() == labels[0]


def change_of_bias(layer: nn.Linear, x: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    """Return the change of the bias in steps on every other record."""
    before = layer.bias.detach().clone()
    for step in range(steps):
        part = torch.arange(step % 2, len(labels), 2) if len(labels) > 1 else torch.tensor([0])
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(x[part]), labels[part]).backward()
        optimizer.step()
    return layer.bias.detach() - before


@given(LABELS, st.integers(0, 200), st.integers(1, 6), st.sampled_from([0.0, 0.9]))
def test_sgd_raises_a_bias_only_for_present_classes(chosen: list[int], seed: int, steps: int, momentum: float) -> None:
    labels, layer = torch.tensor(chosen), head(seed)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)
    held = class_bounds(6, bias_change=change_of_bias(layer, features(seed, len(labels)), labels, sgd, steps))
    assert true(held, labels)
    assert bool(held.present.any())


@pytest.mark.parametrize(
    ("optimizer", "noise"),
    [(torch.optim.Adam, 0.0), (partial(torch.optim.SGD, weight_decay=0.1), 0.0), (torch.optim.SGD, 0.01)],
)
def test_messages_without_certain_bounds_are_refused(optimizer: Any, noise: float) -> None:
    layer = head(3)
    change = change_of_bias(layer, features(3, 3), torch.tensor([0, 0, 1]), optimizer(layer.parameters(), lr=0.1), 3)
    change += noise * torch.randn(6, generator=derive(9))
    words = "bias_change must sum to 0 over the classes.*call class_counts"
    refused(lambda: class_bounds(6, bias_change=change), ValueError, words)


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(any), st.booleans())
def test_label_rows_and_sets_reveal_present_classes(counts: list[int], noised: bool) -> None:
    truth = torch.tensor(counts)
    labels = torch.arange(6).repeat_interleave(truth)
    x = features(1, len(labels)) + 0.1
    means = torch.stack([x[labels == k].sum(0) / max(1, counts[k]) for k in range(6)])
    sent = means + 0.5 * torch.randn(6, 8, generator=derive(2)) * (truth > 0)[:, None] if noised else means
    held = class_bounds(6, class_rows=sent, noised=noised)
    assert true(held, labels)
    if not noised or 0 in counts:
        assert torch.equal(held.present, truth > 0)
        assert torch.equal(held.absent, truth == 0)
    everywhere = class_bounds(6, class_rows=means + torch.randn(6, 8, generator=derive(3)), noised=True)
    assert not bool(everywhere.present.any() | everywhere.absent.any())
    missing = torch.where((truth > 0)[:, None], means, torch.nan)
    assert torch.equal(class_bounds(6, class_rows=missing).absent, truth == 0)
    ipc = 3
    made = torch.arange(6).repeat_interleave(truth.clamp(max=ipc))
    by_label = class_bounds(6, labels=made, ipc=ipc)
    assert true(by_label, labels)
    assert torch.equal(by_label.exact, truth < ipc)
    with_size = class_bounds(6, labels=made, ipc=ipc, size=len(labels))
    assert true(with_size, labels)
    assert bool(with_size.exact.all()) or int((truth >= ipc).sum()) > 1
    plain = class_bounds(6, labels=made)
    assert torch.equal(plain.present, truth > 0)
    assert torch.equal(plain.absent, truth == 0)


def test_several_messages_are_combined() -> None:
    labels = torch.tensor([0, 0, 2, 5])
    weight, _ = gradients(4, labels)
    held = class_bounds(6, weight_gradient=weight, labels=torch.tensor([0, 2, 5]), ipc=1, size=4)
    assert held.at_least.tolist() == [1, 0, 1, 0, 0, 1]
    assert held.at_most.tolist() == [2, 0, 2, 0, 0, 2]
    assert str(held) == (
        "The sender certainly holds classes 0 (1 to 2), 2 (1 to 2), 5 (1 to 2); certainly lacks classes 1, 3, 4. "
        "Assuming: the weight gradient of cross-entropy with hard labels, on features that are never negative; images "
        "started from up to 1 different records per class; 4 records in all."
    )
    assert "10 (exactly 1), 11 (exactly 1); certainly lacks classes 12." in str(
        class_bounds(13, labels=torch.arange(12), ipc=1, size=12)
    )
    exact = class_bounds(3, labels=torch.tensor([0, 1]), ipc=3, size=2)
    assert "holds classes 0 (exactly 1), 1 (exactly 1)" in str(exact)
    assert "images started from up to 3 different records" in str(exact)
    for name, sent in (
        ("bias_change", [1.2e-5, 7e-6, 1.0, -1.0]), ("bias_gradient", [-1.0, 0, 1]),
        ("weight_gradient", [[-1.0, 2, 0], [0, 0, 1e-9], [1, -2, 0]]),
    ):  # fmt: skip
        for scale in (1.0, 1e-9):
            held = class_bounds(len(sent), **{name: scale * torch.tensor(sent)})  # type: ignore[arg-type]
            assert held.present.tolist()[:2] == [True, False]  # a zero tells nothing
    class_bounds(3, bias_gradient=BIAS + torch.tensor([0, 0, 0.9e-4]))
    thirds = class_bounds(3, bias_gradient=torch.tensor([-1.2, -0.99985, 2.19985]) / 9, size=9)
    assert thirds.at_least.tolist() == [2, 1, 0]  # rounded up, except for rounding errors
    rows = torch.tensor([[0.0, 0], [0, 2], [3, 4]])
    assert class_bounds(3, class_rows=rows).absent.tolist() == [True, False, False]
    for message, ground in (
        ({"labels": torch.tensor([0, 1])}, "a set made for the present classes only"),
        ({"class_rows": rows}, "rows for some classes only"),
        ({"class_rows": rows, "noised": True}, "rows for some classes only, with noise on those"),
        ({"class_rows": rows + 1}, "a row for every class, without noise"),
        ({"class_rows": rows + 1, "noised": True}, "noised rows for all classes, from which nothing certain follows"),
    ):
        assert class_bounds(3, **message).grounds == (ground,)  # type: ignore[arg-type]
    assert "holds classes 0 (at least 2); certainly" in str(class_bounds(3, labels=torch.tensor([0, 0]), ipc=2))
    nothing = class_bounds(2, class_rows=torch.ones(2, 3), noised=True)
    said = "(at least 1); reveals nothing certain about 2 classes, which is no protection"
    assert said in str(class_bounds(3, bias_gradient=BIAS))
    assert nothing.at_most.tolist() == [MANY, MANY]


BIAS, ONE = torch.tensor([-0.5, 0.25, 0.25]), torch.tensor([1])
REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: class_bounds(3, size=5), "must be given at least one message"),
    (lambda: class_bounds(1, labels=torch.tensor([0])), "num_classes must be at least 2"),
    (lambda: class_bounds(4, bias_gradient=BIAS), r"one row or entry for each of 4 classes, got \[3\]"),
    (lambda: class_bounds(3, bias_gradient=BIAS, size=0), "size must be at least 1"),
    (lambda: class_bounds(3, labels=torch.tensor([0]), ipc=0), "ipc must be at least 1"),
    (lambda: class_bounds(3, bias_gradient=BIAS - 0.002), "bias_gradient must sum to 0 over the classes"),
    (lambda: class_bounds(3, bias_gradient=BIAS + torch.tensor([0, 0, 1.1e-4])), "bias_gradient must sum to 0 over"),
    (lambda: class_bounds(3, weight_gradient=1e-6 * torch.stack([BIAS, BIAS**2], 1)), "weight_gradient must sum to 0"),
    (lambda: class_bounds(3, class_rows=torch.ones(3, 2), noised=1), "noised must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: class_bounds(3, bias_change=torch.tensor([1, 2, 3])), "bias_change must be a floating tensor"),
    (lambda: class_bounds(3, bias_change=BIAS / 0), "bias_change must be finite"),
    (lambda: class_bounds(3, class_rows=torch.zeros(2, 2)), r"one row per class, \[3, F\], got \[2, 2\]"),
    (lambda: class_bounds(3, class_rows=torch.zeros(3, 0)), r"one row per class, \[3, F\], got \[3, 0\]"),
    (lambda: class_bounds(3, class_rows=torch.zeros(3)), r"one row per class, \[3, F\], got \[3\]"),
    (lambda: class_bounds(3, class_rows=torch.zeros(3, 2).long()), "class_rows must be a floating tensor"),
    (lambda: class_bounds(2, class_rows=torch.tensor([[1.0, torch.nan], [0, 0]])), "class_rows must be finite, except"),
    (lambda: class_bounds(3, labels=torch.tensor([3])), "labels must be below"),
    (lambda: class_bounds(3, labels=torch.tensor([0, 0, 1]), ipc=1), "images of every class, got 1 but 2 of one"),
    (lambda: class_bounds(3, bias_gradient=BIAS, ipc=1), "ipc needs labels"),
    (lambda: class_bounds(3, bias_gradient=BIAS, labels=ONE), r"\(classes \[0\]\): the .* scaled up; a set made"),
    (lambda: class_bounds(3, labels=torch.tensor([0, 1, 2]), size=2), "contradict each other"),
]


def test_bounds_are_tightened_by_the_size_to_every_possible_count() -> None:
    """Against the least and the largest count of each class among all counts within the bounds and of this size."""
    for low, high, size in (
        ([0, 1, 0], [3, 2, 9], 4),
        ([2, 0, 0], [2, 5, 1], 2),
        ([1, 1, 0], [9, 9, 9], 2),
        ([0, 0, 0], [1, 2, 9], 6),
    ):
        possible = [n for n in product(*(range(a, b + 1) for a, b in zip(low, high))) if sum(n) == size]
        got = _with_size(torch.tensor(low), torch.tensor(high), size)
        assert got[0].tolist() == [min(column) for column in zip(*possible)]
        assert got[1].tolist() == [max(column) for column in zip(*possible)]


@pytest.mark.parametrize(("call", "said"), REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_arguments_are_named(call: Callable[[], object], said: str) -> None:
    refused(call, (TypeError, ValueError), said)
