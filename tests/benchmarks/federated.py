"""Rounds of the engine, against plain loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distillkit import LabeledImages
from distillkit._utils.threads import create_thread_pool
from distillkit.networks import ConvNet, LeNet
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from fl import Client, FedAvg, FedDM, Message, Method, simulate
from fl.aggregation import AggregatedReplies
from fl.participants import Server
from tests.benchmarks import plain
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.plain import Step
from tests.benchmarks.race import Lap, Race
from tests.benchmarks.sizes import Sizes, images

WORKERS = 2


def rounds(method: Method, clients: list[LabeledImages], number: int, lap: Lap, workers: int = WORKERS) -> Tensor:
    """Return the change of the model after a number of rounds."""
    run = simulate(method, clients, rounds=number, workers=workers, on_round=lambda _: lap(), progress=False)
    first = method.networks.first("", clients[0].num_classes, 0)  # type: ignore[attr-defined]
    model = run.models[""]
    return plain.flat(list(model.parameters())) - plain.flat([first[n] for n, _ in model.named_parameters()])


def noting(method: type[Method], convolutions: Convolutions) -> type[Method]:
    """Return the method with its convolutions recorded wherever it runs."""

    class Noting(method):  # type: ignore[valid-type,misc]
        def local(self, client: Client, message: Message) -> Message:
            with convolutions:
                return super().local(client, message)  # type: ignore[no-any-return]

        def receive(self, server: Server, replies: AggregatedReplies) -> None:
            with convolutions:
                super().receive(server, replies)

    return Noting


def averaging(s: Sizes, kind: str, *, layers: bool = False) -> Race:
    """Race of a FedAvg round against the bare loop on the same network or on PyTorch's layers."""
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
        threads = create_thread_pool(WORKERS, "plain")
        return plain.fedavg(plain.plain_classifier(model) if layers else model, clients, **options, pool=threads)

    def noted(convolutions: Convolutions) -> None:
        rounds(noting(FedAvg, convolutions)(factory=factory, **options), clients, 1, lambda: None, workers=1)

    return Race(lambda n, lap: rounds(method, clients, n, lap), begun, noted)


def condensing(s: Sizes) -> Race:
    """Race of a FedDM round: two matching steps per client, five passes on the server."""
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
            model, clients, ipc=s.ipc, steps=2, rho=5.0, epochs=5, batch=256, pool=create_thread_pool(WORKERS, "plain")
        )

    def noted(convolutions: Convolutions) -> None:
        rounds(noting(FedDM, convolutions)(factory=factory, **options), clients, 1, lambda: None, workers=1)

    return Race(lambda n, lap: rounds(method, clients, n, lap), begun, noted)
