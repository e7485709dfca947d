"""Functions, augmentations and losses must treat every example independently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.networks import RandomNetworks
from distillkit.privacy import (
    BatchStatistics,
    EmbeddingNetworks,
    Ledger,
    NotSeparable,
    PrivacyError,
    condense_private,
    require_separable,
    separable,
)
from distillkit.privacy.validation._independence import require_independent_augmentation, require_independent_rows
from distillkit.rng import derive
from distillkit.sets import LabeledImages

IMAGES = torch.randn(6, 1, 4, 4, generator=derive(0))


def by_place(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x * (torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5)


def only_the_last_mixes(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return torch.cat([x[:-1], x[-1:] + x.mean(0, keepdim=True)])


def global_jitter(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x + torch.rand(1)


def test_augmentation_is_checked_at_every_position() -> None:
    require_independent_augmentation(by_place, IMAGES)
    with pytest.raises(BatchStatistics, match="depends on the other images of the batch"):
        require_independent_augmentation(only_the_last_mixes, IMAGES)
    with pytest.raises(BatchStatistics, match="turns 6 images into 12"):
        require_independent_augmentation(lambda x, g: torch.cat([x, x]), IMAGES)


@pytest.mark.parametrize(
    ("augment", "error", "why"),
    [
        (
            by_place,
            BatchStatistics,
            "siamese=True .one draw for all images. gives an image another result at another position",
        ),
        (only_the_last_mixes, BatchStatistics, "at another position or among other images"),
        (global_jitter, PrivacyError, "draws from the global random state"),
    ],
)
def test_embedders_refuse_an_augmentation_that_draws_per_position(
    augment: Any, error: type[Exception], why: str, toy_set: LabeledImages, toy_network: Callable[[], nn.Module]
) -> None:
    ledger = Ledger()
    with pytest.raises(error, match=why):
        condense_private(
            toy_set,
            epsilon=1.0,
            networks=EmbeddingNetworks(RandomNetworks(toy_network), augment=augment),
            num_networks=1,
            ipc=1,
            ledger=ledger,
        )
    assert ledger.events == ()
    condense_private(
        toy_set,
        epsilon=1.0,
        networks=EmbeddingNetworks(RandomNetworks(toy_network), augment=DSA()),
        num_networks=1,
        ipc=1,
        steps=1,
        ledger=ledger,
    )
    assert ledger.events


class Remembers(nn.Module):
    """Counts in a plain attribute, or in a buffer that it replaces."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.plain = where, torch.zeros(1)
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.plain += len(x)
        else:
            self.buffer = self.buffer + len(x)
        return x.flatten(1)


BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mixes": (lambda x: x - x.mean(0), "among other images"),
    "mixes a little": (lambda x: x + 1e-3 * x.mean(0), "among other images"),
    "counts": (lambda x: x / len(x), "among other images"),
    "mixes six only": (lambda x: x - x.mean(0) if len(x) == 6 else x, "among other images"),
    "knows its place": (lambda x: x * torch.arange(1, len(x) + 1).view(-1, 1, 1, 1), "another position"),
    "folds": (lambda x: torch.cat([x, x]), r"turns 1 images into shape \[2, 1, 4, 4\]"),
    "one number": (lambda x: x.mean(), r"turns 1 images into shape \[\]"),
    "draws": (lambda x: nn.functional.dropout(x, 0.5), "."),
    "draws by NumPy": (lambda x: x + 0 * __import__("numpy").random.rand(), "global random state"),
    "draws by random": (lambda x: x + 0 * __import__("random").random(), "global random state"),
}


@pytest.mark.parametrize("name", BAD)
def test_functions_that_mix_rows_are_refused(name: str, global_rng_untouched: None) -> None:
    function, why = BAD[name]
    with pytest.raises(PrivacyError, match=f"^it .*{why}"):
        require_independent_rows(function, IMAGES, "it")


@pytest.mark.parametrize("where", ["attribute", "buffer"])
def test_side_effects_of_a_forward_pass_are_named_and_undone(where: str) -> None:
    module = Remembers(where)
    with pytest.raises(BatchStatistics, match="changes (plain|buffer)"):
        require_independent_rows(module, IMAGES, "it", module)
    assert float(module.plain) == 0
    require_independent_rows(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(2, 2), nn.ReLU()), IMAGES, "it")


def test_separable_loss_is_checked_at_many_sizes() -> None:
    @separable
    def eight(embedding: Tensor, means: Tensor) -> Tensor:
        rows = (embedding - means).square().sum(1)
        return rows - rows.mean() if len(rows) == 8 else rows

    @separable
    def noisy(embedding: Tensor, means: Tensor) -> Tensor:
        return (embedding - means).square().sum(1) * torch.rand(1)

    with pytest.raises(NotSeparable, match="depends on that row alone"):
        require_separable(eight)
    with pytest.raises(PrivacyError, match="the loss noisy draws from the global random state"):
        require_separable(noisy)
