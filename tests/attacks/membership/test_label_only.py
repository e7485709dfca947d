"""`label_only`: against a plain loop over copies, on networks that memorize and that never saw the records."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attacks.membership import label_only, model_scorer
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from tests.refused import refused

SHAPE = (2, 8, 6)
CONTRASTS = torch.linspace(0.2, 4, 120)[:, None, None, None]


def records(seed: int, n: int = 120) -> tuple[Tensor, Tensor]:
    """Images of noise with random labels, which can only be memorized."""
    return torch.randn(n, *SHAPE, generator=derive(seed)), torch.randint(3, (n,), generator=derive(seed, 1))


def network(seed: int, norm: str = "instance") -> nn.Module:
    return build(partial(ConvNet, SHAPE, 3, width=8, depth=1, norm=norm), seed).eval()


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(0, 3), st.lists(st.floats(0.1, 3), max_size=2), st.integers(1, 3))
def test_score_is_the_share_of_right_decisions(seed: int, shift: int, noise: list[float], draws: int) -> None:
    images, labels = records(seed, 5)
    images *= CONTRASTS[::29]
    net, g = network(seed), derive(seed, 7)
    drawn = [[torch.randn(1, *SHAPE, generator=g) for _ in range(draws)] for _ in noise]
    wanted, every = [], []
    for x, y in zip(images, labels, strict=True):
        copies = []
        for dy in range(-shift, shift + 1):
            for dx in range(-shift, shift + 1):
                if abs(dx) + abs(dy) <= shift:
                    rows = [min(max(i + dy, 0), 7) for i in range(8)]
                    columns = [min(max(i + dx, 0), 5) for i in range(6)]
                    copies.append(x[:, rows][:, :, columns])
        copies += [x + level * float(x.std(correction=0)) * d[0] for level, some in zip(noise, drawn) for d in some]
        every.append(torch.stack(copies))
        wanted.append(sum(int(net(c[None]).argmax()) == int(y) for c in copies) / len(copies))
    seen: list[Tensor] = []
    options: Any = {"shift": shift, "noise": noise, "draws": draws, "generator": derive(seed, 7), "chunk": 2}
    found = label_only(lambda x: seen.append(x) or net(x), images, labels, **options)
    assert {len(x) for x in seen} == {1, 2}
    called = torch.cat(seen).view(-1, 5, *SHAPE)
    assert torch.allclose(called.sort(0).values, torch.stack(every, 1).sort(0).values, atol=1e-5)
    assert found.tolist() == pytest.approx(wanted)
    assert found.dtype == torch.float64


def test_confidences_are_never_read() -> None:
    images, labels = records(3)
    net = network(3)
    wanted = label_only(net, images, labels)
    for other in (lambda x: net(x).argmax(1), lambda x: net(x).argmax(1).to(torch.int32), lambda x: 9 * net(x) - 4):
        assert torch.equal(label_only(other, images, labels), wanted)


def test_a_score_does_not_depend_on_other_records_or_chunks() -> None:
    images, labels = records(4)
    images *= CONTRASTS
    net = network(4, "batch").train()
    whole = label_only(net, images, labels)
    assert net.training
    assert torch.equal(label_only(net, images[7:9], labels[7:9], chunk=1), whole[7:9])
    assert not torch.equal(label_only(net, images, labels, generator=1), whole)


def fail(x: Tensor) -> Tensor:
    raise RuntimeError("first\nsecond")


class Decided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).argmax(1)


X, Y = records(0, 4)
COLUMNS = torch.arange(96) > 1


REFUSALS: list[tuple[Callable[[], object], str]] = [
    *((lambda given=given: label_only(*given, X, Y), words) for *given, words in (
        (lambda x: x[:, 0], r"must return logits \[n, K\] or class indices int \[n\], .* torch.float32 \[4, 8, 6\]"),
        (lambda x: x.mean((1, 2, 3)), r"at least 2 classes, got torch.float32 \[4\] for 4 images"),
        (lambda x: x.mean((1, 2, 3))[:, None], r"at least 2 classes, got torch.float32 \[4, 1\] for 4 images"),
        (lambda x: x.new_zeros(len(x), 1).long(), r"got torch.int64 \[4, 1\]"),
        (lambda x: -torch.arange(len(x)), "at least 0, got -3"),
        (lambda x: x.flatten(1)[:, 0] > 0, r"got torch.bool \[4\]"), (lambda x: x.flatten(1).tolist(), "got list for"),
        (lambda x: x.flatten(1)[:2], r"got torch.float32 \[2, 96\] for 4 images"),
        (lambda x: x.flatten(1).to(torch.complex64), r"got torch.complex64 \[4, 96\]"),
        (lambda x: x[:, 0, 0, 0].to(torch.complex64), r"got torch.complex64 \[4\]"),
        (lambda x: x.flatten(1).where(COLUMNS, math.nan), "network must not return NaN, but 8 logits are NaN"),
        (nn.Flatten, "network must be a network, or a function of images, got type"),
        (lambda: network(0), "call a factory first"), (lambda seed: network(0), "a function that makes a ConvNet"),
        (lambda x: x + None, r"network must take images \[4, 2, 8, 6\]: unsupported operand"),
        (fail, r"network must take images \[4, 2, 8, 6\]: first$"), (lambda x: x[:, 5], "network must take images"),
    )),
    (lambda: label_only(lambda x: x[0, :1], X, Y, chunk=1), r"got torch.float32 \[1, 8, 6\] for 1 images"),
    (lambda: label_only(lambda x: x @ X[:, 0, :3], X, Y, chunk=3), r"take images \[3, 2, 8, 6\]: "),
    (lambda: model_scorer(Decided())(X, Y), r"must return logits \[n, K\], got torch.int64 \[4\]"),
    *((lambda given=given: label_only(network(0), X, Y, **given), words) for given, words in (
        ({"draws": 0}, "draws must be at least 1, got 0"), ({"shift": 6}, "shift must be at most 5, got 6"),
        ({"shift": -1}, "shift must be at least 0, got -1"), ({"noise": (0.5, 0.0)}, r"noise\[1\] must be greater"),
    )),
    (lambda: label_only(network(0), X, Y[:2]), "labels must have one entry per image: got 2 for 4 images"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_arguments_are_named(call: Callable[[], Any], said: str) -> None:
    refused(call, (TypeError, ValueError), said)
