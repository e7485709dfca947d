"""The rows of the table: what is measured of ours, and beside which straightforward way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import LabeledImages
from distillkit.condense import distribution_matching, fit_to_gradient, gradient_matching
from distillkit.generate import invert
from distillkit.networks import ConvNet, FixedNetwork, LeNet, build
from distillkit.normalization import IDENTITY
from distillkit.privacy import PrivateGradient, PublicMaps, Secret, image_gradients, map_gradient, per_example_gradients
from distillkit.privacy.trial import examples_at_once
from distillkit.rng import derive
from distillkit.threads import pool_of
from distillkit.training import accuracy
from fl import Client, FedAvg, FedDM, Message, Method, simulate
from fl.reduce import Reduced
from fl.sides import Server
from tests.benchmarks import plain
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.plain import Step
from tests.benchmarks.race import Lap, Race, Row

WORKERS = 2


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        classes, ipc, side, width: of the sets, and of ConvNet-3.
        real, real_gm: real images a class of distribution and of gradient matching.
        inverted: images that are inverted together.
        records, private_width: of a private step.
        tested: images of an evaluation.
        lenet, convnet: (clients, images of each) of a round of FedAvg.
        condensing: (clients, real images a class) of a round of FedDM.
        batch: of a client.
    """

    classes: int = 10
    ipc: int = 10
    side: int = 32
    width: int = 128
    real: int = 256
    real_gm: int = 64
    inverted: int = 128
    records: int = 64
    private_width: int = 64
    tested: int = 1000
    lenet: tuple[int, int] = (10, 500)
    convnet: tuple[int, int] = (4, 128)
    condensing: tuple[int, int] = (2, 32)
    batch: int = 32

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return 3, self.side, self.side


FULL = Sizes()
TINY = Sizes(
    classes=3, ipc=2, side=8, width=4, real=6, real_gm=5, inverted=4, records=5, private_width=4, tested=20,
    lenet=(2, 6), convnet=(2, 6), condensing=(2, 4), batch=4,
)  # fmt: skip


def images(shape: tuple[int, int, int], classes: int, each: int, *keys: int) -> LabeledImages:
    """Random images, class by class."""
    labels = torch.arange(classes).repeat_interleave(each)
    pixels = torch.randn(len(labels), *shape, generator=derive(0, "images", *keys))
    return LabeledImages(pixels, labels, num_classes=classes, normalization=IDENTITY)


def convnet(s: Sizes, width: int | None = None, seed: int = 0) -> Any:
    """A ConvNet-3, in eval mode."""
    return build(lambda: ConvNet(s.shape, s.classes, width=width or s.width), seed).eval()


# Matching.


def matching(s: Sizes, *, cache: bool = False) -> Race:
    """Distribution matching with all real images of a class; with the cache, as FedLGD refines."""
    network = convnet(s).requires_grad_(False)
    real, start = images(s.shape, s.classes, s.real), images(s.shape, s.classes, s.ipc, 1)

    def ours(steps: int, lap: Lap) -> Tensor:
        found = distribution_matching(
            real, networks=FixedNetwork(network), steps=steps, init=start, batch_real=None, cache=cache,
            callback=lambda _: lap(), progress=False,
        )  # fmt: skip
        return found.images - start.images

    def begun() -> Step:
        by_class, embed = real.images.split(s.real), plain.plain(network)
        return plain.descent(start.images, lambda x: plain.dm_gradient(embed, by_class, x), 1.0)

    return Race(ours, begun)


def gradients(s: Sizes) -> Race:
    """A matching step of DC."""
    network = convnet(s)
    real, start = images(s.shape, s.classes, s.real_gm), images(s.shape, s.classes, s.ipc, 1)

    def ours(steps: int, lap: Lap) -> Tensor:
        found = gradient_matching(
            real, networks=FixedNetwork(network), iterations=steps, loops=(1, 1), init=start, batch_real=None,
            callback=lambda _: lap(), progress=False,
        )  # fmt: skip
        return found.images - start.images

    def begun() -> Step:
        by_class, whole = real.images.split(s.real_gm), plain.plain_classifier(network)
        return plain.descent(start.images, lambda x: plain.gm_gradient(whole, by_class, x), 0.1)

    return Race(ours, begun)


