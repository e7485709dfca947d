from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks import ConvNet, KeepInit, ResNet, SimpleCNN, build, frozen_copy, initialize, split
from tests.refused import refused


class Users(nn.Module):
    """A user's network with functional calls and a classifier that is not the last child."""

    def __init__(self, channels: int = 3, num_classes: int = 2) -> None:
        super().__init__()
        self.head = nn.Linear(6, num_classes)
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def images(channels: int = 3, size: int = 8) -> Tensor:
    return torch.empty(4, channels, size, size).normal_(generator=torch.Generator().manual_seed(0))


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


class TestSplit:
    def test_users_network(self) -> None:
        model = build(lambda: Users(5, 2), 0)
        network = split(model)
        x = images(5)
        embedding = network.features(x)
        assert torch.equal(embedding, torch.relu(model.conv(x)).mean((2, 3)))
        assert torch.equal(network.classifier(embedding), model(x))
        assert torch.equal(network(x), model(x))
        assert hooks(model) == 0

    def test_shares_parameters_and_gradients_flow(self) -> None:
        model = build(Users, 0)
        network = split(model)
        assert isinstance(network, nn.Module)
        assert [key for key, _ in network.named_parameters()] == [f"model.{key}" for key, _ in model.named_parameters()]
        x = images().requires_grad_()
        network.features(x).square().sum().backward()
        assert model.conv.weight.grad is not None
        assert x.grad is not None
        assert x.grad.abs().sum() > 0

    def test_split_of_a_split_is_itself(self) -> None:
        network = split(build(Users, 0))
        assert split(network) is network
        named = split(network, classifier="model.conv")
        assert torch.equal(named.classifier(images()), network.model.conv(images()))

    def test_features_are_flattened_for_a_named_classifier(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5), nn.ReLU(), nn.Linear(5, 2))
        assert split(model).features(images()).shape == (4, 5)
        earlier = split(model, classifier="1")
        assert torch.equal(earlier.features(images()), model[0](images()).flatten(1))

    def test_no_hook_is_left_after_an_exception(self) -> None:
        model = build(Users, 0)
        with pytest.raises(RuntimeError):
            split(model).features(images(channels=4))
        assert hooks(model) == 0

    def test_deep_copies_and_dtypes_follow_the_model(self) -> None:
        network = split(build(Users, 0))
        twin = copy.deepcopy(network).double()
        torch.testing.assert_close(twin.features(images().double()), network.features(images()).double())


