from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from distillkit import LabeledImages
from distillkit.generate.separability import separability
from distillkit.generate.stylegan_noise import upsampled_gaussian
from distillkit.networks import ConvNet
from distillkit.rng import as_generator
from distillkit.training import accuracy

EASY = upsampled_gaussian(3, 24, 16, 2)


def test_separable_classes_are_distinguished(global_rng_untouched: None) -> None:
    found = separability(EASY)
    assert found.linear_probe > 0.9
    assert found.small_net > 0.9
    assert found.chance == pytest.approx(1 / 3)
    assert separability(*EASY) == found


def test_random_labels_are_not_distinguished() -> None:
    noise = torch.randn(120, 1, 8, 8, generator=as_generator(0))
    found = separability(noise, torch.arange(120) % 2, epochs=3)
    assert abs(found.linear_probe - 0.5) < 0.2
    assert abs(found.small_net - 0.5) < 0.2
    assert found.chance == 0.5
    linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))  # noqa: E731
    halves = [separability(noise, torch.arange(120) % 2, factory=linear, epochs=1, generator=s) for s in range(3)]
    assert len({one.linear_probe for one in halves}) > 1, "the halves are drawn"


def test_custom_network_and_unbalanced_classes_with_one_missing() -> None:
    images = torch.cat([EASY.images[:24], EASY.images[48:57]])
    labels = torch.tensor([0] * 24 + [2] * 9)
    found = separability(
        images, labels, factory=lambda: nn.Sequential(nn.Flatten(), nn.Linear(512, 3)), generator=as_generator(1)
    )
    assert found.chance == 12 / 16, "of an odd class the larger half is trained on"
    assert found.linear_probe > 0.9


@pytest.mark.parametrize("classes", [3, 12])
@pytest.mark.parametrize(("size", "depth"), [((16, 16), 3), ((64, 8), 2), ((4, 64), 1), ((2, 3), 1), ((9, 33), 2)])
def test_depth_follows_from_the_shorter_side_and_options_reach_the_training(
    size: tuple[int, int], depth: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths, module, told = list[int](), sys.modules[separability.__module__], list[Any]()
    made = lambda *args, **options: depths.append(options["depth"]) or ConvNet(*args, **options)  # noqa: E731
    monkeypatch.setattr(module, "ConvNet", made)
    monkeypatch.setattr(
        module, "train", lambda network, data, protocol, **how: told.append((network, data, protocol, how["generator"]))
    )
    draws, images = as_generator(1), torch.rand(37, 1, *size, generator=as_generator(0))
    labels = torch.arange(37) % classes
    found = separability(images, labels, epochs=7, lr=0.2, batch=3, generator=draws)
    assert set(depths) == {depth}
    [(network, half, protocol, generator)] = told
    rest = [i for i, image in enumerate(images) if not any(torch.equal(image, own) for own in half.images)]
    assert len(rest) == {3: 18, 12: 13}[classes]
    assert found.small_net == accuracy(network, LabeledImages(images[rest], labels[rest], num_classes=classes))
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.01, tol=1e-3))
    probe.fit(half.images.flatten(1).numpy(), half.labels.numpy())
    assert found.linear_probe == probe.score(images[rest].flatten(1).numpy(), labels[rest].numpy())
    assert (protocol.epochs, protocol.lr, protocol.batch, protocol.optimizer) == (7, 0.2, 3, "adamw")
    assert generator is draws


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("each class must have at least 2 images, class 1 has 1", {"labels": torch.tensor([0, 0, 1])}),
        ("images must be of at least 2 classes, got those of class 1 alone", {"labels": torch.tensor([1, 1, 1])}),
        (r"labels must be class indices of at least 2 images, got shape \[3, 2\]", {"labels": torch.ones(3, 2)}),
    ],
)
def test_invalid_arguments_are_named(match: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        separability(**{"images": EASY.images[:3], "labels": torch.tensor([0, 0, 0]), **options})
