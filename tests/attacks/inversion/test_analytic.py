"""Labels and inputs computed from a gradient by a formula: against values by hand and against autograd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.inversion import Noise, class_counts, infer_label, invert_linear, invert_linear_batch
from distillkit.rng import derive

SEEDS = st.integers(0, 2**16)


def gradients(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the message of one step of FedSGD."""
    loss = F.cross_entropy(network(images), labels)
    names, parameters = zip(*network.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def mlp(inputs: int, classes: int, seed: int, scale: float = 1.0, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), activation(), nn.Linear(32, classes))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=derive(seed, *p.shape)) / p.shape[-1] ** 0.5)
    return network


# Inputs.


def test_black_input_leaves_no_residual() -> None:
    """The record is 0, so the weight gradient is 0, and the bias gradient alone is not."""
    found = invert_linear(torch.zeros(2, 3), torch.tensor([-2.0, 1.0]))
    assert (found.input.tolist(), found.residual) == ([0.0] * 3, 0.0)
    large = invert_linear(torch.zeros(2, 20), torch.tensor([-2.0, 1.0]))
    assert repr(large) == "RecoveredInput(input=float32 [20], residual=0.0)"


def test_input_of_a_mixture_by_hand() -> None:
    """Units that saw (1, 0) and (0, 1): the nearest outer product with b = (1, 1) is x = (1/2, 1/2), half is left."""
    for scale in (2.0, 1e-6):
        found = invert_linear(scale * torch.eye(2).double().requires_grad_(), torch.ones(2).requires_grad_())
        assert (found.input.dtype, found.input.requires_grad) == (torch.float64, False)
        assert (found.input / scale).tolist() == pytest.approx([0.5, 0.5], abs=1e-12)
        assert found.residual == pytest.approx(0.5**0.5)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_unit_activated_by_one_image_of_a_batch_gives_that_image(seed: int) -> None:
    images = torch.rand(3, 1, 6, 6, generator=derive(seed, "x")) - 0.5
    network = mlp(36, 5, seed)
    grads = gradients(network, images, torch.tensor([0, 1, 2]))
    found = invert_linear_batch(grads["1.weight"].double(), grads["1.bias"])
    active = network[1](images.flatten(1)) > 0  # type: ignore[index]
    reacted = active[:, grads["1.bias"] != 0]
    assert found.shape == (reacted.shape[1], 36)
    alone = (reacted.sum(0) == 1).nonzero().flatten().tolist()
    assert alone
    for unit in alone:
        image = images[int(reacted[:, unit].int().argmax())].flatten()
        torch.testing.assert_close(found[unit], image.double(), atol=1e-5, rtol=0)


# Labels.


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(3, 12), st.sampled_from((0.1, 1.0, 3.0)), st.sampled_from((nn.ReLU, nn.Tanh)))
def test_one_label_is_inferred(seed: int, classes: int, scale: float, activation: type[nn.Module]) -> None:
    """This includes tanh, where features have both signs: rows are compared with one another."""
    image, label = torch.randn(1, 1, 4, 4, generator=derive(seed)), seed % classes
    grads = gradients(mlp(16, classes, seed, scale, activation), image, torch.tensor([label]))
    assert infer_label(grads["3.weight"]) == label
    assert int(class_counts(grads["3.bias"], 1).argmax()) == label
    assert infer_label(1e-200 * grads["3.weight"].double()) == label
    assert infer_label(grads["3.weight"].sign()) == label
    assert infer_label(torch.tensor([[-3.0, 1, 1], [1, 1, 1], [1, 1, 1]])) == 0  # by products, not by signs


@pytest.mark.parametrize(
    ("bias", "count", "known", "warned"),
    [
        ([0.25, -0.25], 4, None, False), ([0.5, -0.376], 4, None, False), ([0.5, -0.375], 4, None, True),
        ([-0.5, 0.375], 4, None, True), ([1.0, -1.0], 4, None, False), ([1.01, -1.01], 4, None, True),
        ([-1.01, 1.0], 4, None, True), ([5.0, -1.0], 1, None, False),
        ([0.5, -0.5], 2, [0.5, 0.4995], False), ([5.0, -1.0], 1, [0.5, 0.5], True),
    ],
)  # fmt: skip
def test_impossible_gradients_are_warned_of(bias: list[float], count: int, known: Any, warned: bool) -> None:
    """The counts cannot be right if the sum is off by half an image or an entry exceeds 1; one label is the sign's."""
    said = f"the sum {sum(bias):.3g} and entries up to {max(map(abs, bias)):.3g}, but .* of {count} images"
    with pytest.warns(UserWarning, match=said) if warned else nullcontext():
        class_counts(torch.tensor(bias), count, None if known is None else torch.tensor(known))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 6), count=st.integers(1, 5))