def given_gradient(s: Sizes) -> Race:
    """A step towards a given gradient, as FedLGD's server does it."""
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
    """Inversion with a student to disagree with: two steps of Adam."""
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
    """The accuracy of a network, whose labels are what PyTorch's layers say, so that it is 1 up to rounding."""
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
    """The private step of `image_sgd` (FedDM)."""
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
            for rows in image_gradients(synthetic, network.features, embedding, data[1]):
                way.add([rows])
            found = way.take()[0]
            lap()
        return found

    def begun() -> Step:
        step, sigmas = plain.private_images(plain.plain(network), synthetic, *data, clip=1.0), noises()
        return lambda: step(next(sigmas))

    return Race(ours, begun)


def noises() -> Iterator[float]:
    """None first, then the clip."""
    return (float(n > 0) for n in count())


def mean_steps(s: Sizes) -> Race:
    """A step of `fit_to_means`, on class means that were released."""
    network, like = convnet(s, s.private_width).requires_grad_(False), images(s.shape, s.classes, s.ipc, 1)
    maps = PublicMaps(FixedNetwork(network), 1, like=like)
    synthetic = like.images.unflatten(0, (s.classes, s.ipc))
    with torch.no_grad():
        target = maps[0](torch.randn(s.classes, *s.shape, generator=derive(4)))

    def ours(laps: int, lap: Lap) -> Tensor:
        for _ in range(laps):
            found = map_gradient(synthetic, maps, 0, target)
            lap()
        return found

    center = maps[0].center
    assert center is not None
    embed = plain.plain(network)
    return Race(ours, lambda: partial(plain.means_gradient, embed, center, target, synthetic))


def private_training(s: Sizes) -> Race:
    """The gradient of a step of `train_private`."""
    network = convnet(s, s.private_width).train()
    data = torch.randn(s.records, *s.shape, generator=derive(3)), torch.arange(s.records) % s.classes
    public = torch.randn(6, *s.shape, generator=derive(1)), torch.arange(6) % s.classes
    chunk, sizes = examples_at_once(data[0], s.records, None)
    parameters = list(network.parameters())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x), y, reduction="none")

    def ours(laps: int, lap: Lap) -> Tensor:
        with per_example_gradients(network, losses, public=public, chunk=chunk, sizes=sizes) as rows_for:
            for n in range(laps):
                private = PrivateGradient(
                    parameters, sigma=float(n > 0), clip=1.0, denominator=s.records, secret=Secret()
                )
                for x, y in zip(data[0].split(chunk), data[1].split(chunk)):
                    private.add(rows_for(x, y))
                found = plain.flat(private.take())
                lap()
        return found

    def begun() -> Step:
        step, sigmas = plain.opacus(plain.plain_classifier(convnet(s, s.private_width)), *data), noises()
        return lambda: step(next(sigmas))

    def noted(convolutions: Convolutions) -> None:
        with per_example_gradients(network, losses, public=public, chunk=chunk, sizes=sizes) as rows_for, convolutions:
            for x, y in zip(data[0].split(chunk), data[1].split(chunk)):
                rows_for(x, y)

    return Race(ours, begun, noted)


# Federated rounds.


def rounds(method: Method, clients: list[LabeledImages], number: int, lap: Lap, workers: int = WORKERS) -> Tensor:
    """How far the model has come after so many rounds."""
    run = simulate(method, clients, rounds=number, workers=workers, on_round=lambda _: lap(), progress=False)
    first = method.networks.first("", clients[0].num_classes, 0)  # type: ignore[attr-defined]
    model = run.models[""]
    return plain.flat(list(model.parameters())) - plain.flat([first[n] for n, _ in model.named_parameters()])


