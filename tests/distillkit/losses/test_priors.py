"""Properties of the image priors, each against a loop over pixels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit.losses import BatchNormPrior, deepinversion_variation, image_l2, total_variation

seeds = st.integers(0, 2**16)
orders = st.sampled_from([1, 2])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def images(draw) -> Tensor:
    sizes = st.integers(1, 4)
    return normal(draw(seeds), draw(sizes), draw(st.integers(1, 3)), draw(sizes), draw(sizes))


def differences(image: Tensor, dy: int, dx: int) -> list[float]:
    """Yield all `image[y + dy, x + dx] - image[y, x]` inside the image, over channels."""
    c, h, w = image.shape
    return [
        float(image[k, y + dy, x + dx] - image[k, y, x])
        for k in range(c)
        for y in range(h)
        for x in range(w)
        if 0 <= y + dy < h and 0 <= x + dx < w
    ]


@given(images(), orders)
def test_total_variation_equals_the_loop(x, order):
    slow = [sum(abs(d) ** order for d in differences(i, 0, 1) + differences(i, 1, 0)) for i in x]
    assert total_variation(x, order=order, reduction="none").tolist() == pytest.approx(slow)
    assert float(total_variation(x, order=order)) == pytest.approx(sum(slow) / len(slow))
    assert float(total_variation(x, order=order, reduction="sum")) == pytest.approx(sum(slow))


@given(images(), orders)
def test_deepinversion_variation_equals_the_loop(x, order):
    slow = 0.0
    for dy, dx in [(0, 1), (1, 0), (1, 1), (1, -1)]:
        values = [d for image in x for d in differences(image, dy, dx)]
        if values:
            norm = sum(v**2 for v in values) ** 0.5
            slow += norm if order == 2 else sum(abs(v) for v in values) / len(values)
    assert float(deepinversion_variation(x, order=order)) == pytest.approx(slow)


@given(images())
def test_image_l2_equals_the_loop(x):
    slow = [sum(v**2 for v in image.flatten().tolist()) ** 0.5 for image in x]
    assert image_l2(x, reduction="none").tolist() == pytest.approx(slow)
    assert float(image_l2(x)) == pytest.approx(sum(slow) / len(slow))
    assert float(image_l2(x, reduction="sum")) == pytest.approx(sum(slow))
    assert float(image_l2(x, reduction="batch")) == pytest.approx(sum(v**2 for v in slow) ** 0.5)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), orders)
def test_flat_and_black_images_have_a_finite_gradient(n, h, w, order):
    x = torch.zeros(n, 2, h, w, requires_grad=True)
    for value in (
        total_variation(x, order=order),
        deepinversion_variation(x, order=order),
        image_l2(x),
        image_l2(x, reduction="batch"),
    ):
        (gradient,) = torch.autograd.grad(value, x, allow_unused=True, materialize_grads=True)
        assert float(value.detach()) == 0
        assert torch.equal(gradient, torch.zeros_like(x))


@settings(max_examples=5)
@given(seeds, orders)
def test_priors_gradcheck(seed, order):
    x = normal(seed, 2, 2, 3, 3).requires_grad_()
    for prior in (
        lambda v: total_variation(v, order=order),
        lambda v: deepinversion_variation(v, order=order),
        image_l2,
        lambda v: image_l2(v, reduction="batch"),
    ):
        assert torch.autograd.gradcheck(prior, x)


def small_network(seed: int) -> nn.Sequential:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    ).double()
    for i, tensor in enumerate(model.state_dict().values()):
        if tensor.is_floating_point():
            tensor.copy_(normal(seed + i, *tensor.shape).abs())
    return model.eval()


@given(seeds, st.integers(1, 4), st.sampled_from([0.0, 1.0, 10.0]))
def test_batch_norm_prior_equals_the_loop(seed, n, multiplier):
    model, x = small_network(seed), normal(seed, n, 2, 3, 3)
    slow = 0.0
    for layer, weight in ((0, multiplier), (3, 1.0), (4, 1.0)):
        entering = model[:layer](x)
        mean_gap, var_gap = 0.0, 0.0
        for c in range(entering.shape[1]):
            values = entering[:, c].flatten().tolist()
            mean = sum(values) / len(values)
            mean_gap += (mean - float(model[layer].running_mean[c])) ** 2
            var = sum((v - mean) ** 2 for v in values) / len(values)
            var_gap += (var - float(model[layer].running_var[c])) ** 2
        slow += weight * (mean_gap**0.5 + var_gap**0.5)
    with BatchNormPrior(model, first_multiplier=multiplier) as prior:
        model(x)
        assert float(prior.value().detach()) == pytest.approx(slow)


@settings(max_examples=5)
@given(seeds)
def test_batch_norm_prior_gradcheck_and_order_of_images(seed):
    model, x = small_network(seed), normal(seed, 3, 2, 3, 3).requires_grad_()

    def value(images: Tensor) -> Tensor:
        with BatchNormPrior(model) as prior:
            model(images)
            return prior.value()

    assert torch.autograd.gradcheck(value, x)
    torch.testing.assert_close(value(x.flip(0)), value(x))
