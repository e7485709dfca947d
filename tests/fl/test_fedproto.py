"""FedProto against its algorithm in NumPy, with absent classes and several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.augment import DSA
from distillkit.condense import distribution_matching
from distillkit.networks import RandomNetworks, build
from distillkit.rng import derive
from fl import Classification, Client, ClientData, FedAvg, Message, MultiLabel, simulate
from fl.addons import Condensed
from fl.methods import FedProto
from fl.networks import embedding_size
from tests.fl import linear
from tests.fl.federations import Tiny, federation, images, with_label_rows
from tests.fl.invariances import assert_same
from tests.refused import refused

LABELS = [np.array([0, 1, 1]), np.array([1, 1]), np.array([0, 2, 0, 0])]


class Linear(nn.Module):
    """Embedding z = x W, logits z V: eight weights."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.w = nn.Linear(2, 2, bias=False)
        self.classifier = nn.Linear(2, outputs, bias=False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.w(x.flatten(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def clients(classes: int = 3) -> list[LabeledImages]:
    return [
        LabeledImages(torch.tensor(x, dtype=torch.float32).view(-1, 1, 1, 2), torch.tensor(y), num_classes=classes)
        for x, y in zip(linear.XS, LABELS)
    ]


@pytest.mark.golden("FedProto", source="Tan et al., AAAI 2022, Algorithm 1; the distance per image as in its release")
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_rounds_follow_algorithm_1(weights: Any, decay: float) -> None:
    """theta stacks W and V (rows are outputs, as in nn.Linear); class 3 has no owner."""
    lam, momentum = 0.6, 0.5
    method = FedProto(
        factory=Linear, lam=lam, lr=0.1, momentum=momentum, weight_decay=decay, epochs=2, batch=8, weights=weights
    )
    result = simulate(method, clients(4), rounds=4, participation=2, progress=False)
    drawn = build(lambda: Linear(4), derive(0, 0, "server", "init "))
    start = np.concatenate([p.detach().double().numpy() for p in drawn.parameters()])
    own = [start.copy() for _ in LABELS]
    prototypes, known = np.zeros((4, 2)), np.zeros(4, bool)
    for row in result.rows:
        sums, totals = np.zeros((4, 2)), np.zeros(4)
        for k in row["drawn"]:
            x, y = linear.XS[k], LABELS[k]

            def loss(theta: Any, x: Any = x, y: Any = y, p: Any = prototypes, known: Any = known) -> float:
                z = x @ theta[:2].T
                logits = z @ theta[2:].T
                entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
                counted = known[y]
                distance = ((z - p[y])[counted] ** 2).sum() / max(counted.sum(), 1)
                return float(entropy.mean() + lam * distance + decay / 2 * (theta**2).sum())

            own[k] = linear.descend(loss, own[k], 2, momentum=momentum)
            for c in set(y.tolist()):
                mean, weight = (x @ own[k][:2].T)[y == c].mean(0), (y == c).sum() if weights == "samples" else 1
                sums[c] += weight * mean
                totals[c] += weight
        prototypes = np.where(totals[:, None] > 0, sums / np.maximum(totals, 1)[:, None], prototypes)
        known = known | (totals > 0)
    assert result.server.state[FedProto.prototypes].double().numpy() == pytest.approx(prototypes, abs=3e-6)
    assert result.rows[-1]["prototypes"] == 3
    assert result.server.state[FedProto.known].tolist() == known.tolist() == [True, True, True, False]


def play(rounds: int = 4, predict: Any = "prototype", lam: float = 1.0, **how: Any) -> Any:
    held = [ClientData(c, images(24, 50 + k)) for k, c in enumerate(federation())]
    method = FedProto(factory=lambda k: Tiny(k, norm=True), lam=lam, lr=0.05, batch=6, predict=predict)
    return simulate(method, held, rounds=rounds, participation=3, evaluate="all", progress=False, **how)


def test_only_prototypes_are_sent() -> None:
    run = play(rounds=1)
    row, size = run.rows[0], 3 * 48 * 4
    assert row["up"] == {"FedProto.count": 3 * 3 * 4, "FedProto.means": 3 * size}
    assert row["down"] == {"FedProto.prototypes": 3 * size, "FedProto.known": 3 * 3}
    assert run.models == {}
    assert row["accuracy"] == row["accuracy_personal"]["mean"]


@pytest.mark.parametrize("predict", ["prototype", "classifier"])
def test_clients_improve(predict: Any) -> None:
    assert play(rounds=5, predict=predict).rows[-1]["accuracy"] > 0.8


def test_without_the_distance_training_is_local() -> None:
    """FedAvg with nothing shared: the classifier's accuracy is that of local training."""
    held = [ClientData(images(24, 3), images(60, 9))]
    drawn = build(lambda: Tiny(3), derive(0, 0, "server", "init "))
    proto = FedProto(factory=Tiny, lam=0.0, lr=0.1, momentum=0.0, batch=24, predict="classifier")
    alone = FedAvg(factory=Tiny, initial=drawn.state_dict(), lr=0.1, batch=24)
    rows = [simulate(m, held, rounds=3, progress=False).rows for m in (proto, alone)]
    assert [r["accuracy_personal"]["mean"] for r in rows[0]] == [r["accuracy_clients"]["mean"] for r in rows[1]]


@pytest.mark.parametrize("predict", ["prototype", "classifier"])
def test_prediction_is_the_nearest_known_prototype_or_the_classifiers(predict: Any) -> None:
    net, data = build(lambda: Tiny(3), derive(6)), images(60, 9)
    prototypes = net.features(data.images[:3]).detach()
    memory = Message({FedProto.own: net.state_dict()})
    message = Message({FedProto.prototypes: prototypes, FedProto.known: torch.tensor([True, False, True])})
    client = Client(0, data, data, Classification(3), 2, 0, memory=memory)
    [(name, sums)] = FedProto(factory=Tiny, predict=predict).evaluate(client, message)[FedProto.tested].items()
    far = torch.cdist(net.features(data.images), prototypes) + torch.tensor([0.0, torch.inf, 0.0])
    found = far.argmin(1) if predict == "prototype" else net(data.images).argmax(1)
    assert (name, found.unique().numel() > 1) == ("personal", True)
    wanted = float((found == data.labels).double().mean())
    assert client.task.metrics(sums)["accuracy"] == pytest.approx(wanted)


def test_refusals() -> None:
    networks: dict[str, Any] = {"a": Tiny, "b": lambda k: nn.Sequential(nn.Flatten(), nn.Linear(16, k))}
    several = FedProto(factory=networks, assign=lambda k: "a")
    refused(lambda: simulate(several, federation(), rounds=1), ValueError, "one size to share prototypes")
    rows = [with_label_rows(data) for data in federation()]
    single = FedProto(factory=Tiny)
    refused(lambda: simulate(single, rows, rounds=1, task=MultiLabel(3)), ValueError, "exactly one class per image")


@pytest.mark.golden("Condensed", source="Huang et al., TMLR 2024, section 5.1: FedProto on condensed data")
@pytest.mark.parametrize("participation", [1.0, 2])
def test_on_condensed_data_equals_fedproto_on_these_sets(participation: float | int, tmp_path: Path) -> None:
    """FedLGD's rows for FedProto: each client condenses when first drawn, with its own architecture."""
    real, few = federation()[:3], Condensed(ipc=2, steps=3, refine_steps=0)
    networks = {"a": Tiny, "b": lambda k: Tiny(k, norm=True)}

    def play(clients: list[LabeledImages], **options: Any) -> Any:
        method = FedProto(factory=networks, assign=lambda k: "ab"[k % 2], lr=0.1, batch=4, **options)
        how: dict[str, Any] = {"rounds": 4, "participation": participation, "progress": False, "evaluate": "none"}
        return simulate(method, clients, out=tmp_path / "run" if options else None, **how)

    run = play(real, condensed=few)
    condensed = [
        distribution_matching(
            data, networks=RandomNetworks(lambda k=k: networks["ab"[k % 2]](3)), ipc=2, steps=3, init="statistics",
            augment=DSA(), generator=derive(0, next(r["round"] for r in run.rows if k in r["drawn"]), k, "Condensed",
            "condense"),
        )
        for k, data in enumerate(real)
    ]  # fmt: skip
    assert_same(run, play(condensed))
    plain = play(real)
    assert [r["up"] for r in plain.rows] == [r["up"] for r in run.rows]
    assert not torch.equal(*(r.server.state[FedProto.prototypes] for r in (plain, run)))


def test_embedding_is_that_in_eval_mode() -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)).train()
    assert embedding_size(network, torch.zeros(1, 1, 4, 4)) == 16  # one image has no statistics of a batch


def test_values_of_condensed_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"no global network with which to refine sets: give Condensed\(refine_steps=0\)"
    ):
        FedProto(factory=Tiny, condensed=Condensed())
    refused(lambda: FedProto(factory=Tiny, condensed=Condensed), TypeError, "condensed must be a Condensed")
    assert FedProto(factory=Tiny, condensed=Condensed(ipc=0, selected=())).condensed is None
    assert "Condensed(ipc=2" in repr(FedProto(factory=Tiny, condensed=Condensed(ipc=2, refine_steps=0)))


