"""Properties of the image priors, each against a loop over pixels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit import networks
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


class Residual(nn.Module):
    """A user's network: a norm that runs twice, a branch without one, and a layer without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4)
        self.free = nn.BatchNorm2d(4, track_running_stats=False)
        self.head, self.last = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.norm(self.stem(batch))
        x = self.free(x + self.norm(x)).mean((2, 3))
        return self.last(self.head(x))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(3, 5, 6, 6, generator=torch.Generator().manual_seed(0))


def test_object_has_the_value_of_the_last_forward_pass_and_can_be_reused_but_not_nested(batch):
    """Its hooks are removed, also after an exception."""
    model = networks.build(Residual, 0).eval()
    prior = BatchNormPrior(model)
    with pytest.raises(RuntimeError, match="expected input"), prior:
        model(batch[:, :2])
    assert hooks(model) == 0
    with prior:
        for values in (None, batch):  # before a forward pass, and after it
            if values is not None:
                model(values)
            with pytest.raises(RuntimeError, match="in use"), prior:
                pass
        first = prior.value()
        assert hooks(model) == 2
    with prior:
        with pytest.raises(RuntimeError, match="no forward pass"):
            prior.value()
        model(batch)
        assert torch.equal(prior.value(), first)
        model(batch + 1)
        assert not torch.equal(prior.value(), first)
        model(batch)
        assert torch.equal(prior.value(), first)
    assert hooks(model) == 0


def test_stored_statistics_are_constant_and_outside_the_graph(batch):
    model = networks.build(Residual, 0).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = batch.requires_grad_()
    with BatchNormPrior(model) as prior:
        model(x)
        prior.value().backward()
    assert float(x.grad.abs().sum()) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batch_with_the_stored_statistics_has_value_zero():
    layer = nn.BatchNorm2d(3).eval()
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer.double()
    layer.running_mean.copy_(x.mean((0, 2, 3)))
    layer.running_var.copy_(x.var((0, 2, 3), correction=0))
    with BatchNormPrior(layer) as prior:
        layer(x.requires_grad_())
        (gradient,) = torch.autograd.grad(prior.value(), x)
        value = float(prior.value().detach())
    assert value == pytest.approx(0, abs=1e-12)
    assert gradient.isfinite().all()
