"""Laws of whole mechanisms: what is charged, drawn and released, and what the data may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import Ledger, PublicEmbedders, image_sgd
from distillkit.privacy.condensation import class_means
from distillkit.privacy.condensation import condense_private as condense_module
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.options import condensed, grouped

Factory = Callable[[], nn.Module]


def stepped(toy_set: LabeledImages, toy_network: Factory, **options: Any) -> LabeledImages:
    fixed = {
        "size": 12,
        "sigma": 1.0,
        "rate": 1.0,
        "clip": 1.0,
        "networks": RandomNetworks(toy_network),
        "ipc": 1,
        "steps": 4,
    }
    return image_sgd(toy_set, **grouped(**fixed | options))


def test_support_does_not_depend_on_the_data(toy_set: LabeledImages, toy_network: Factory) -> None:
    for data in (toy_set, toy_set[toy_set.labels != 2], toy_set[:0]):
        embedders = PublicEmbedders(RandomNetworks(toy_network), 2, like=data)
        sums = class_means.class_sums(data.images, data.labels, embedders, num_classes=3)
        released = class_means.release(sums, sigma=1.0, sensitivity=1.0, ledger=Ledger())
        assert released.shape == (2, 3, 16)
        assert float((released != 0).double().mean()) > 0.9  # one in 2^20 lies on the grid's 0
        assert condensed(data, toy_network).labels.tolist() == [0, 0, 1, 1, 2, 2]
        seen: list[Tensor] = []
        stepped(data, toy_network, callback=lambda step, g, seen=seen: seen.append(g.clone()))
        assert float((torch.stack(seen) != 0).double().mean()) > 0.9


def test_data_enter_only_through_the_released_sums(toy_set: LabeledImages, toy_network: Factory) -> None:
    """With fixed sums and public sizes, two datasets give bitwise equal images."""
    with pytest.MonkeyPatch.context() as patch:
        fixed = torch.randn(3, 3, 16, generator=derive(5), dtype=torch.float64)
        patch.setattr(condense_module, "class_sums", lambda x, y, embedders, **_: fixed[: len(embedders)].clone())
        sizes = torch.full((3,), 4.0)
        first, *others = (
            condensed(data, toy_network, size=sizes, secret=7)
            for data in (toy_set, toy_set[:5], toy_set[toy_set.labels != 2], toy_set[:0])
        )
        for other in others:
            assert torch.equal(first.images, other.images)
