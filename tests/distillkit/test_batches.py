"""Batch norm never meets a batch of one image, in any training loop of the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.inversion import FedAvgUpdate
from distillkit import LabeledImages
from distillkit._utils.batches import batch_indices
from distillkit.condense import distribution_matching, gradient_matching
from distillkit.condense.gradient_matching import InnerTraining
from distillkit.generate import LatentDecoder, SmallDecoder, invert
from distillkit.labels import CutMix, Relabel, stored_soft_labels
from distillkit.networks import RandomNetworks, build
from distillkit.rng import derive
from distillkit.training import Protocol, train
from fl import FedAvg, FedDM, simulate
from fl.addons import Ditto, FedDF
from fl.engine.history import always_failed
from fl.methods import FedProto
from tests.refused import refused


class Pooled(nn.Module):
    """Network whose batch norm has one value per channel and image, like the last stage of a ResNet-18 at 32 pixels."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.fc = nn.Linear(6, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images))


def data(count: int, seed: int = 0) -> LabeledImages:
    labels = torch.arange(count) % 3
    return LabeledImages(torch.rand(count, 2, 4, 4, generator=derive(seed)), labels, num_classes=3)


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(33, 32, [33]), (9, 4, [4, 5]), (10, 4, [4, 4, 2]), (3, 1, [1, 1, 1]), (1, 4, [1])]
)
def test_only_a_last_batch_of_one_image_is_merged(count: int, size: int, sizes: list[int]) -> None:
    order = torch.randperm(count, generator=derive(count))
    merged = batch_indices(order, size, merge_single=True)
    assert [len(part) for part in merged] == sizes
    assert torch.equal(torch.cat(merged), order)
    assert [len(p) for p in batch_indices(order, size, merge_single=False)] == [len(p) for p in order.split(size)]


def fresh() -> nn.Module:
    return build(Pooled, 0)


def teacher() -> nn.Module:
    net = fresh()
    for _ in range(60):
        net.zero_grad()
        nn.functional.cross_entropy(net.train()(data(60).images), data(60).labels).backward()
        with torch.no_grad():
            [p.sub_(p.grad, alpha=0.5) for p in net.parameters() if p.grad is not None]
    return net.eval()


def protocol(**options: Any) -> Protocol:
    return Protocol(epochs=2, batch=4, **options)


def federated(method: Any, **options: Any) -> Any:
    run = simulate(method, [data(n, n) for n in (9, 8)], test=data(6), rounds=2, progress=False, **options)
    assert [row["failed"] for row in run.rows] == [{}, {}]
    return run


