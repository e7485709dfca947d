"""Fingerprints of sets and networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distillkit import LabeledImages
from distillkit.fingerprint import network_fingerprint, set_fingerprint, tensor_fingerprint
from distillkit.networks import ConvNet, build
from distillkit.normalization import Normalization
from distillkit.rng import derive
from tests.refused import refused

IMAGES = torch.rand(6, 1, 8, 8, generator=derive(0))
LABELS = torch.arange(6) % 3


def one(**changes: Any) -> LabeledImages:
    facts = {"images": IMAGES, "labels": LABELS, "num_classes": 3, "normalization": Normalization([0.5], [0.5])}
    facts |= {"columns": {"weight": torch.ones(6), "age": torch.arange(6)}, **changes}
    images, labels = facts.pop("images"), facts.pop("labels")
    return LabeledImages(images, labels, **facts)


def test_equal_sets_have_equal_fingerprints_for_any_memory_layout() -> None:
    first = set_fingerprint(one())
    assert len(first) == 32
    columns = {"age": torch.arange(6), "weight": torch.ones(6)}
    strided = IMAGES.transpose(2, 3).contiguous().transpose(2, 3)
    assert first == set_fingerprint(one(images=IMAGES.clone(), columns=columns)) == set_fingerprint(one(images=strided))


@pytest.mark.parametrize(
    "changes",
    [
        {"images": IMAGES.flip(0)},  # the same sum of the same pixels
        {"images": IMAGES.flip(3)},
        {"images": IMAGES.double()},
        {"labels": LABELS.flip(0)},
        {"num_classes": 4},
        {"normalization": Normalization([0.5], [0.25])},
        {"normalization": Normalization([0.5], [0.5 + 1e-9])},
        {"columns": {"weight": torch.ones(6), "old": torch.arange(6)}},
        {"columns": {"weight": torch.ones(6)}},
        {"images": IMAGES.view(6, 1, 4, 16)},
    ],
)
def test_different_sets_have_different_fingerprints(changes: dict[str, Any]) -> None:
    assert set_fingerprint(one(**changes)) != set_fingerprint(one())


@given(st.integers(0, 6 * 64 - 1), st.integers(0, 31))
def test_one_changed_bit_changes_the_fingerprint(place: int, bit: int) -> None:
    pixels = IMAGES.flatten().view(torch.int32).clone()
    pixels[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert tensor_fingerprint([pixels.view(torch.float32)]) != tensor_fingerprint([IMAGES.flatten()])


def test_keyed_fingerprint_cannot_be_computed_without_the_key() -> None:
    assert len({set_fingerprint(one(), key=key) for key in (b"", b"a" * 32, b"b" * 32)}) == 3
    assert set_fingerprint(one(), key=b"a") == set_fingerprint(one(), key=b"a")
    assert len({set_fingerprint(one(), key=key) for key in (b"", b"a" * 64, b"a" * 63 + b"b")}) == 3
    refused(lambda: set_fingerprint(one(), key=b"a" * 65), ValueError, "^key must be at most 64 bytes, got 65 bytes$")
    refused(lambda: tensor_fingerprint(LABELS), TypeError, r"^tensors must be .* got a Tensor; pass \[tensor\]$")


def test_parts_are_delimited() -> None:
    a, b = torch.tensor([1, 2]), torch.tensor([3])
    parts: list[list[Any]] = [[a, b], [torch.tensor([1, 2, 3])], [torch.tensor([1]), torch.tensor([2, 3])], ["ab"]]
    parts += [["a", "b"], ["a", "b", ""], ["astr b"], ["astr 1 b"], []]
    parts += [[torch.empty(0)], [torch.empty(0, 1)], [torch.empty(0, dtype=torch.int64)]]
    assert len({tensor_fingerprint(part) for part in parts}) == len(parts)


def net(width: int = 4, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Module:
    return build(
        lambda: nn.Sequential(nn.Conv2d(1, width, 3), activation(), nn.Flatten(), nn.Linear(36 * width, 3)), seed
    )


class Buffered(nn.ReLU):
    """A ReLU with a buffer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.zeros(2))


def test_network_identity_covers_class_shapes_and_function(global_rng_untouched: None) -> None:
    first, scaled = network_fingerprint(net(), IMAGES), net()
    assert first == network_fingerprint(net(), IMAGES[:1].double())
    with torch.no_grad():  # other embeddings, equal outputs
        for parameter, factor in zip(scaled.parameters(), (2, 2, 0.5, 1), strict=True):
            parameter *= factor
    assert (first["class"], first["parameters"]) == ("Sequential", 40 + 144 * 3 + 3)
    for other, keys in (
        (net(width=5), {"parameters", "shapes", "outputs"}),
        (net(activation=nn.LeakyReLU), {"outputs"}),
        (net(activation=Buffered), {"shapes"}),
        (net(seed=1), {"outputs"}),
        (nn.Sequential(OrderedDict((f"layer{k}", part) for k, part in enumerate(net()))), {"shapes"}),
        (scaled, {"outputs"}),
        (net(activation=lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4))), {"parameters", "shapes", "outputs"}),
    ):
        found = network_fingerprint(other, IMAGES)
        assert {k for k in first if first[k] != found[k]} == keys


def test_identity_is_independent_of_mode_precision_and_threads() -> None:
    random = net(activation=lambda: nn.Sequential(nn.FractionalMaxPool2d(2, output_size=4), nn.Upsample(6)))
    first = network_fingerprint(random, IMAGES)
    torch.rand(1)  # it draws in eval mode, too
    assert network_fingerprint(random, IMAGES) == first
    model = build(lambda: ConvNet((1, 8, 8), 3, width=8, depth=1), 0)
    first = network_fingerprint(model, IMAGES)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert network_fingerprint(model.train(), IMAGES) == first
    assert model.training
    assert all(torch.equal(t, before[n]) and t.dtype == torch.float32 for n, t in model.state_dict().items())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert network_fingerprint(model, IMAGES) == first
    finally:
        torch.set_num_threads(threads)


class Blind(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise LookupError("never works")


def test_networks_that_cannot_run_are_identified_by_their_state() -> None:
    assert network_fingerprint(Blind(), IMAGES)["outputs"] is None
    assert network_fingerprint(object(), IMAGES) == {"class": "object"}
    no_linear = nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten())
    assert network_fingerprint(no_linear, IMAGES)["outputs"] is not None
