from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from distillkit.networks import RandomNetworks, build, split
from distillkit.privacy import Ledger, TrainedNetworks, image_sgd, train_private
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, train
from tests.distillkit.privacy.options import condensed
from tests.refused import refused

Factory = Callable[[], nn.Module]
SHORT = Protocol(epochs=2, batch=6, lr=0.1)


def test_draw_is_the_network_that_the_set_trains(
    toy_set: LabeledImages, toy_network: Factory, global_rng_untouched: None
) -> None:
    def halved(network: nn.Module, generator: torch.Generator) -> None:
        next(network.parameters()).mul_(0.5)

    networks = TrainedNetworks(toy_network, toy_set, SHORT, redraw=halved)
    assert (repr(networks), networks.fixed) == ("TrainedNetworks(on 12 images, 2 epochs)", False)
    drawn = networks.draw(derive(0, 1))
    generator = derive(0, 1)
    expected = split(train(build(toy_network, generator, halved), toy_set, SHORT, generator=generator))
    assert torch.equal(drawn(toy_set.images), expected(toy_set.images))
    assert not any(p.requires_grad for p in drawn.parameters())  # type: ignore[attr-defined]
    other = networks.draw(2)  # type: ignore[arg-type]
    assert networks.draw(derive(0, 1)) is drawn
    assert networks.draw(generator) is not drawn  # of the same seed, in a later state
    assert not torch.allclose(other.features(toy_set.images), drawn.features(toy_set.images))
    assert not any(module.training for module in [*drawn.modules()][1:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("progress", [False, True])
def test_bars_are_shown_if_progress_is_true(
    progress: bool, toy_set: LabeledImages, toy_network: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[Any, Mock]] = []

    def noted(total: int, what: str, *, progress: bool, **options: Any) -> Any:
        bars.append(((what, total, progress), Mock()))
        return nullcontext(bars[-1][1])

    condensation = "distillkit.privacy.condensation."
    for place in ("distillkit.training", condensation + "class_means", condensation + "image_sgd",
                  "distillkit.privacy.gradients.dp_sgd"):  # fmt: skip
        monkeypatch.setattr(f"{place}.bar", noted)
    options: dict[str, Any] = {"size": 12, "sigma": 1.0, "steps": 1, "progress": progress}
    condensed(toy_set, toy_network, train=SHORT, networks=None, progress=progress)
    image_sgd(toy_set, networks=RandomNetworks(toy_network), ipc=1, **options)
    train_private(toy_network(), toy_set, **options)
    wanted = {("training", 3), ("fitting private images", 2), ("fitting private images", 6)}
    wanted |= {("private image steps", 1), ("private training", 1)}
    assert {asked for asked, _ in bars} == {(*one, progress) for one in wanted}
    assert all(shown.update.call_count == total for (_, total, _), shown in bars)


def test_untrainable_networks_are_refused(toy_set: LabeledImages, toy_network: Factory) -> None:
    ledger = Ledger()
    networks = TrainedNetworks(toy_network, toy_set, SHORT)
    refused(lambda: TrainedNetworks(toy_network, toy_set, Protocol), TypeError, "protocol must be")  # type: ignore[arg-type]
    words = "^data must be a public LabeledImages, got Tensor"
    refused(lambda: TrainedNetworks(toy_network, toy_set.images, SHORT), TypeError, words)  # type: ignore[arg-type]
    refused(lambda: TrainedNetworks(toy_network, toy_set, SHORT, progress=0), TypeError, "progress must be True or")
    with pytest.raises(ValueError, match=r"networks must be RandomNetworks\(factory\) if .* got TrainedNetworks"):
        condensed(toy_set, toy_network, train=SHORT, networks=networks, chunk=4, ledger=ledger)
    refused(lambda: condensed(toy_set, toy_network, train=SHORT, count=1, ledger=ledger), ValueError, "count")
    assert not ledger.events