LOOPS: dict[str, Callable[[], Any]] = {
    "train": lambda: train(fresh(), data(9), protocol(), progress=False),
    "mix": lambda: train(fresh(), data(9), protocol(mix=CutMix()), progress=False),
    "relabel": lambda: train(fresh(), data(9), protocol(relabel=Relabel(teacher())), progress=False),
    "gradient matching": lambda: gradient_matching(
        data(9), networks=RandomNetworks(Pooled), ipc=3, iterations=1, inner=InnerTraining((2, 2), batch=4),
        progress=False,
    ),
    "FedAvg": lambda: federated(FedAvg(Ditto(), factory=Pooled, batch=4)),
    "FedDF": lambda: federated(
        FedAvg(FedDF(steps=3, batch=4), factory=Pooled, batch=4), server_data={"proxy": data(9)}
    ),
    "FedProto": lambda: federated(FedProto(factory=Pooled, batch=4)),
    "FedDM": lambda: federated(FedDM(factory=Pooled, ipc=3, server_batch=17, steps=1, server_epochs=1)),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_training_ends_whatever_the_size_of_the_last_batch(loop: str) -> None:
    assert LOOPS[loop]() is not None


REFUSED: dict[str, Callable[[], Any]] = {
    "train": lambda: train(fresh(), data(1), protocol(), progress=False),
    "batch=1": lambda: train(fresh(), data(9), Protocol(epochs=1, batch=1), progress=False),
    "distribution matching": lambda: distribution_matching(
        data(9), networks=RandomNetworks(Pooled), classes=[1], ipc=1, steps=1, progress=False
    ),
    "gradient matching": lambda: gradient_matching(
        data(3), networks=RandomNetworks(Pooled), classes=[1], ipc=2, iterations=1, progress=False
    ),
    "distribution matching, one real image": lambda: distribution_matching(
        data(3), networks=RandomNetworks(Pooled), classes=[1], ipc=2, steps=1, progress=False
    ),
    "gradient matching, batch=1": lambda: gradient_matching(
        data(9), networks=RandomNetworks(Pooled), ipc=3, iterations=1, inner=InnerTraining((2, 1), batch=1)
    ),
    "gradient matching, one synthetic image": lambda: gradient_matching(
        data(9), networks=RandomNetworks(Pooled), classes=[1], ipc=1, iterations=1, inner=InnerTraining((2, 1))
    ),
    "decoder": lambda: invert(
        fresh(),
        torch.tensor([1]),
        shape=(2, 4, 4),
        steps=1,
        parametrize=LatentDecoder(lambda: SmallDecoder((2, 4, 4), 4, 4), 4),
    ),
    "invert": lambda: invert(without_statistics(), torch.tensor([1]), shape=(2, 4, 4), steps=1, progress=False),
}


def without_statistics() -> nn.Module:
    net = Pooled()
    net.body[2] = nn.BatchNorm1d(6, track_running_stats=False)
    return net


@pytest.mark.parametrize("call", REFUSED)
def test_a_single_image_is_refused_before_the_start(call: str) -> None:
    refused(REFUSED[call], ValueError, r"batch norm, which cannot normalize a batch of one image")


def test_one_image_is_accepted_where_its_maps_have_several_values() -> None:
    maps = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))
    train(maps, data(1), protocol(), progress=False)


def test_stored_labels_belong_to_the_merged_views_of_every_network() -> None:
    relabel = protocol(relabel=Relabel(teacher(), mix=CutMix()))
    stored = stored_soft_labels(data(9), relabel, generator=3, progress=False)
    for make in (Pooled, lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 3))):
        first, second = (
            train(build(make, 1), data(9), protocol(relabel=labels), generator=3, progress=False)
            for labels in (relabel.relabel, stored)
        )
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_an_attack_replays_the_merged_batches() -> None:
    net, client = fresh().train(), data(9)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    update = FedAvgUpdate.of(net, client.images, client.labels, lr=0.1, batch=4).observed
    for part in (slice(0, 4), slice(4, 9)):
        net.zero_grad()
        nn.functional.cross_entropy(net(client.images[part]), client.labels[part]).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
    for (name, p), sent in zip(net.named_parameters(), update):
        assert torch.allclose(p - start[name], sent, atol=1e-6), name


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_client_that_fails_in_every_round_is_named_once(rounds: int) -> None:
    sets = [data(9), data(1), data(8)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = simulate(FedAvg(factory=Pooled, batch=4), sets, test=data(6), rounds=rounds, progress=False)
    assert [list(row["failed"]) for row in run.rows] == [["1"]] * rounds
    found = [str(one.message) for one in seen if "failed in every round" in str(one.message)]
    assert len(found) == 1
    assert "client 1 failed in every round" in found[0]
    assert "cannot normalize a batch of one image" in found[0]


def test_a_client_that_succeeds_once_is_not_named() -> None:
    rows = [
        {"drawn": [0, 1, 2], "failed": {"1": "a", "2": "b"}},
        {"drawn": [1, 2], "failed": {"2": "c"}},
        {"drawn": None, "failed": {"#1": "d"}},
        {"drawn": [3], "failed": {"3": "e"}},
    ]
    assert always_failed(rows) == {"2": "c", "3": "e"}
