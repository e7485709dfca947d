"""Steps of components against straightforward implementations: matching, inversion, evaluation, private steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit import LabeledImages
from distillkit.condense import InnerTraining, distribution_matching, fit_to_gradient, gradient_matching
from distillkit.generate import invert
from distillkit.networks import FixedNetwork
from distillkit.normalization import IDENTITY
from distillkit.privacy import (
    PrivateGradient,
    PublicEmbedder,
    PublicEmbedders,
    Secret,
    class_means_gradient,
    image_gradients,
    per_example_gradients,
)
from distillkit.privacy.capture import _captured_function
from distillkit.rng import derive
from distillkit.training import accuracy
from tests.benchmarks import plain
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.plain import Step
from tests.benchmarks.race import Lap, Race
from tests.benchmarks.sizes import Sizes, convnet, images

# Matching.


def matching(s: Sizes, *, cache: bool = False) -> Race:
    """Race of distribution matching with all real images of a class; with `cache`, as FedLGD refines."""
    network = convnet(s).requires_grad_(False)
    real, start = images(s.shape, s.classes, s.real), images(s.shape, s.classes, s.ipc, 1)

    def ours(steps: int, lap: Lap) -> Tensor:
        found = distribution_matching(
            real, networks=FixedNetwork(network, cache=cache), steps=steps, init=start, batch_real=None,
            callback=lambda _: lap(), progress=False,
        )  # fmt: skip
        return found.images - start.images

    def begun() -> Step:
        by_class, embed = real.images.split(s.real), plain.plain(network)
        return plain.descent(start.images, lambda x: plain.dm_gradient(embed, by_class, x), 1.0)

    return Race(ours, begun)


def gradients(s: Sizes) -> Race:
    """Race of a matching step of DC."""
    network = convnet(s)
    real, start = images(s.shape, s.classes, s.real_gm), images(s.shape, s.classes, s.ipc, 1)

    def ours(steps: int, lap: Lap) -> Tensor:
        found = gradient_matching(
            real, networks=FixedNetwork(network), iterations=steps, inner=InnerTraining((1, 1)), init=start,
            batch_real=None, callback=lambda _: lap(), progress=False,
        )  # fmt: skip
        return found.images - start.images

    def begun() -> Step:
        by_class, whole = real.images.split(s.real_gm), plain.plain_classifier(network)
        return plain.descent(start.images, lambda x: plain.gm_gradient(whole, by_class, x), 0.1)

    return Race(ours, begun)


def given_gradient(s: Sizes) -> Race:
    """Race of a step towards a given gradient, as on FedLGD's server."""
    network, start = convnet(s), images(s.shape, s.classes, s.ipc, 1)
    target = [torch.randn(p.shape, generator=derive(2, k)) for k, p in enumerate(network.parameters())]

    def ours(steps: int, lap: Lap) -> Tensor:
        found = fit_to_gradient(network, start, target, steps=steps, callback=lambda _: lap(), progress=False)
        return found.images - start.images

    def begun() -> Step:
        gradient = partial(plain.target_gradient, plain.plain_classifier(network), target, start.labels)
        return plain.descent(start.images, gradient, 1.0)

    return Race(ours, begun)


def inversion(s: Sizes, steps: int = 2) -> Race:
    """Race of inversion with a student to disagree with: two steps of Adam."""
    teacher, student = (convnet(s, seed=seed).requires_grad_(False) for seed in (0, 1))
    targets = torch.arange(s.inverted) % s.classes

    def ours(laps: int, lap: Lap) -> Tensor:
        for _ in range(laps):
            made = invert(teacher, targets, shape=s.shape, student=student, steps=steps, progress=False)
            lap()
        return made.images

    def begun() -> Step:
        ways = (plain.plain_classifier(n) for n in (teacher, student))
        return plain.inversion(*ways, targets, s.shape, steps)

    return Race(ours, begun)


