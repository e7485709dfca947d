from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from distillkit import LabeledImages
from distillkit.augment import DSA
from distillkit.condense import distribution_matching, initial_images
from distillkit.networks import NetworkBall
from distillkit.networks._dropout import seed_dropout
from distillkit.rng import derive
from fl import Classification, Client, FedAvg, FedDM, Message, MultiLabel, NoUsableReply, Real, Run, simulate
from fl.addons._server_training import train_on_set
from fl.aggregation import AggregatedReplies
from fl.method import Predictor
from fl.methods import FedProto
from fl.participants import Server
from tests.fl.federations import Tiny, federation, images, with_label_rows
from tests.refused import refused

IPC, STEPS, EPOCHS = 2, 3, 4


def condense(data: LabeledImages, model: nn.Module, rho: float, client: int, number: int) -> LabeledImages:
    """Algorithm 1, ClientUpdate: SGD with momentum .5 on the distances of mean embeddings and mean logits (Eq. 8)."""
    seed = int(torch.randint(2**62, (), generator=derive(0, number, client, "images")))
    classes = data.labels.unique().tolist()
    start = initial_images(data, IPC, init="real", classes=classes, generator=derive(seed, "init"))
    images, velocity = start.images, torch.zeros(())
    for step in range(STEPS):
        net = copy.deepcopy(model)
        center = parameters_to_vector(net.parameters()).detach()
        noise = torch.empty(len(center)).normal_(generator=derive(seed, step, "network"))
        vector_to_parameters(center + rho * noise / noise.norm(), net.parameters())
        leaf, distance = images.clone().requires_grad_(), torch.zeros(())
        for c in classes:
            for seen in (net.features, net):
                gap = seen(data.images[data.labels == c]).mean(0) - seen(leaf[start.labels == c]).mean(0)
                distance = distance + gap.square().sum()
        velocity = 0.5 * velocity + torch.autograd.grad(distance, leaf)[0]
        images = images - 0.2 * velocity
    return start.replace(images=images)


def train_server(
    model: nn.Module, sets: list[LabeledImages], counts: Sequence[float], rho: float, weights: str
) -> float:
    """Run the server's SGD on all images at once, momentum .9 and decay .01, inside the ball (section 4.4)."""
    center, velocity, reached = parameters_to_vector(model.parameters()).detach(), torch.zeros(()), 0.0
    for _ in range(EPOCHS):
        losses = [F.cross_entropy(model(s.images), s.labels) for s in sets]
        share: Sequence[float] = counts if weights == "samples" else [len(s) for s in sets]
        loss = sum(n * one for n, one in zip(share, losses)) / sum(share)
        grads = torch.autograd.grad(loss, list(model.parameters()))  # type: ignore[arg-type]
        at = parameters_to_vector(model.parameters()).detach()
        velocity = 0.9 * velocity + parameters_to_vector(grads) + 0.01 * at
        moved = at - 0.3 * velocity - center
        reached = max(reached, float(moved.norm()))
        vector_to_parameters(center + moved * min(1.0, rho / float(moved.norm())), model.parameters())
    return reached


def run(kind: type[FedDM], clients: list[LabeledImages], rounds: int, **options: Any) -> Run:
    method = kind(
        factory=Tiny, ipc=IPC, steps=STEPS, lr=0.2, server_epochs=EPOCHS, server_batch=999, server_lr=0.3,
        server_weight_decay=0.01, **options,
    )  # fmt: skip
    return simulate(method, clients, rounds=rounds, progress=False)


def initial_network() -> Tiny:
    start = run(Real, federation()[:1], rounds=1, rho=1e-12)
    net = Tiny(3)
    net.load_state_dict(start.server.state[FedDM.model])
    return net


