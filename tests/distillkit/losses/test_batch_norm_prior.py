"""The BatchNorm prior as an object: hooks, refusals, and user-defined networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distillkit import networks
from distillkit.losses import BatchNormPrior


class Residual(nn.Module):
    """A user's network: a norm that runs twice, a branch without one, and a layer without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4)
        self.free = nn.BatchNorm2d(4, track_running_stats=False)
        self.head, self.last = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(images))
        x = self.free(x + self.norm(x)).mean((2, 3))
        return self.last(self.head(x))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 5, 6, 6, generator=torch.Generator().manual_seed(0))


def test_hooks_are_removed_after_an_exception(images):
    model = networks.build(Residual, 0).eval()
    with pytest.raises(RuntimeError, match="expected input"), BatchNormPrior(model):
        model(images[:, :2])
    assert hooks(model) == 0


def test_object_can_be_reused_but_not_nested(images):
    model = networks.build(Residual, 0).eval()
    prior = BatchNormPrior(model)
    with prior:
        model(images)
        first = prior.value()
        with pytest.raises(RuntimeError, match="in use"), prior:
            pass
        assert hooks(model) == 2
    with prior:
        with pytest.raises(RuntimeError, match="no forward pass"):
            prior.value()
        model(images)
        assert torch.equal(prior.value(), first)
    assert hooks(model) == 0


def test_value_is_that_of_the_last_forward_pass(images):
    model = networks.build(Residual, 0).eval()
    with BatchNormPrior(model) as prior:
        model(images)
        first = prior.value()
        model(images + 1)
        second = prior.value()
        model(images)
        assert torch.equal(prior.value(), first)
        assert not torch.equal(second, first)


def test_stored_statistics_are_constant_and_outside_the_graph(images):
    model = networks.build(Residual, 0).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images.requires_grad_()
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
    assert float(prior_of(layer, x.detach())) == pytest.approx(0, abs=1e-12)
    assert gradient.isfinite().all()


def prior_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with BatchNormPrior(layer) as prior:
        layer(x)
        return prior.value()


def test_network_without_batch_norm_is_refused_by_name():
    with pytest.raises(
        ValueError, match="must have a BatchNorm layer with running statistics, but Sequential has none"
    ):
        BatchNormPrior(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4), nn.InstanceNorm2d(4)))
    with pytest.raises(ValueError, match="but BatchNorm2d has none"):
        BatchNormPrior(nn.BatchNorm2d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="network must be one with values, .* 'meta'"):
        BatchNormPrior(nn.BatchNorm2d(3, device="meta"))
