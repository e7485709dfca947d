from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit.networks import ConvNet, build


def reference(net: ConvNet, images: Tensor, padding: int, norm: str, pooling: str) -> Tensor:
    """Run DC's ConvNet in plain operations, with the parameters of `net` in order and groups=2."""
    parameters = list(net.parameters())
    maps = images
    while len(parameters) > 2:
        maps = F.conv2d(maps, parameters.pop(0), parameters.pop(0), padding=padding)
        padding = 1
        if norm != "none":
            weight, bias = parameters.pop(0)[:, None, None], parameters.pop(0)[:, None, None]
            n, c, h, w = maps.shape
            groups = {"instance": c, "layer": 1, "group": 2}.get(norm)
            if groups is None:
                mean, var = maps.mean((0, 2, 3), keepdim=True), maps.var((0, 2, 3), unbiased=False, keepdim=True)
                maps = (maps - mean) / (var + 1e-5).sqrt()
            else:
                flat = maps.reshape(n, groups, -1)
                flat = (flat - flat.mean(2, keepdim=True)) / (flat.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
                maps = flat.reshape(n, c, h, w)
            maps = maps * weight + bias
        maps = maps.clamp(min=0)
        if pooling != "none":
            n, c, h, w = maps.shape
            windows = maps[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2)
            maps = windows.mean((3, 5)) if pooling == "avg" else windows.amax((3, 5))
    return maps.flatten(1) @ parameters[0].T + parameters[1]


@pytest.mark.parametrize("norm", ["instance", "group", "layer", "batch", "none"])
@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
@pytest.mark.parametrize(("shape", "padding"), [((1, 28, 28), 3), ((5, 9, 12), 1)])
def test_network_equals_a_plain_implementation(
    norm: str, pooling: str, shape: tuple[int, int, int], padding: int
) -> None:
    net = build(lambda: ConvNet(shape, 3, width=4, depth=2, norm=norm, pooling=pooling, groups=2), 1).double()
    assert isinstance(net, ConvNet)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(std=0.1, generator=generator))
        images = torch.empty(3, *shape, dtype=torch.float64).normal_(generator=generator)
        torch.testing.assert_close(net(images), reference(net, images, padding, norm, pooling))


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "silu", "leaky_relu", "relu"])
def test_requested_activation_is_used(activation: str) -> None:
    net = build(lambda: ConvNet((1, 4, 4), 2, width=3, depth=1, norm="none", activation=activation), 0)
    assert isinstance(net, ConvNet)
    images = torch.linspace(-2, 2, 32).reshape(2, 1, 4, 4)
    conv = net.body[0]
    torch.testing.assert_close(net.features(images), F.avg_pool2d(getattr(F, activation)(conv(images)), 2).flatten(1))


@pytest.mark.parametrize("norm", ["instance", "group", "layer", "none", "batch"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 40, 24)])
def test_first_block_in_chunks_is_bitwise_equal(
    norm: str, memory_format: torch.memory_format, shape: tuple[int, int, int]
) -> None:
    net = build(lambda: ConvNet(shape, 3, width=16, norm=norm), 0)
    images = torch.empty(20, *shape).normal_(generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=memory_format)
    rows: list[int] = []
    plain = nn.Conv2d.forward

    def noting(layer: nn.Conv2d, maps: Tensor) -> Tensor:
        rows.append(len(maps))
        return plain(layer, maps)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Conv2d, "forward", noting)
        found = net.features(images)
        assert torch.equal(found, net.body(images).flatten(1))
    assert sum(rows) == 6 * 20
    assert (rows[0] == 20) == (norm == "batch")


def test_hooks_see_all_images_at_once() -> None:
    net, rows = build(lambda: ConvNet((1, 32, 32), 2, width=4), 0), list[int]()
    images = torch.zeros(20, 1, 32, 32)
    for place in (0, 3):
        with net.body[place].register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0]))), torch.no_grad():
            net.features(images)
    with net.body[1].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0]))), torch.no_grad():
        net.features(images)
    assert rows == [20, 20, 20]
