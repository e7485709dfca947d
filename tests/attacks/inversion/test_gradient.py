"""Image search by gradient: results, selection by the attack's own loss, and no side effects."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks import match, psnr
from attacks.inversion import FedAvgUpdate, Gradient, Reconstruction, invert_message
from attacks.inversion._search import signed_adam
from attacks.inversion.reconstruction import _variation
from distillkit import Normalization
from distillkit.data import load
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from tests.attacks.inversion.images import pictures
from tests.refused import refused

SHAPE = (1, 8, 8)


def network(activation: str = "tanh", norm: str = "none") -> nn.Module:
    return build(lambda: ConvNet(SHAPE, 5, width=8, depth=1, norm=norm, activation=activation), 0)


def invert_gradient(net: nn.Module, gradients: list[Tensor], *args: Any, **options: Any) -> Reconstruction:
    return invert_message(Gradient(net, gradients), *args, **options)


def sent(net: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(net(images), labels), list(net.parameters())))


def test_dlg_finds_one_image_and_its_label_in_a_normalized_space() -> None:
    net, truth, space = network(), pictures(1), Normalization((0.4,), (0.3,))
    gradients = sent(net, space.encode(truth), torch.tensor([3]))
    found = invert_gradient(net, gradients, SHAPE, method="dlg", steps=20, normalization=space)
    assert found.labels.tolist() == [3]
    assert float(psnr(found.images, truth)) > 35


def test_dlg_finds_a_batch_without_its_labels() -> None:
    net, truth, labels = network(), pictures(2), torch.tensor([4, 1])
    found = invert_gradient(net, sent(net, truth, labels), SHAPE, 2, method="dlg", steps=16)
    assert found.labels.tolist() == [1, 4]
    assert float(psnr(found.images[match(found.images, truth)], truth).min()) > 30


def test_lr_decays_as_in_the_paper_and_has_its_default() -> None:
    """A tenth as large after 3/8, 5/8 and 7/8 of the steps. The default weight of the total variation is 0.001."""
    start = torch.full((1, *SHAPE), 3.0)
    ((moved, loss),) = signed_adam([lambda x: x.square().sum()], [start], 10, 0.3, Normalization((0.5,), (0.02,)))
    way = 3 * 0.3 + 3 * 0.03 + 2 * 0.003 + 2 * 0.0003
    assert torch.allclose(moved, start - way)
    assert loss == pytest.approx(64 * (3 - way) ** 2, rel=1e-5)
    net = network("relu")
    gradients = sent(net, pictures(1), torch.tensor([2]))
    options: list[dict[str, Any]] = [{}, {"lr": 0.1, "total_variation": 0.001}, {"lr": 0.3}, {"total_variation": 0.1}]
    default, stated, *others = (invert_gradient(net, gradients, SHAPE, steps=3, **given).images for given in options)
    assert torch.equal(default, stated)
    assert not any(torch.equal(default, other) for other in others)
    row = torch.tensor([[[[0.0, 1.0, 3.0]]]])
    assert [float(_variation(one)) for one in (row, row.mT, row[..., :1])] == [1.5, 1.5, 0.0]


@pytest.mark.parametrize("method", ["geiping", "dlg"])
def test_inputs_are_not_modified(method: str) -> None:
    net = network(norm="batch").train().requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    gradients = [torch.randn(p.shape, generator=derive(1)) for p in net.parameters()]
    state = torch.get_rng_state()
    invert_gradient(net, gradients, SHAPE, 2, method=method, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert all(p.grad is None and not p.requires_grad for p in net.parameters())


NET = network()
GOOD = [torch.ones_like(p) for p in NET.parameters()]
HEADLESS = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False))
BAD: list[tuple[Any, str]] = [
    (lambda: invert_gradient(NET, GOOD[:-1], SHAPE), "gradients must be 4 tensors"),
    (lambda: invert_gradient(NET, [GOOD[0].mT[0], *GOOD[1:]], SHAPE), r"got \[1, 3, 3\], not \[8, 1, 3, 3\]"),
    (lambda: invert_gradient(NET, [GOOD[0][:3], *GOOD[1:]], SHAPE), r"got \[3, 1, 3, 3\], not \[8, 1, 3, 3\]"),
    (lambda: invert_gradient(NET, [0 * g for g in GOOD], SHAPE), "gradients must not be empty or all 0"),
    (lambda: invert_gradient(NET, [*GOOD[:3], GOOD[3] / 0], SHAPE), r"gradients\[3\] must be finite"),
    (lambda: invert_gradient(NET, GOOD, (3, 8, 8)), r"network must take images of shape \[1, 3, 8, 8\]: "),
    (
        lambda: invert_gradient(nn.Conv2d(1, 2, 1, bias=False), [torch.ones(2, 1, 1, 1)], SHAPE),
        r"network must give logits \[N, K\], got \[1, 2, 8, 8\]",
    ),
    (lambda: invert_gradient(NET, GOOD, SHAPE, lr=0.0), "lr must be greater than 0"),
    (lambda: invert_gradient(NET, GOOD, SHAPE, method="dlg", lr=0.1), r"only .*, got 0.1 for 'dlg'"),
    (lambda: invert_gradient(NET, GOOD, SHAPE, labels=torch.tensor([5])), "labels must be below num_classes=5"),
    (lambda: invert_gradient(HEADLESS, [torch.ones(2, 64)], SHAPE), "labels must be given"),
    *(
        (
            lambda c=c: invert_gradient(NET, GOOD, (c, 8, 8), normalization=Normalization([0.1] * 8, [1] * 8)),  # type: ignore[misc]
            rf"normalization must have one value per channel of \({c}, 8, 8\), got 8",
        )
        for c in (1, 3)
    ),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    refused(call, (TypeError, ValueError), said)


def tiny(seed: int = 0, norm: str = "none") -> tuple[nn.Module, Any, list[torch.Tensor]]:
    private = load("digits", size=8).train[:1]
    network = build(lambda: ConvNet((1, 8, 8), 10, width=8, depth=1, norm=norm, activation="tanh"), seed).eval()
    loss = F.cross_entropy(network(private.images), private.labels)
    return network, private, list(torch.autograd.grad(loss, list(network.parameters())))


def test_weights_modes_and_label_rows_are_named() -> None:
    network, private, sent = tiny(norm="batch")
    with pytest.raises(ValueError, match="gradients must be a gradient .*: subtract the weights"):
        invert_gradient(network, list(network.parameters()), (1, 8, 8))
    for inputs in (49, 50):  # fewer than 100 weights may point in a gradient's direction by chance
        small = nn.Linear(inputs, 2, bias=False)
        with pytest.raises(ValueError, match="in the direction of") if inputs == 50 else nullcontext():
            Gradient(small, [small.weight + 0.3 * small.weight.roll(1)])
    with pytest.raises(ValueError, match=r"labels must be class indices, int \[1\], got rows \[1, 10\]"):
        invert_gradient(network, sent, (1, 8, 8), labels=F.one_hot(private.labels, 10))
    refused(lambda: invert_gradient(network, sent, (1, 8, 8), scale=0), ValueError, "scale must not be 0")
    with torch.inference_mode():
        labels = private.labels.clone()
        refused(lambda: invert_gradient(network, sent, (1, 8, 8), steps=1), ValueError, "leave torch.no_grad")
    assert invert_gradient(network, sent, (1, 8, 8), labels=labels, steps=1).labels.equal(private.labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gradient(network.eval(), sent)
        Gradient(network, [-p for p in network.parameters()])
    with pytest.warns(UserWarning, match="training mode and has BatchNorm2d and Dropout, so"):
        Gradient(nn.Sequential(network, nn.Dropout(0.5)).train(), sent)
    part = nn.Sequential(network.eval(), nn.Dropout(0.5).train())
    for made in (Gradient, partial(FedAvgUpdate, lr=0.1)):
        part.training = False  # the mode of each layer counts
        with pytest.warns(UserWarning, match="training mode and has Dropout, so"):
            made(part, sent)  # type: ignore[operator]
