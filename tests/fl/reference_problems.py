"""Small problems on which the authors' releases were run, with the numbers that the releases computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages
from fl import FedAvg, Run
from fl.averaging.addon import AddOn
from fl.batches import Batch
from fl.message import Tensors


def wave(shape: Sequence[int], phase: float) -> Tensor:
    """Return numbers that need no generator: sin(1.7 i + phase) in float64."""
    return torch.sin(1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + phase).view(*shape)


def waves(net: nn.Module) -> Tensors:
    """Return weights for a network: parameter i has phase i / 2."""
    return {n: wave(p.shape, 0.5 * i) for i, (n, p) in enumerate(net.named_parameters())}


class FixedBatches(AddOn):
    """Client data with given batches instead of shuffled ones.

    `orders` gives the orders of the epochs of a client with so many images.
    """

    def __init__(self, orders: Mapping[int, Sequence[Sequence[int]]]) -> None:
        object.__setattr__(self, "orders", orders)

    def batches(self, local: Any, data: LabeledImages, phase: Any) -> Iterator[Batch]:
        for order in self.orders[len(data)]:  # type: ignore[attr-defined]
            for index in torch.tensor(order).split(local.settings.batch):
                yield Batch(data.images[index], data.labels[index])


def assert_released(run: Run, want: Mapping[str, Sequence[float]]) -> None:
    """Check that the global model's parameters equal those of the release to 1e-10."""
    state = run.server.state[FedAvg.model]
    assert state.keys() == want.keys()
    for name, numbers in want.items():
        assert state[name].flatten().tolist() == pytest.approx(numbers, rel=0, abs=1e-10), name
