from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distillkit.networks import FedCOGCNN, ImageNetwork, LeNet, SimpleCNN, build
from tests.refused import refused


@pytest.mark.parametrize(
    ("net", "convolutions", "padding", "activation", "pool"),
    [
        (lambda: SimpleCNN((2, 20, 17), 3), 2, 0, F.relu, F.max_pool2d),
        (lambda: FedCOGCNN((2, 23, 30), 3), 3, 0, F.relu, F.max_pool2d),
        (lambda: LeNet((2, 28, 28), 3), 2, 2, torch.tanh, F.avg_pool2d),
        (lambda: LeNet((2, 16, 19), 3, activation="sigmoid", pooling="max"), 2, 0, torch.sigmoid, F.max_pool2d),
    ],
)
def test_network_equals_a_plain_implementation(
    net: Any, convolutions: int, padding: int, activation: Any, pool: Any
) -> None:
    model = build(net, 0).double()
    assert isinstance(model, ImageNetwork)
    images = torch.empty(4, *model.shape, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    values = images
    for i in range(convolutions):
        weight, bias = parameters[2 * i : 2 * i + 2]
        values = F.conv2d(values, weight, bias, padding=0 if i else padding)
        values = pool(activation(values), 2)
    values = values.flatten(1)
    for i in range(convolutions, len(parameters) // 2 - 1):
        values = activation(F.linear(values, *parameters[2 * i : 2 * i + 2]))
    torch.testing.assert_close(model.features(images), values)
    torch.testing.assert_close(model(images), F.linear(values, *parameters[-2:]))


@pytest.mark.parametrize(("make", "least"), [(SimpleCNN, 16), (LeNet, 16), (FedCOGCNN, 22)])
def test_smallest_size_is_accepted(make: type[SimpleCNN], least: int) -> None:
    assert make((1, least, least), 2)(torch.zeros(1, 1, least, least)).shape == (1, 2)
    for shape in ((1, least - 1, least), (1, least, least - 1)):
        refused(partial(make, shape, 2), ValueError, f"at least {least} pixels high and wide")