def noting(method: type[Method], convolutions: Convolutions) -> type[Method]:
    """The same method, whose convolutions are noted wherever it works."""

    class Noting(method):  # type: ignore[valid-type,misc]
        def local(self, client: Client, message: Message) -> Message:
            with convolutions:
                return super().local(client, message)  # type: ignore[no-any-return]

        def receive(self, server: Server, replies: Reduced) -> None:
            with convolutions:
                super().receive(server, replies)

    return Noting


def averaging(s: Sizes, kind: str, *, layers: bool = False) -> Race:
    """A round of FedAvg; beside the bare loop on the same network, or on one of PyTorch's own layers."""
    shape = (1, 28, 28) if kind == "lenet" else s.shape
    number, each = getattr(s, kind)
    options: dict[str, Any] = {"lr": 0.01, "batch": s.batch}

    def factory(classes: int) -> nn.Module:
        return LeNet(shape, classes) if kind == "lenet" else ConvNet(shape, classes, width=s.width)

    clients = []
    for k in range(number):
        pixels = torch.randn(each, *shape, generator=derive(5, k))
        labels = torch.randint(s.classes, (each,), generator=derive(6, k))
        clients.append(LabeledImages(pixels, labels, num_classes=s.classes, normalization=IDENTITY))
    method = FedAvg(factory=factory, **options)

    def begun() -> Step:
        model = factory(s.classes)
        model.load_state_dict(method.networks.first("", s.classes, 0))
        threads = pool_of(WORKERS, "plain")
        return plain.fedavg(plain.plain_classifier(model) if layers else model, clients, **options, pool=threads)

    def noted(convolutions: Convolutions) -> None:
        rounds(noting(FedAvg, convolutions)(factory=factory, **options), clients, 1, lambda: None, workers=1)

    return Race(lambda n, lap: rounds(method, clients, n, lap), begun, noted)


def condensing(s: Sizes) -> Race:
    """A round of FedDM: two matching steps of each client, five passes of the server."""
    number, each = s.condensing
    clients = [images(s.shape, s.classes, each, 7, k) for k in range(number)]
    options: dict[str, Any] = {"ipc": s.ipc, "steps": 2, "batch_real": each, "server_epochs": 5, "rho": 5.0}

    def factory(classes: int) -> nn.Module:
        return ConvNet(s.shape, classes, width=s.width)

    method = FedDM(factory=factory, **options)

    def begun() -> Step:
        model = factory(s.classes)
        model.load_state_dict(method.networks.first("", s.classes, 0))
        return plain.feddm(
            model, clients, ipc=s.ipc, steps=2, rho=5.0, epochs=5, batch=256, pool=pool_of(WORKERS, "plain")
        )

    def noted(convolutions: Convolutions) -> None:
        rounds(noting(FedDM, convolutions)(factory=factory, **options), clients, 1, lambda: None, workers=1)

    return Race(lambda n, lap: rounds(method, clients, n, lap), begun, noted)


ROWS = (
    Row("DM step, one thread", matching, target=0.47, share=0.65),
    Row("DM step, two threads", matching, by="wall", target=0.44, threads=2),
    Row("FedLGD refinement, cached means", partial(matching, cache=True), target=0.12, of=100),
    Row("DC step", gradients, target=0.70),
    Row("gradient matching to a given gradient", given_gradient),
    Row("inversion, two steps", inversion),
    Row("private images, a step", image_steps),
    Row("private class means, a step", mean_steps),
    Row("DP-SGD step beside Opacus alone", private_training),
    Row("FedAvg round, LeNet, beside the bare loop", partial(averaging, kind="lenet"), target=1.05),
    Row("FedAvg round, ConvNet, beside the bare loop", partial(averaging, kind="convnet"), target=1.03),
    Row("FedAvg round, ConvNet, beside PyTorch's layers", partial(averaging, kind="convnet", layers=True)),
    Row("FedDM round", condensing, within=0.05),
    Row("evaluation", testing),
)
"""`matching` counts all of a step; FedLGD's means are computed once for 100 steps, as it refines. A round
of FedDM trains on images that differ by rounding, which every step of it multiplies."""