def testing(s: Sizes) -> Race:
    """Race of evaluating a network on the predictions of PyTorch's layers, so that the accuracy is 1 up to rounding."""
    network, whole = convnet(s), images(s.shape, 2, s.tested // 2).images
    straight = plain.plain_classifier(network)

    def guesses() -> Tensor:
        with torch.no_grad():
            return torch.cat([straight(part).argmax(1) for part in whole.split(256)])

    data = LabeledImages(whole, guesses(), num_classes=s.classes, normalization=IDENTITY)

    def ours(laps: int, lap: Lap) -> Tensor:
        for _ in range(laps):
            found = accuracy(network, data)
            lap()
        return torch.tensor(found)

    return Race(ours, lambda: lambda: (guesses() == data.labels).to(torch.get_default_dtype()).mean())


# Private steps: the first step has no noise, so that both sides can be compared.


def image_steps(s: Sizes) -> Race:
    """Race of the private step of `image_sgd` (FedDM)."""
    network = convnet(s, s.private_width).requires_grad_(False)
    synthetic = images(s.shape, s.classes, s.ipc, 1).images.unflatten(0, (s.classes, s.ipc))
    data = torch.randn(s.records, *s.shape, generator=derive(3)), torch.arange(s.records) % s.classes

    def ours(laps: int, lap: Lap) -> Tensor:
        def private(sigma: float) -> PrivateGradient:
            leaf = synthetic.clone().requires_grad_()
            return PrivateGradient([leaf], sigma=sigma, clip=1.0, denominator=s.records, secret=Secret())

        for way in (private(float(n > 0)) for n in range(laps)):
            with torch.no_grad():
                embedding = network.features(data[0])
            for rows in image_gradients(synthetic, PublicEmbedder(network, None), embedding, data[1]):
                way.add([rows])
            found = way.take()[0]
            lap()
        return found

    def begun() -> Step:
        step, sigmas = plain.private_images(plain.plain(network), synthetic, *data, clip=1.0), noises()
        return lambda: step(next(sigmas))

    return Race(ours, begun, lambda convolutions: noted(lambda: ours(1, lambda: None), convolutions))


def noted(step: Callable[[], object], convolutions: Convolutions) -> None:
    """Record the convolutions of a private step, which refuses modes such as the recorder."""
    with (
        patch.object(_captured_function, "dispatch_modes", list),
        patch.object(_captured_function, "function_modes", list),
        convolutions,
    ):
        step()


def noises() -> Iterator[float]:
    """Yield None first, then the clip."""
    return (float(n > 0) for n in count())


def mean_steps(s: Sizes) -> Race:
    """Race of a step of `fit_to_means` on released class means."""
    network, like = convnet(s, s.private_width).requires_grad_(False), images(s.shape, s.classes, s.ipc, 1)
    maps = PublicEmbedders(FixedNetwork(network), 1, like=like)
    synthetic = like.images.unflatten(0, (s.classes, s.ipc))
    with torch.no_grad():
        target = maps[0](torch.randn(s.classes, *s.shape, generator=derive(4)))

    def ours(laps: int, lap: Lap) -> Tensor:
        for _ in range(laps):
            found = class_means_gradient(synthetic, maps, 0, target)
            lap()
        return found

    center = maps[0].center
    assert center is not None
    embed = plain.plain(network)
    return Race(ours, lambda: partial(plain.means_gradient, embed, center, target, synthetic))


def private_training(s: Sizes) -> Race:
    """Race of the gradient of a step of `train_private`."""
    network = convnet(s, s.private_width).train()
    data = torch.randn(s.records, *s.shape, generator=derive(3)), torch.arange(s.records) % s.classes
    parameters = list(network.parameters())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x), y, reduction="none")

    rows_for = per_example_gradients(network, losses, like=data)
    chunk = rows_for.chunk_size(s.records)

    def ours(laps: int, lap: Lap) -> Tensor:
        for n in range(laps):
            private = PrivateGradient(parameters, sigma=float(n > 0), clip=1.0, denominator=s.records, secret=Secret())
            for x, y in zip(data[0].split(chunk), data[1].split(chunk)):
                private.add(rows_for(x, y))
            found = plain.flat(private.take())
            lap()
        return found

    def begun() -> Step:
        step, sigmas = plain.opacus(plain.plain_classifier(convnet(s, s.private_width)), *data), noises()
        return lambda: step(next(sigmas))

    def rows() -> None:
        for x, y in zip(data[0].split(chunk), data[1].split(chunk)):
            rows_for(x, y)

    return Race(ours, begun, lambda convolutions: noted(rows, convolutions))
