from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit.networks import FedCOGCNN, ImageNetwork, LeNet, SimpleCNN, build


@pytest.mark.parametrize(
    ("make", "shape", "num_classes", "embedding_dim", "parameters"),
    [
        (SimpleCNN, (3, 32, 32), 10, 84, 62_006),
        (SimpleCNN, (1, 28, 28), 10, 84, 44_426),
        (FedCOGCNN, (3, 32, 32), 100, 128, 69_380),
        (LeNet, (1, 28, 28), 10, 84, 61_706),
        (LeNet, (1, 32, 32), 10, 84, 61_706),
        (LeNet, (3, 32, 32), 10, 84, 62_006),
    ],
)
def test_parameter_counts_are_as_documented(
    make: type[SimpleCNN], shape: tuple[int, int, int], num_classes: int, embedding_dim: int, parameters: int
) -> None:
    net = make(shape, num_classes)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net.features(torch.zeros(2, *shape)).shape == (2, embedding_dim)
    assert net.embedding_dim == embedding_dim


def pooled(maps: Tensor, average: bool) -> Tensor:
    return F.avg_pool2d(maps, 2) if average else F.max_pool2d(maps, 2)


@pytest.mark.parametrize(
    ("net", "convolutions", "padding", "activation"),
    [
        (lambda: SimpleCNN((2, 20, 17), 3), 2, 0, F.relu),
        (lambda: FedCOGCNN((2, 23, 30), 3), 3, 0, F.relu),
        (lambda: LeNet((2, 28, 28), 3), 2, 2, torch.tanh),
        (lambda: LeNet((2, 16, 19), 3, activation="sigmoid", pooling="max"), 2, 0, torch.sigmoid),
    ],
)
def test_network_equals_a_plain_implementation(net: type, convolutions: int, padding: int, activation: type) -> None:
    model = build(net, 0).double()
    assert isinstance(model, ImageNetwork)
    images = torch.empty(4, *model.shape, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    values = images
    for i in range(convolutions):
        weight, bias = parameters[2 * i : 2 * i + 2]
        values = F.conv2d(values, weight, bias, padding=0 if i else padding)
        values = pooled(activation(values), average=isinstance(model.body[3], nn.AvgPool2d))
    values = values.flatten(1)
    for i in range(convolutions, len(parameters) // 2 - 1):
        values = activation(F.linear(values, *parameters[2 * i : 2 * i + 2]))
    torch.testing.assert_close(model.features(images), values)
    torch.testing.assert_close(model(images), F.linear(values, *parameters[-2:]))


def test_lenet_uses_average_pooling_and_the_others_max_pooling() -> None:
    kinds = [nn.AvgPool2d, nn.MaxPool2d, nn.MaxPool2d]
    for make, kind in zip((LeNet, SimpleCNN, FedCOGCNN), kinds, strict=True):
        assert isinstance(make((1, 28, 28), 2).body[3], kind)


@pytest.mark.parametrize(("make", "least"), [(SimpleCNN, 16), (LeNet, 16), (FedCOGCNN, 22)])
def test_smallest_size_is_accepted(make: type[SimpleCNN], least: int) -> None:
    assert make((1, least, least), 2)(torch.zeros(1, 1, least, least)).shape == (1, 2)
    for shape in ((1, least - 1, least), (1, least, least - 1)):
        with pytest.raises(ValueError, match=f"at least {least} pixels high and wide"):
            make(shape, 2)


def test_groups_and_pooling_are_those_of_the_network() -> None:
    with pytest.raises(ValueError, match="groups must divide the 6 channels"):
        LeNet((1, 28, 28), 10, norm="group", groups=4)
    with pytest.raises(ValueError, match="pooling must be one of 'avg', 'max'"):
        LeNet((1, 28, 28), 10, pooling="none")