def test_prototypes_are_means_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch norm and dropout, embeddings differ between the modes."""

    class Dropping(Tiny):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(super().features(x))

    def factory(outputs: int) -> nn.Module:
        net = Dropping(outputs, norm=True)
        net.drop = nn.Dropout(0.5)
        return net

    data, own, nets = images(24, 3), FedProto._network, []
    monkeypatch.setattr(FedProto, "_network", lambda self, client: nets.append(own(self, client)) or nets[-1])
    run = simulate(FedProto(factory=factory, lr=0.05, batch=6), [data], rounds=2, progress=False)
    net = nets[-1].eval()
    with torch.no_grad():
        z = net.features(data.images)
    wanted = torch.stack([z[data.labels == c].mean(0) for c in range(3)])
    assert torch.allclose(run.server.state[FedProto.prototypes], wanted, atol=1e-5)


def test_means_of_a_reply_are_those_of_the_trained_network_in_eval_mode() -> None:
    """With batch norm and dropout, embeddings differ between the modes."""

    def factory(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, outputs))

    data, method, empty = images(24, 3), FedProto(factory=factory, lr=0.05, batch=6), torch.zeros(3, 16)
    client, net = Client(0, data, None, Classification(3), 1, 0), factory(3).eval()
    reply = method.local(client, Message({FedProto.prototypes: empty, FedProto.known: empty[:, 0] > 0}))
    net.load_state_dict(client.memory[FedProto.own])
    wanted = torch.stack([net[:3](data.images[data.labels == c]).mean(0) for c in range(3)])
    assert torch.allclose(reply[FedProto.means], wanted, atol=1e-5)


def test_classes_of_earlier_rounds_stay_known() -> None:
    """One of two clients is drawn in each round, and they share no class."""
    data = images(40, 3)
    halves = [data[data.labels == 0], data[data.labels == 1]]
    before, seen = torch.zeros(3, 48), set()
    for rounds in range(1, 6):
        method = FedProto(factory=Tiny, lr=0.05)
        run = simulate(method, halves, rounds=rounds, participation=1, seed=2, progress=False)
        (drawn,) = run.rows[-1]["drawn"]
        seen.add(drawn)
        state = run.server.state
        assert set(state[FedProto.known].nonzero().flatten().tolist()) == seen
        assert run.rows[-1]["prototypes"] == len(seen)
        assert torch.equal(state[FedProto.prototypes][1 - drawn], before[1 - drawn])
        before = state[FedProto.prototypes]
    assert seen == {0, 1}