@pytest.mark.golden("FedDM", source="Xiong et al., CVPR 2023, Algorithm 1, Eqs. 2, 8 and 9")
@pytest.mark.parametrize(("rho", "weights"), [(5.0, "synthetic"), (0.4, "synthetic"), (5.0, "samples")])
def test_rounds_follow_algorithm_1(rho: float, weights: Any) -> None:
    """Three clients, one of which lacks a class; a small ball stops the server, a large one does not."""
    clients = federation()[:3]
    clients[1] = clients[1][clients[1].labels != 2]
    found, net = run(FedDM, clients, rounds=2, rho=rho, weights=weights), initial_network()
    for number in (1, 2):
        sets = [condense(data, net, rho, k, number) for k, data in enumerate(clients)]
        reached = train_server(net, sets, [len(c) for c in clients], rho, weights)
        assert (reached > rho) == (rho < 1)
    union = found.server.state[FedDM.images]
    assert torch.allclose(union.images, torch.cat([s.images for s in sets]), atol=1e-5)
    for name, value in net.state_dict().items():
        assert torch.allclose(found.server.state[FedDM.model][name], value, atol=1e-5), name


@pytest.mark.golden("Real", source="a control of our own: the private images in place of the learnt ones")
@pytest.mark.parametrize("weights", ["synthetic", "samples"])
def test_real_images_train_the_same_server(weights: Any) -> None:
    """Clients have at most as many images of a class as they may send, so the server receives their data."""
    clients = [data[torch.cat([(data.labels == c).nonzero().flatten()[:IPC] for c in (0, 1)])] for data in federation()]
    found, net = run(Real, clients, rounds=2, rho=5.0, weights=weights), initial_network()
    for _ in (1, 2):
        train_server(net, clients, [len(c) for c in clients], 5.0, weights)
    for name, value in net.state_dict().items():
        assert torch.allclose(found.server.state[FedDM.model][name], value, atol=1e-5), name


@pytest.mark.parametrize("kind", [FedDM, Real])
def test_multi_label_data_are_refused_before_any_client_trains(kind: type[FedDM]) -> None:
    held = [with_label_rows(data) for data in federation()[:2]]
    with pytest.raises(ValueError, match=rf"{kind.__name__} needs exactly one class per image, which MultiLabel\(num"):
        simulate(kind(factory=Tiny), held, task=MultiLabel(3), rounds=1, progress=False)


def test_rounds_without_images_or_weights_are_refused_by_name() -> None:
    clients = federation()[:2]
    done = run(FedDM, clients, rounds=1, weights="samples")
    union = done.server.state[FedDM.images]
    method = FedDM(factory=Tiny, ipc=IPC, weights="samples")
    counts = AggregatedReplies(Message({FedDM.images: union, FedDM.samples: torch.zeros(2)}), {}, {}, [0, 1])
    refused(lambda: method.weigh(counts), NoUsableReply, "all weights of the round's replies are zero")
    with pytest.raises(NoUsableReply, match="no reply of the round holds an image"):
        method.train(done.server, union[:0], torch.zeros(0))


@pytest.mark.parametrize("kind", [FedAvg, FedDM, FedProto])
@pytest.mark.parametrize("test", [None, images(6, seed=1)[:0]], ids=["none", "no images"])
def test_client_without_test_images_reports_no_accuracy(kind: Any, test: LabeledImages | None) -> None:
    """An accuracy over no images would be meaningless."""
    method = kind(factory=Tiny, **({"ipc": IPC} if kind is FedDM else {}))
    client = Client(0, federation()[0], test, Classification(3), 1, 0)
    assert list(method.evaluate(client, Message()).items()) == []


def test_only_images_labels_and_weights_are_sent() -> None:
    clients, weights = federation()[:2], sum(4 * p.numel() for p in Tiny(3).parameters())
    row = run(FedDM, clients, rounds=1, weights="samples").rows[0]
    sent = 2 * 3 * IPC
    assert row["up"] == {"FedDM.images": sent * 16 * 4, "FedDM.images:labels": sent * 8, "FedDM.samples": 2 * 4}
    assert row["down"] == {"FedDM.model": 2 * weights}
    assert row["synthetic_images"] == sent
    assert "FedDM.samples" not in run(FedDM, clients, rounds=1).rows[0]["up"]


