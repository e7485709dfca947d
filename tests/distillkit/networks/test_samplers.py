from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distillkit._utils.batches import uses_batch_statistics
from distillkit.networks import ConvNet, FixedNetwork, KeepInit, NetworkBall, RandomNetworks, build
from distillkit.rng import derive

SHAPE = (2, 8, 8)


def convnet(norm: str = "instance") -> nn.Module:
    return build(lambda: ConvNet(SHAPE, 3, width=4, depth=2, norm=norm), 0)


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@given(radius=st.floats(1e-3, 50), seed=st.integers(0, 99), double=st.booleans())
def test_ball_draws_are_on_the_sphere(radius: float, seed: int, double: bool) -> None:
    model = convnet().double() if double else convnet()
    drawn = NetworkBall(model, radius).draw(derive(seed))
    distance = float((flat(drawn).double() - flat(model).double()).norm())
    assert distance == pytest.approx(radius, rel=1e-9 if double else 1e-3)


def test_ball_moves_all_parameters_equally_in_all_directions() -> None:
    model = convnet()
    ball, center = NetworkBall(model, 2.0), flat(model)
    moves = torch.stack([flat(ball.draw(derive(0, i))) - center for i in range(300)])
    count = moves.shape[1]
    assert moves.square().mean().sqrt() == pytest.approx(2 / count**0.5, rel=1e-4)
    assert moves.mean(0).norm() < 1.5 * 2 / 300**0.5
    first_layer = slice(0, 72)
    assert moves[:, first_layer].square().mean().sqrt() == pytest.approx(2 / count**0.5, rel=0.05)


def test_ball_leaves_the_model_and_its_buffers_unchanged() -> None:
    model = convnet("batch").train()
    model.body[1].running_mean.fill_(0.3)
    before = copy.deepcopy(model.state_dict())
    drawn = NetworkBall(model, 5.0).draw(derive(1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for name, value in drawn.named_buffers():
        assert torch.equal(value, before[name])
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not drawn.training
    assert not any(p.requires_grad for p in drawn.parameters())


SAMPLERS = {
    "RandomNetworks(ConvNet)": lambda: RandomNetworks(convnet),
    "RandomNetworks(KeepInit(ConvNet))": lambda: RandomNetworks(KeepInit(lambda: ConvNet(SHAPE, 3, width=4))),
    "NetworkBall(ConvNet, radius=1)": lambda: NetworkBall(convnet(), 1.0),
    "FixedNetwork(ConvNet)": lambda: FixedNetwork(convnet()),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.usefixtures("global_rng_untouched")
def test_draw_depends_only_on_the_generator(name: str) -> None:
    one, two = SAMPLERS[name](), SAMPLERS[name]()
    first = flat(one.draw(derive(0, 1))).clone()
    other = flat(one.draw(2)).clone()
    assert torch.equal(flat(two.draw(2)), other)
    assert torch.equal(flat(one.draw(derive(0, 1))), first)
    assert torch.equal(first, other) == one.fixed
    assert repr(one) == name


def test_random_networks_are_one_resident_frozen_untrained_network() -> None:
    networks = RandomNetworks(convnet)
    assert networks.draw(derive(0)) is networks.draw(derive(1))
    drawn = networks.draw(derive(2))
    assert not any(p.requires_grad for p in drawn.parameters())
    weight = drawn.classifier.weight
    assert weight.abs().max() <= weight.shape[1] ** -0.5
    assert weight.std() == pytest.approx((3 * weight.shape[1]) ** -0.5, rel=0.2)


def test_random_networks_use_batch_statistics_but_no_dropout() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))

    networks = RandomNetworks(factory)
    drawn = networks.draw(derive(0))
    modes = {type(m).__name__: m.training for m in networks._current}
    assert modes == {"Conv2d": False, "BatchNorm2d": True, "Dropout": False, "Flatten": False, "Linear": False}
    assert uses_batch_statistics(drawn)
    images = torch.randn(6, *SHAPE, generator=derive(3)) * 7
    assert torch.equal(drawn.features(images), drawn.features(images))
    assert drawn.model[1](drawn.model[0](images)).mean((0, 2, 3)).abs().max() < 1e-5


def test_fixed_network_is_a_copy_in_eval_mode() -> None:
    model = convnet("batch").train()
    kept = flat(model).clone()
    fixed = FixedNetwork(model)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    drawn = fixed.draw(derive(0))
    assert torch.equal(flat(drawn), kept)
    assert not uses_batch_statistics(drawn)
    assert model.training


def test_samplers_are_recreated_from_their_arguments() -> None:
    model = convnet()
    ball = NetworkBall(model, 2.0)
    ball.draw(derive(0))  # overwrites the sampler's network
    center, radius = ball.init_arguments()[0]
    assert torch.equal(flat(center), flat(model))
    assert radius == 2.0
    for cache in (True, False):
        arguments, options = FixedNetwork(model, cache=cache).init_arguments()
        assert FixedNetwork(*arguments, **options).cache == cache
