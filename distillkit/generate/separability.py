"""Separability of the classes of a set, measured by the accuracy of two classifiers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.networks._factory import NetworkFactory, build
from distillkit.networks._validation import check_network
from distillkit.networks.convnet import ConvNet
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, Labels, as_set
from distillkit.sets._devices import on_device
from distillkit.training import Protocol, accuracy, train


@dataclass(frozen=True)
class Separability:
    """Result of `separability`: accuracies in [0, 1] on the held-out half of the set.

    Attributes:
        linear_probe: accuracy of a logistic regression on the pixels.
        small_net: accuracy of a small network, by default a ConvNet.
        chance: accuracy of a classifier that always predicts the largest class.
    """

    linear_probe: float
    small_net: float
    chance: float


@on_device("images")
def separability(
    images: Images,
    labels: Labels | None = None,
    *,
    factory: NetworkFactory | None = None,
    epochs: int = 10,
    lr: float = 0.003,
    batch: int = 32,
    generator: int | torch.Generator = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Separability:
    """Measure how well two classifiers, trained on one half of a set, distinguish the classes of the other half.

    The classifiers are a logistic regression and a small network. The theory of VHL (Tang et al., ICML 2022) requires
    virtual data whose classes are separable, but the paper does not measure the separability.

    Args:
        images, labels: a set, or images, float [N, C, H, W], and class indices [N]. Each class needs at least two
            images.
        factory: function that builds the small network. Default: a ConvNet of width 32 and depth 3; the depth is
            smaller for images below 16 pixels.
        epochs, lr, batch: number of epochs, learning rate and batch size for training the network with Adam.
        generator: seed or random generator for the split, the network and the batches. In a class with an odd number of
            images, the training half gets the extra image.
        device: device that computes, or "auto". Default: nothing moves.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: an argument is invalid, the labels are not class indices, there is a single class, or a
            class has a single image.
    """
    data = as_set(images, labels, progress=progress)
    epochs = check.positive_int(epochs, "epochs")
    batch = check.positive_int(batch, "batch")
    lr = check.learning_rate(lr)
    if data.labels.ndim != 1 or not len(data):
        raise ValueError(f"labels must be class indices of at least 2 images, got shape {list(data.labels.shape)}")
    counts = data.counts()
    if int((counts == 1).sum()):
        raise ValueError(f"each class must have at least 2 images, class {int((counts == 1).nonzero()[0])} has 1")
    if int((counts > 0).sum()) < 2:
        raise ValueError(f"images must be of at least 2 classes, got those of class {int(counts.argmax())} alone")
    generator = as_generator(generator)
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    for c in counts.nonzero().flatten():
        mixed = torch.randperm(int(counts[c]), generator=generator).to(counts.device)
        members = (data.labels == c).nonzero().flatten()[mixed]
        for half, part in zip(halves, members.split(-(-len(members) // 2)), strict=True):
            half.append(part)
    first, second = data[torch.cat(halves[0])], data[torch.cat(halves[1])]
    return Separability(
        linear_probe=_linear_probe(first, second),
        small_net=_small_network(first, second, factory, epochs, lr, batch, generator, progress),
        chance=float(second.counts().max()) / len(second),
    )


def _linear_probe(train: LabeledImages, test: LabeledImages) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.01, tol=1e-3))
    (a, b), (c, d) = ([t.detach().cpu().numpy() for t in (s.images.flatten(1), s.labels)] for s in (train, test))
    return float(probe.fit(a, b).score(c, d))


def _small_network(
    data: LabeledImages,
    test: LabeledImages,
    factory: NetworkFactory | None,
    epochs: int,
    lr: float,
    batch: int,
    generator: torch.Generator,
    progress: bool,
) -> float:
    shape, k = data.shape, data.num_classes
    depth = max(1, min(3, int(math.log2(min(shape[1:]))) - 1))
    network = build(factory or (lambda: ConvNet(shape, k, width=32, depth=depth)), generator).to(data.images)
    check_network(network, data.images, classes=k, name="factory")
    adam = Protocol(epochs=epochs, lr=lr, weight_decay=0.0, batch=batch, optimizer="adamw", schedule="constant")
    with bar(epochs, "separability", unit="epoch", progress=progress) as shown:
        train(network, data, adam, generator=generator, callback=lambda _: shown.update(), progress=False)
    return accuracy(network, test)