class Half(nn.Module):
    """`reset_parameters` resets only one of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.one)


class TestInitialize:
    def test_equals_pytorchs_default_for_every_kind_of_layer(self) -> None:
        def layers() -> nn.Module:
            return nn.ModuleList(
                [
                    *(nn.Conv1d(2, 3, 3), nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.Conv3d(2, 3, 2)),
                    *(nn.ConvTranspose1d(2, 3, 3), nn.ConvTranspose2d(2, 4, 3), nn.ConvTranspose3d(2, 4, 3)),
                    *(
                        nn.Linear(7, 5),
                        nn.Embedding(3, 4, padding_idx=0),
                        nn.Embedding(3, 4, padding_idx=1),
                        nn.PReLU(3),
                        nn.GroupNorm(1, 3),
                    ),
                    *(nn.LayerNorm(3), nn.RMSNorm(3), nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True)),
                    *(nn.Identity(), nn.Dropout(), nn.GroupNorm(1, 3, affine=False), nn.Linear(3, 3)),
                ]
            )

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            expected = layers()
        model = layers()
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(3)
        assert initialize(model, torch.Generator().manual_seed(11)) is model
        for (key, a), b in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b), key

    def test_attention(self) -> None:
        model = initialize(nn.MultiheadAttention(8, 2, add_bias_kv=True), 0)
        bound = math.sqrt(6 / (8 + 24))
        largest = model.in_proj_weight.abs().max()
        assert 0.9 * bound < largest <= bound
        assert (model.in_proj_bias == 0).all()
        assert (torch.cat([model.bias_k, model.bias_v]) != 0).all()

    def test_depends_only_on_the_seed(self, global_rng_untouched: None) -> None:
        a, b, c = (build(lambda: ConvNet((1, 8, 8), 2, width=4), seed) for seed in (1, 1, 2))
        states = [network.state_dict() for network in (a, b, c)]
        for (key, x), y, z in zip(states[0].items(), states[1].values(), states[2].values(), strict=True):
            assert torch.equal(x, y), key
            if x.std() > 0:
                assert not torch.equal(x, z), key

    def test_frozen_double_and_channels_last_networks(self) -> None:
        plain = initialize(ConvNet((2, 8, 8), 2, width=4), 4)
        other = ConvNet((2, 8, 8), 2, width=4).double().to(memory_format=torch.channels_last).requires_grad_(False)
        initialize(other, 4)
        for x, y in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.equal(x.double(), y)
            assert not y.requires_grad

    def test_default_device_has_no_effect(self) -> None:
        model = initialize(nn.Sequential(nn.Linear(3, 3), nn.Embedding(2, 3)), 4)
        expected = [parameter.clone() for parameter in model.parameters()]
        with torch.device("meta"):
            initialize(model, 4)
        assert all(torch.equal(x, y) for x, y in zip(expected, model.parameters(), strict=True))

    def test_own_method_is_called(self) -> None:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.zeros(3))

            def initialize(self, generator: torch.Generator) -> None:
                self.scale.copy_(torch.empty(3).normal_(generator=generator))

        model = nn.Sequential(Scale(), nn.Linear(3, 3))
        once = initialize(model, 0).state_dict()["0.scale"].clone()
        assert (once != 0).all()
        assert torch.equal(initialize(model, 0).state_dict()["0.scale"], once)

    def test_parameters_missed_by_reset_parameters_are_kept(self, global_rng_untouched: None) -> None:
        one, two, other = (build(lambda: nn.Sequential(nn.LSTM(2, 2), nn.LSTM(2, 2)), seed) for seed in (0, 0, 1))
        for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)
            assert a.abs().max() <= 2**-0.5
        assert not torch.equal(one[0].weight_ih_l0, one[1].weight_ih_l0)
        half = Half()
        refused(lambda: initialize(half, 0), TypeError, r"redraw=lambda network, generator")
        refused(lambda: initialize(nn.Sequential(half), 0), TypeError, r"cannot redraw 0 \(Half\)")
        assert half.one.tolist() == half.two.tolist() == [0.0] * 3

    def test_redraw_may_use_the_global_generator(self, global_rng_untouched: None) -> None:
        def redraw(network: nn.Module, generator: torch.Generator) -> None:
            nn.init.normal_(network.one)
            network.two.copy_(torch.randn(3, generator=generator))

        for make in (lambda seed: initialize(Half(), seed, redraw), lambda seed: build(Half, seed, redraw)):
            a, b, c = (make(seed) for seed in (0, 0, 1))
            for name in ("one", "two"):
                assert torch.equal(getattr(a, name), getattr(b, name))
                assert not torch.equal(getattr(a, name), getattr(c, name))

    def test_refuses_parametrized_weights(self) -> None:
        parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        refused(lambda: initialize(parametrized, 0), TypeError, r"cannot redraw parametrizations.weight \(Param")
        from torch.nn.utils import prune

        with pytest.raises(TypeError, match=r"cannot redraw the network \(Linear\)"):
            initialize(prune.identity(nn.Linear(3, 3), "weight"), 0)


class TestBuild:
    def test_threads_build_equal_networks(self, global_rng_untouched: None) -> None:
        def make(seed: int) -> nn.Module:
            return build(lambda: SimpleCNN((1, 16, 16), 2), seed)

        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(make, range(12)))
        for seed, model in enumerate(together):
            for x, y in zip(model.parameters(), make(seed).parameters(), strict=True):
                assert torch.equal(x, y)

    def test_kept_networks_advance_a_generator_too(self, global_rng_untouched: None) -> None:
        generator = torch.Generator().manual_seed(3)
        seed = torch.Generator().manual_seed(3)
        one, two, again = (build(KeepInit(lambda: nn.Linear(2, 2)), g) for g in (generator, generator, seed))
        assert torch.equal(one.weight, again.weight)
        assert not torch.equal(one.weight, two.weight)
        generator, seed = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        one, two, again = (build(lambda: KeepInit(nn.Linear)(2, 4), g) for g in (generator, generator, seed))
        assert one.weight.shape == (4, 2)
        assert torch.equal(one.weight, again.weight)
        assert not torch.equal(one.weight, two.weight)

    def test_factory_may_call_build(self) -> None:
        done = threading.Event()

        def inner() -> None:
            build(lambda: nn.Sequential(build(lambda: nn.Linear(2, 2), 1)), 0)
            done.set()

        thread = threading.Thread(target=inner, daemon=True)
        thread.start()
        assert done.wait(10)

    def test_failing_factory_restores_the_global_random_state(self, global_rng_untouched: None) -> None:
        def factory() -> nn.Module:
            torch.rand(3)
            raise OSError("no such network")

        refused(lambda: build(factory, 0), OSError, "no such network")


def test_frozen_is_a_deep_copy_without_gradients() -> None:
    model = build(lambda: ResNet((3, 8, 8), 2, depth=10, width=2), 0).eval()
    twin = frozen_copy(model)
    assert not twin.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert torch.equal(twin(images()), model(images()))
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(twin(images()), model(images()))


def _vgg() -> nn.Module:
    """torchvision's VGG-11 with narrower hidden layers, which would hold a hundred million parameters."""
    from torchvision.models import vgg11

    with torch.device("meta"):
        model = vgg11(num_classes=3)
        model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 8), nn.Linear(8, 8)
        model.classifier[6] = nn.Linear(8, 3)
    return model.to_empty(device="cpu")


def _resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=3)


TORCHVISION = {"resnet18": _resnet, "vgg11": _vgg}


@pytest.mark.parametrize(("name", "embedding_dim"), [("resnet18", 512), ("vgg11", 8)])
def test_torchvision_networks_are_supported(name: str, embedding_dim: int, global_rng_untouched: None) -> None:
    model = build(TORCHVISION[name], 0).eval()
    network = split(model)
    x = images(size=64)
    embedding = network.features(x)
    assert embedding.shape == (4, embedding_dim)
    assert torch.isfinite(embedding).all()
    assert torch.equal(network.classifier(embedding), model(x))
    assert network(x).shape == (4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    initialize(model, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
