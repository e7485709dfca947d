"""Comparison of noise draws with the ledger, and replays of releases with a known seed: real mechanisms with bugs."""

from __future__ import annotations

import math
from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attacks.audit import audit_noise
from distillkit import privacy
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.rng import derive
from distillkit.sets import LabeledImages

CLIP, SIGMA, STEPS = 0.5, 2.0, 3
DATA = LabeledImages(torch.randn(8, 1, 8, 8, generator=derive(0)), torch.arange(8) % 2, num_classes=2)


def test_dp_sgd_draws_the_charged_noise() -> None:
    account = privacy.Account(privacy.Ledger(), secret=(secret := privacy.Secret()))
    for _ in range(2):
        network = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), 0)
        privacy.train_private(
            network, DATA, size=8, sigma=SIGMA, clip=CLIP, rate=0.5, steps=STEPS, ledger=account, progress=False
        )  # fmt: skip
    assert secret.drawn == {SIGMA * CLIP: 2 * STEPS * 130}  # the network has 130 parameters
    found = audit_noise(secret.drawn, [(e.sigma * CLIP, e.count * 130) for e in account.ledger.events])
    assert (found.holds, str(found)) == (True, "as much noise was drawn as was charged")


def test_private_set_draws_the_charged_noise() -> None:
    account = privacy.Account(privacy.Ledger(), secret=(secret := privacy.Secret()))
    embedders = privacy.PublicEmbedders(RandomNetworks(lambda: ConvNet((1, 8, 8), 2, width=4, depth=1)), 3, like=DATA)
    sums = privacy.class_sums(DATA.images, DATA.labels, embedders, num_classes=2)
    privacy.release(sums, sigma=SIGMA, sensitivity=embedders.sensitivity, ledger=account)
    privacy.private_histogram(DATA.labels, num_classes=2, sigma=5.0, ledger=account)
    means, counts = account.ledger.events
    charged = [(means.sigma * embedders.sensitivity, means.count * sums[0].numel()), (counts.sigma, 2)]
    assert audit_noise(secret.drawn, charged).holds


@given(st.lists(st.tuples(st.sampled_from([1e-12, 2e-12, 3e6]), st.integers(0, 9)), max_size=8), st.randoms())
def test_audit_result_is_independent_of_the_order(pairs: list[tuple[float, int]], order: Any) -> None:
    drawn: Counter[float] = Counter()
    for std, count in pairs:
        drawn[std] += count
    shuffled = [(std * (1 + 5e-10), count) for std, count in pairs]
    order.shuffle(shuffled)
    assert audit_noise(MappingProxyType(drawn), shuffled).holds
    more = audit_noise(drawn, [*shuffled, (7.0, 2)])
    assert (more.lacking, more.uncharged) == ({7.0: 2}, {})
    assert [more.holds, audit_noise({**drawn, 7.0: 2}, shuffled).holds] == [False, False]


def test_all_differences_are_told_by_standard_deviation() -> None:
    found = audit_noise({3.0: 2, 1.0625: 1}, [(5.0, 1), (3.0 * (1 + 2e-9), 7)])
    count = "{} noise values of standard deviation {} were {}"
    charged = [count.format(7, 3, "charged but not drawn"), count.format(1, 5, "charged but not drawn")]
    drawn = [count.format(1, 1.062, "drawn but not charged"), count.format(2, 3, "drawn but not charged")]
    assert str(found) == "refuted: " + "; ".join([*charged, *drawn])


BAD: list[tuple[Any, str]] = [
    (lambda: audit_noise([1.0], ()), "drawn must map standard deviations to counts, got list"),
    (lambda: audit_noise({0.0: 1}, []), "standard deviation of drawn must be"),
    (lambda: audit_noise({1.0: -1}, []), "numbers of drawn must be at least 0"),
    (lambda: audit_noise({1.0: 1}, [1.0]), r"charged must be a list of pairs .*, got \[1.0\]"),
    (lambda: audit_noise({1.0: 1}, [(1.0, 1), (1.0, 1, 1)]), r"a list of pairs .*, got \[\(1.0, 1\), \(1.0, 1, 1\)\]"),
    (lambda: audit_noise({1.0: 1}, 3), "charged must be a list of pairs"),
    (lambda: audit_noise({1.0: 1}, [(math.nan, 1)]), "standard deviation of charged must be"),
    (lambda: audit_noise({1.0: 1}, [(1.0, 0.5)]), "numbers of charged must be an int, got float"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()
