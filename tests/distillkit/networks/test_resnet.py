from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit.networks import CifarResNet, ResNet, WideResNet, build


@pytest.mark.parametrize(("depth", "layers"), [(10, [1, 1, 1, 1]), (50, [3, 4, 6, 3])])
def test_resnet_is_torchvisions_with_a_small_stem(depth: int, layers: list[int]) -> None:
    from torchvision.models.resnet import BasicBlock, Bottleneck
    from torchvision.models.resnet import ResNet as Theirs

    with torch.device("meta"):
        theirs = Theirs(BasicBlock if depth == 10 else Bottleneck, layers, num_classes=3)
        theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    ours = build(lambda: ResNet((3, 16, 16), 3, depth=depth), 0)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)), assign=True)
    images = torch.empty(2, 3, 9, 8).normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.train()(images), theirs.train()(images))


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def test_initial_convolutions_equal_the_single_images_release() -> None:
    """sunnysoni97/single_image_fl at d211367: `kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')` in
    models/cifar_resnet.py, `init.kaiming_uniform_(module.weight)` in models/cifar_wrn.py; biases 0."""
    for convolution in convolutions(build(lambda: CifarResNet((3, 8, 8), 10, depth=20, width=32), 3)):
        weight = convolution.weight.detach()
        fan_out = weight.shape[0] * weight[0, 0].numel()
        assert float(weight.square().mean() * fan_out / 2) == pytest.approx(1, abs=6 * (2 / weight.numel()) ** 0.5)
        assert float((weight.abs() > 1.5 * (2 / fan_out) ** 0.5).float().mean()) > 0.1, "normal, not uniform"
    for convolution in convolutions(build(lambda: WideResNet((3, 8, 8), 10, width=2, norm="none"), 3)):
        weight = convolution.weight.detach()
        bound = (6 / weight[0].numel()) ** 0.5
        assert 0.98 * bound < float(weight.abs().max()) <= bound
        assert float(weight.square().mean() / bound**2) == pytest.approx(1 / 3, abs=6 * weight.numel() ** -0.5)
        assert convolution.bias is not None
        assert not convolution.bias.any()


@pytest.mark.parametrize("make", [ResNet, CifarResNet, WideResNet])
@pytest.mark.parametrize("init", ["kaiming", "default"])
def test_built_network_equals_its_constructors(make: type[CifarResNet], init: str) -> None:
    """After `torch.manual_seed`; with "default" the convolutions are PyTorch's, uniform within 1 / sqrt(fan_in)."""
    depth = {ResNet: 10, CifarResNet: 8, WideResNet: 10}[make]  # type: ignore[index]
    options = {} if make is ResNet else {"init": init}
    factory = lambda: make((3, 8, 8), 3, depth=depth, width=2, norm="none", **options)  # type: ignore[arg-type]  # noqa: E731
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        wanted = factory().state_dict()
    built = build(factory, torch.Generator().manual_seed(5))
    assert all(torch.equal(wanted[n], t) for n, t in built.state_dict().items())
    if make is ResNet or init == "default":
        for convolution in convolutions(built):
            assert float(convolution.weight.detach().abs().max()) <= convolution.weight[0].numel() ** -0.5


def wide_reference(parameters: list[Tensor], images: Tensor, blocks: int) -> Tensor:
    """Run Zagoruyko and Komodakis' network in plain operations with batch statistics."""

    def activated(maps: Tensor) -> Tensor:
        return F.relu(F.batch_norm(maps, None, None, parameters.pop(0), parameters.pop(0), training=True))

    maps = F.conv2d(images, parameters.pop(0), padding=1)
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            first = activated(maps)
            branch = F.conv2d(first, parameters.pop(0), stride=stride, padding=1)
            branch = F.conv2d(activated(branch), parameters.pop(0), padding=1)
            maps = branch + (maps if block else F.conv2d(first, parameters.pop(0), stride=stride))
    return F.linear(activated(maps).mean((2, 3)), parameters.pop(0), parameters.pop(0))


def test_wide_resnet_equals_the_network_written_out() -> None:
    net = build(lambda: WideResNet((2, 8, 8), 3, depth=16, width=2), 0).double()
    images = torch.empty(3, 2, 8, 8, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net.train()(images), wide_reference(list(net.parameters()), images, 2))


def basic_reference(parameters: list[Tensor], images: Tensor, blocks: int) -> Tensor:
    """Run the single-image paper's ResNet in plain operations with batch statistics."""

    def normed(maps: Tensor) -> Tensor:
        return F.batch_norm(maps, None, None, parameters.pop(0), parameters.pop(0), training=True)

    maps = F.relu(normed(F.conv2d(images, parameters.pop(0), padding=1)))
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            branch = F.relu(normed(F.conv2d(maps, parameters.pop(0), stride=stride, padding=1)))
            branch = normed(F.conv2d(branch, parameters.pop(0), padding=1))
            maps = F.relu(branch + (maps if stride == 1 else normed(F.conv2d(maps, parameters.pop(0), stride=2))))
    return F.linear(maps.mean((2, 3)), parameters.pop(0), parameters.pop(0))


def test_cifar_resnet_equals_the_network_written_out() -> None:
    net = build(lambda: CifarResNet((3, 9, 9), 3, depth=14, width=4), 0).double()
    images = torch.empty(3, 3, 9, 9, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net.train()(images), basic_reference(list(net.parameters()), images, 2))


@pytest.mark.parametrize("make", [ResNet, CifarResNet, WideResNet])
def test_images_of_any_size_but_not_other_channels_are_accepted(make: type[ResNet]) -> None:
    net = make((3, 32, 32), 2, width=4, norm="group")
    for size in ((28, 28), (33, 17), (5, 5)):
        assert net.features(torch.zeros(2, 3, *size)).shape == (2, net.embedding_dim)
    for shape in ((2, 1, 32, 32), (3, 32, 32), (2, 3, 3, 32, 32)):
        with pytest.raises(ValueError, match=r"images must have shape \[N, 3, H, W\] for this network"):
            net(torch.zeros(shape))


def test_smallest_images_for_instance_norm_are_distinguished() -> None:
    for make, size in ((ResNet, 9), (CifarResNet, 5), (WideResNet, 5)):
        net = build(lambda make=make, size=size: make((1, size, size), 2, width=2, norm="instance"), 0)
        images = torch.empty(2, 1, size, size).normal_(generator=torch.Generator().manual_seed(0))
        embedding = net.features(images)
        assert (embedding[0] - embedding[1]).norm() > 1e-3 * embedding.norm()