@pytest.mark.parametrize("weighted", [False, True])
def test_server_training_weighs_images_alike_in_every_batch(weighted: bool) -> None:
    """The weights have mean 1 over the set, not over a batch: batches of heavy images take longer steps."""
    data, weight = images(11, 3), torch.linspace(0.0, 2.0, 11) if weighted else None
    net, by_hand = Tiny(3), Tiny(3)
    by_hand.load_state_dict(net.state_dict())
    make = lambda n: torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.5)  # noqa: E731
    how: dict[str, Any] = {"epochs": 2, "batch": 4, "dropout": derive(6), "check_running": lambda: None}
    train_on_set(net, data, make(net), order=derive(5), weight=weight, **how)
    sgd, order = make(by_hand), derive(5)
    for _ in range(2):
        for rows in torch.randperm(11, generator=order).split(4):
            sgd.zero_grad()
            each = F.cross_entropy(by_hand(data.images[rows]), data.labels[rows], reduction="none")
            ((each if weight is None else each * weight[rows]).sum() / len(rows)).backward()
            sgd.step()
    for name, value in by_hand.state_dict().items():
        assert torch.allclose(net.state_dict()[name], value, atol=1e-6), name


def test_clients_and_server_use_every_option() -> None:
    """The rounds above have defaults and full batches where this test has values of their own."""
    dropping = lambda k: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, k))  # noqa: E731
    given: dict[str, Any] = {"ipc": 3, "batch_real": 4, "lr": 0.3, "momentum": 0.2, "augment": DSA("flip_scale")}
    given |= {"steps": 3, "match": "embedding", "init": "noise"}
    server_options = {"lr": 0.2, "momentum": 0.3, "weight_decay": 0.1}
    method = FedDM(
        factory=dropping, rho=0.6, server_epochs=2, server_batch=4, project=False, **given,
        **{f"server_{name}": value for name, value in server_options.items()},
    )  # fmt: skip
    data, net = images(20, 1).replace(columns={"place": torch.arange(20)}, info={"made": 1}), dropping(3).eval()
    client = Client(2, data, data, Classification(3), 4, 9)
    message = Message({FedDM.model: copy.deepcopy(net.state_dict())})
    made = distribution_matching(
        data, networks=NetworkBall(net, 0.6), generator=derive(9, 4, 2, "images"), progress=False, **given
    )
    sent = method.local(client, message)[FedDM.images]
    assert torch.equal(sent.images, made.images)
    assert (sent.columns, sent.info, sent.labels.tolist()) == ({}, {}, made.labels.tolist())
    sums = Predictor(net).sums(data, client.task)
    assert torch.equal(method.evaluate(client, message)[FedDM.tested]["global"], sums)
    server = Server(client.task, (1, 4, 4), data.normalization, 3, 9, state=message, round=4)
    seed_dropout(net.train(), derive(9, 4, "server", "dropout"))
    weight, order = torch.linspace(0.5, 1.5, 9), derive(9, 4, "server", "train")
    sgd = torch.optim.SGD(net.parameters(), **server_options)
    for _ in range(2):
        for rows in torch.randperm(9, generator=order).split(4):  # the weights have mean 1 over the set, not a batch
            sgd.zero_grad()
            each = F.cross_entropy(net(sent.images[rows]), sent.labels[rows], reduction="none")
            (each * weight[rows]).mean().backward()
            sgd.step()
    method.train(server, sent, weight)
    assert all(torch.equal(server.state[FedDM.model][name], value) for name, value in net.state_dict().items())
    assert (server.state[FedDM.images], server.notes) == (sent, {"synthetic_images": 9})
    assert method.predictors(server)[""].network.training is False