def test_label_counts_are_the_nearest_of_all(seed: int, classes: int, count: int) -> None:
    gradient = torch.randn(classes, generator=derive(seed), dtype=torch.float64)
    found = class_counts(gradient, count)
    wanted = count * (1 / classes - gradient)
    every = torch.cartesian_prod(*[torch.arange(count + 1)] * classes)
    every = every[every.sum(1) == count]
    nearest = (every - wanted).square().sum(1).min()
    assert int(found.sum()) == count
    assert int(found.min()) >= 0
    assert float((found - wanted).square().sum()) == pytest.approx(float(nearest))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 12), count=st.integers(1, 40), scale=st.sampled_from((0.1, 1.0, 5.0)))
def test_label_counts_are_exact_for_known_mean_probabilities(seed: int, classes: int, count: int, scale: float) -> None:
    logits = scale * torch.randn(count, classes, generator=derive(seed), dtype=torch.float64)
    labels = torch.randint(classes, (count,), generator=derive(seed, "y"))
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits + bias, labels), bias)
    off = torch.rand(classes, generator=derive(seed, "off"), dtype=torch.float64)
    off = off - off.mean()
    predictions = logits.softmax(1).mean(0) + off * 0.49 / count / off.abs().max()
    if float(predictions.min()) < 0:
        predictions = logits.softmax(1).mean(0)
    truth = torch.bincount(labels, minlength=classes)
    assert torch.equal(class_counts(gradient, count, predictions), truth)
    assert torch.equal(class_counts(gradient, count, logits.softmax(1)), truth)


# Refusals.

ROWS, BIAS = torch.tensor([[1.0, 2.0], [-2.0, -4.0], [1.0, 2.0]]), torch.tensor([1.0, -2.0, 1.0])
HUGE = 5e37 * ROWS
BAD: list[tuple[Any, str]] = [
    (lambda: invert_linear(ROWS, BIAS[:2]), r"must be of one layer, got \[3, 2\] and \[2\]"),
    (lambda: invert_linear(ROWS[:2], BIAS), r"must be of one layer, got \[2, 2\] and \[3\]"),
    (lambda: invert_linear(ROWS, 0 * BIAS), "bias_gradient must not be all 0"),
    (lambda: invert_linear_batch(ROWS, 0 * BIAS), "bias_gradient must not be all 0"),
    (lambda: invert_linear(ROWS, BIAS / 0), "bias_gradient must be finite"),
    (lambda: invert_linear(ROWS[None], BIAS), "weight_gradient must have two dimensions"),
    (lambda: invert_linear(ROWS, BIAS.int()), "bias_gradient must be a floating tensor .*int32"),
    (lambda: infer_label(ROWS[:2]), r"at least 3 classes, got \[2, 2\].*class_counts\(bias_gradient, 1\)"),
    (lambda: infer_label(0 * ROWS), "exactly one row .* got 0"),
    (lambda: infer_label(ROWS.abs()), r"got 0; for a batch or a noisy gradient use class_counts"),
    (lambda: infer_label(torch.eye(3)), "exactly one row .* got 3"),
    (lambda: class_counts(BIAS[:1], 2), r"bias_gradient must be .* at least 2, got shape \[1\]"),
    (lambda: class_counts(BIAS, 0), "count must be at least 1"),
    (lambda: class_counts(BIAS, 2, torch.full((4, 3), 0.332)), "probabilities"),
    (lambda: class_counts(BIAS, 2, torch.tensor([[1 / 3] * 3, [0.335] * 3])), "probabilities"),
    (lambda: class_counts(BIAS, 2, torch.tensor([[1.5, -0.5, 0.0]])), "probabilities"),
    (lambda: class_counts(BIAS, 2, torch.zeros(4, 3)), r"probabilities .* logits.softmax\(1\)"),
    (lambda: class_counts(BIAS, 2, torch.full((4,), 0.25)), r"a column for each of 3 classes, got \[1, 4\]"),
    (lambda: invert_linear(HUGE, BIAS / 1e3), "Inf in the recovered inputs: torch.float32 .*float64"),
    (lambda: invert_linear_batch(HUGE, BIAS / 1e3), "Inf in the recovered inputs"),
    (lambda: Noise(std=1e308)([HUGE]), "Inf in the noisy message: lower std"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError, FloatingPointError), match=said):
        call()
