"""Convolutions for gradient matching: second derivatives equal those of PyTorch with less work."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distillkit.condense._double_backward import convolve
from distillkit.condense._parameter_gradient import distance_to_target
from distillkit.losses.matching import gradient_distance
from distillkit.networks import ConvNet, build
from distillkit.rng import derive


class Several(nn.Module):
    """Two arbitrary convolutions, a third one whose weight depends on the images, and one that is not trained."""

    def __init__(
        self, channels: int, bias: bool, kernel: int, stride: int, padding: int, dilation: int, groups: int,
        depthwise: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        setting: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "bias": bias}
        self.first = nn.Conv2d(channels, 6, kernel, groups=math.gcd(channels, 6) if depthwise else 1, **setting)
        self.second = nn.Conv2d(6, 4, 3, stride=(2, 1), padding=(1, 2), groups=groups, bias=bias)
        self.frozen = nn.Conv2d(4, 5, (1, 3), padding="same").requires_grad_(False)
        self.last = nn.Linear(5, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.second(torch.tanh(self.first(images)))
        maps = F.conv2d(torch.tanh(maps), self.second.weight[:, :1] * images.mean(), padding=1, groups=4)
        maps = self.frozen(F.conv2d(torch.tanh(maps), self.last.weight.new_ones(4, 4, 1, 1), maps.mean((0, 2, 3))))
        return self.last(torch.tanh(maps).mean((2, 3)))


@given(
    st.integers(1, 6), st.booleans(), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
    st.sampled_from([1, 2]), st.booleans(), st.booleans(),
)  # fmt: skip
@example(channels=2, bias=False, kernel=3, stride=1, padding=1, dilation=1, groups=1, depthwise=True, last_only=False)
def test_second_derivative_equals_pytorchs(
    channels: int, bias: bool, kernel: int, stride: int, padding: int, dilation: int, groups: int, depthwise: bool,
    last_only: bool,
) -> None:  # fmt: skip
    net = build(lambda: Several(channels, bias, kernel, stride, padding, dilation, groups, depthwise), 0).double()
    parameters = [p for p in net.parameters() if p.requires_grad][-2 if last_only else 0 :]
    images = torch.randn(3, channels, 7, 6, generator=derive(1), dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    target = [torch.randn(p.shape, generator=derive(2), dtype=torch.float64) for p in parameters]
    leaf = images.clone().requires_grad_()
    found = torch.autograd.grad(F.cross_entropy(net(leaf), labels), parameters, create_graph=True)
    distance = gradient_distance(found, target)
    wanted = torch.autograd.grad(distance, leaf)[0]
    value, gradient = distance_to_target(net, parameters, images, labels, target)
    torch.testing.assert_close((value, gradient), (distance.detach(), wanted), rtol=1e-9, atol=1e-12)


class Convolutions(TorchDispatchMode):
    """Records the kernels of all convolutions and the gradients requested of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[int, ...]] = []
        self.wanted: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.kernels.append(tuple(args[1].shape[2:]))
        if func is torch.ops.aten.convolution_backward.default:
            self.wanted.append(tuple(args[-1][:2]))
        return func(*args, **(kwargs or {}))


def test_no_unneeded_gradients_are_computed() -> None:
    """Two blocks: no convolution with kernels as large as the maps, no gradient of the images in the first pass."""
    net = build(lambda: ConvNet((3, 8, 8), 2, width=8, depth=2), 0)
    parameters = list(net.parameters())
    images, labels = torch.randn(2, 3, 8, 8, generator=derive(0)), torch.tensor([0, 1])
    with Convolutions() as noted:
        distance_to_target(net, parameters, images, labels, [torch.ones_like(p) for p in parameters])
    assert noted.kernels == [(3, 3)] * 5  # two forward; by the weights' direction, twice; by the weights, once
    assert noted.wanted == [(True, True), (False, True), (True, False), (True, False)]


def test_without_double_backward_it_equals_pytorch() -> None:
    images, weight = torch.randn(2, 3, 5, 5, generator=derive(0)), torch.randn(4, 3, 3, 3, generator=derive(1))
    dilated = convolve(images, images, weight, padding="same", dilation=2)
    assert torch.equal(dilated, F.conv2d(images, weight, padding=2, dilation=2))
    assert not convolve(images, images, weight).requires_grad
    leaf, slopes = images.clone().requires_grad_(), []
    for call in (lambda: convolve(leaf, leaf, weight), lambda: F.conv2d(leaf, weight)):
        with torch.autocast("cpu", torch.bfloat16):
            slopes.append(torch.autograd.grad(call().sum(), leaf)[0])
    assert torch.equal(*slopes)
    single = images[0].clone().requires_grad_()
    assert torch.autograd.grad(convolve(single, single, weight).sum(), single)[0].shape == single.shape
