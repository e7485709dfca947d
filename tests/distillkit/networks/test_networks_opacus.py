"""Per-sample gradients of built-in networks with Opacus."""

from __future__ import annotations

import itertools

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.validators import ModuleValidator
from torch import nn

from distillkit.networks import (
    CifarResNet,
    ConvNet,
    FedCOGCNN,
    ImageNetwork,
    LeNet,
    ResNet,
    SimpleCNN,
    WideResNet,
    build,
    split,
)

NETWORKS = {
    "convnet": lambda norm: ConvNet((2, 22, 22), 3, width=4, depth=2, norm=norm),
    "fedcog_cnn": lambda norm: FedCOGCNN((2, 22, 22), 3, norm=norm),
    "lenet": lambda norm: LeNet((2, 22, 22), 3, norm=norm),
    "simple_cnn": lambda norm: SimpleCNN((2, 22, 22), 3, norm=norm),
    "resnet8": lambda norm: CifarResNet((2, 22, 22), 3, depth=8, width=4, norm=norm),
    "resnet10": lambda norm: ResNet((2, 22, 22), 3, depth=10, width=2, norm=norm),
    "resnet50": lambda norm: ResNet((2, 22, 22), 3, depth=50, width=2, norm=norm),
    "wrn10_1": lambda norm: WideResNet((2, 22, 22), 3, depth=10, width=1, norm=norm),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("name", "norm"), list(itertools.product(NETWORKS, ["instance", "group", "layer", "none"])))
def test_per_sample_gradients_equal_a_loop(name: str, norm: str) -> None:
    net = build(lambda: NETWORKS[name](norm), 0).double()
    assert isinstance(net, ImageNetwork)
    assert ModuleValidator.validate(net) == []
    images = torch.empty(3, 2, 22, 22, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([2, 0, 1])
    loop = [
        torch.autograd.grad(nn.functional.cross_entropy(net(images[i : i + 1]), labels[i : i + 1]), net.parameters())
        for i in range(3)
    ]
    wrapped = GradSampleModule(net, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(images), labels, reduction="sum").backward()
    for i, (key, parameter) in enumerate(net.named_parameters()):
        expected = torch.stack([gradients[i] for gradients in loop])
        torch.testing.assert_close(parameter.grad_sample, expected, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", NETWORKS)
def test_opacus_refuses_batch_norm(name: str) -> None:
    errors = ModuleValidator.validate(NETWORKS[name]("batch").train())
    assert errors
    assert all("BatchNorm" in str(error) for error in errors)


def test_wrapped_network_can_still_be_split() -> None:
    net = build(lambda: NETWORKS["convnet"]("instance"), 0)
    wrapped = split(GradSampleModule(net))
    images = torch.ones(2, 2, 22, 22)
    assert torch.equal(wrapped.features(images), split(net).features(images))
