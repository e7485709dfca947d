"""The two parts of FedLGD against plain formulas, its traffic, and federated virtual learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.transcript import read_transcript
from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA, CropFlip
from distillkit.condense import distribution_matching
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.rng import derive
from fl import ClientData, ClientOptimizer, FedAvg, NoUsableReply, RunFolder, simulate
from fl.addons import MOON, SCAFFOLD, Anchors, Condensed, FedAvgM
from fl.aggregation import EntrySpec
from fl.averaging.addon import AddOn
from fl.message import Entry
from fl.methods import FedDM, FedLGD, FedProto
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same
from tests.fl.test_vhl import run_method
from tests.fl.virtual_reference import Small, assert_close, averaged, initial_network, supcon, toy, trained
from tests.refused import refused

FEW: dict[str, Any] = {"ipc": 2, "steps": 3, "refine_steps": 2, "selected": (1, 3)}


# Anchors.


def row_cosine(gradients: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Return Eq. 5 row by row; biases are excluded."""
    terms = []
    for g, t in zip(gradients, targets):
        if g.ndim > 1:
            for a, b in zip(g.flatten(1), t.flatten(1)):
                terms.append(1 - (a @ b) / (a.norm() * b.norm() + 1e-6))
    return torch.stack(terms).sum()


def match_gradients(
    net: nn.Module, images: Tensor, labels: Tensor, target: list[Tensor], steps: int, lr: float, momentum: float
) -> Tensor:
    """Run Eq. 6 by momentum SGD on the pixels."""
    images, velocity = images.clone(), torch.zeros_like(images)
    for _ in range(steps):
        leaf = images.clone().requires_grad_()
        gradients = torch.autograd.grad(F.cross_entropy(net(leaf), labels), list(net.parameters()), create_graph=True)
        velocity = momentum * velocity + torch.autograd.grad(row_cosine(list(gradients), target), leaf)[0]
        images = images - lr * velocity
    return images


def released_mmd(source: Tensor, target: Tensor) -> Tensor:
    """Compute the release's MMD_loss (loss_fn.py, 182-219): all pairs, five widths a factor 2 apart."""
    both = torch.cat([source, target])
    n, m = len(source), len(both)
    distances = (both.unsqueeze(0) - both.unsqueeze(1)).square().sum(2)
    width = distances.detach().sum() / (m**2 - m) / 2 ** (5 // 2)
    kernel = sum(torch.exp(-distances / (width * 2**i)) for i in range(5))
    assert isinstance(kernel, Tensor)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - kernel[:n, n:].mean() - kernel[n:, :n].mean()


@pytest.mark.golden("Anchors", source="Huang et al., TMLR 2024, Eqs. 2-6, Algorithm 1; MMD: ubc-tea/FedLGD, loss_fn.py")
@pytest.mark.parametrize(
    ("joined", "reduction", "weight", "given"),
    [
        (*case, given)
        for case in (("unselected", "mean", 0.3), ("always", "sum", 0.02), ("unselected", "mmd", 0.7))
        for given in ({}, {"momentum": 0.3})
    ],
)
def test_anchors_follow_algorithm_1(joined: Any, reduction: Any, weight: float, given: dict[str, float]) -> None:
    """Two clients, whole batches, a server with momentum, falling rates; rounds 1 and 3 are selected."""
    clients, start = [toy(5, 1), toy(9, 2)], initial_network(3)
    mmd = reduction == "mmd"
    term: dict[str, Any] = {"regulariser": "mmd"} if mmd else {"temperature": 0.2, "reduction": reduction}
    anchors = Anchors(ipc=2, weight=weight, selected=(1, 3), joined=joined, steps=3, lr=0.5, **given, **term)
    run = run_method(
        anchors, FedAvgM(0.7), rounds=4, clients=clients, factory=Small, initial=start, weights="uniform",
        lr=0.2, optimizer=ClientOptimizer(lr_decay=0.9), batch=20, steps=2,
    )  # fmt: skip

    g = torch.randn(6, 1, 2, 2, generator=derive(0, 0, "server", "Anchors"))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    net = Small(3)
    net.load_state_dict(start)
    momentum = {n: torch.zeros_like(t) for n, t in start.items()}
    for t in range(1, 5):
        selected, nets = t in (1, 3), []
        for x, y in clients:
            if joined == "always" or not selected:
                x, y = torch.cat([x, g]), torch.cat([y, labels])

            def loss(model: Any, x: Any = x, y: Any = y, selected: bool = selected, g: Tensor = g) -> Tensor:
                total = F.cross_entropy(model(x), y)
                if selected:
                    return total
                if mmd:
                    return total + weight * released_mmd(model.features(x), model.features(g))
                z, all_labels = torch.cat([model.features(x), model.features(g)]), torch.cat([y, labels])
                count = len(z) if reduction == "sum" else 1
                return total + weight * count * supcon(z, all_labels, 0.2)

            nets.append(trained(net, loss, 2, 0.2 * 0.9 ** (t - 1)))
        mean = averaged(nets, [1, 1])
        update = {n: mean[n] - p.detach() for n, p in net.named_parameters()}
        if selected:
            targets, mu = [-u / (0.2 * 0.9 ** (t - 1)) for u in update.values()], given.get("momentum", 0.5)
            g = match_gradients(net, g, labels, targets, 3, 0.5, mu)
        momentum = {n: 0.7 * momentum[n] + u for n, u in update.items()}
        net.load_state_dict({n: p.detach() + momentum[n] for n, p in net.named_parameters()})
    assert_close(run.server.state[FedAvg.model], net.state_dict(), atol=2e-5)
    assert torch.allclose(run.server.state[Anchors.anchors].images, g, atol=1e-4)
    assert torch.equal(run.server.state[Anchors.anchors].labels, labels)


def test_target_is_the_mean_gradient_at_the_rounds_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 5: (w - mean of w_k) / lr after one step on all data is the gradient at w for any decayed rate."""
    targets = []

    def record(network: nn.Module, images: LabeledImages, target: dict[str, Tensor], **options: Any) -> LabeledImages:
        x, y = toy(9, 2)
        names = [n for n, _ in network.named_parameters()]
        loss = F.cross_entropy(network.train().requires_grad_()(x), y)
        targets.append((target, dict(zip(names, torch.autograd.grad(loss, list(network.parameters()))))))
        return images

    monkeypatch.setattr("fl.addons.anchors.fit_to_gradient", record)
    anchors = Anchors(ipc=1, selected=(1, 2, 3))
    run_method(
        anchors, rounds=4, clients=[toy(9, 2)], factory=Small, lr=0.2, optimizer=ClientOptimizer(lr_decay=0.5), batch=9
    )
    assert len(targets) == 3
    for target, gradient in targets:
        assert_close(target, gradient, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_statistics_are_requested_once_and_averaged_over_owners(whole: bool) -> None:
    """No client has class 2, so its anchors are noise. The mean over clients is uniform, as released."""
    clients = [toy(4, 1, labels=[0, 0, 1, 1]), toy(6, 2, labels=[0] * 6)]
    clients = [c.replace(num_classes=3) for c in clients]
    init: Any = "statistics-whole-set" if whole else "statistics"
    run = run_method(Anchors(ipc=50, init=init, selected=(), weight=0.0), clients=clients, factory=Small, rounds=1)
    found = []
    for x, y in clients:
        rows = [x[y == c].flatten() for c in range(2)]
        share = [len(r) / x.numel() if whole else 1.0 for r in rows]
        means = [float(r.mean()) * s if len(r) else 0.0 for r, s in zip(rows, share)]
        squares = [float(r.square().mean()) * s if len(r) else 0.0 for r, s in zip(rows, share)]
        found.append([(m, (q - m * m) ** 0.5) for m, q in zip(means, squares)])
    (a, a_std), (b, b_std) = ((found[0][0][i] + found[1][0][i]) / 2 for i in (0, 1)), found[0][1]
    unit = torch.randn(3, 50, 1, 2, 2, generator=derive(0, 0, "server", "Anchors"))
    want = torch.cat([a + a_std * unit[0], b + b_std * unit[1], unit[2]])
    assert torch.allclose(run.server.state[Anchors.anchors].images, want, atol=1e-5)
    assert run.rows[0]["setup"]["up"] == {"Anchors.statistics": 2 * 3 * 2 * 4, "Anchors.owned": 2 * 3 * 4}


def test_requests_before_round_1_are_counted_and_in_the_transcript(tmp_path: Path) -> None:
    anchors = Anchors(ipc=2, init="statistics", selected=(), weight=0.0)
    method = FedAvg(anchors, factory=Tiny, lr=0.05, batch=6)
    run = simulate(method, federation(), rounds=1, out=RunFolder(tmp_path / "run", transcript=True), progress=False)
    seen = [message for message in read_transcript(tmp_path / "run") if message.round == 0]
    setup, clients = run.rows[0]["setup"], sorted({message.client for message in seen})
    assert [(s.client, s.direction, s.exchange) for s in seen] == [
        (client, way, "answer") for client in clients for way in ("down", "up")
    ]
    assert len(clients) == len(federation())
    assert setup["down"]["Anchors.anchors:digest"] == 16 * len(clients)  # see `Entry.cached`
    for way, beside in (("up", 0), ("down", 16 * len(clients))):
        values = [value for message in seen if message.direction == way for value in message.values.values()]
        parts = [value.values() if isinstance(value, dict) else value for value in values]  # a set is two tensors
        tensors = [t for part in parts for t in ([part] if isinstance(part, Tensor) else part)]
        assert setup[f"bytes_{way}"] == beside + sum(t.numel() * t.element_size() for t in tensors)
        assert setup[f"bytes_{way}"] == sum(setup[way].values())
    assert setup["failed"] == {}
    assert {message.exchange for message in read_transcript(tmp_path / "run") if message.round == 1} == {"local"}


def test_impossible_statistics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pixel may have 300 times the largest absolute value of the pixels, here -1 to 1, which are black and white."""
    own = [c.renormalize(Normalization((0.5,), (0.5,))) for c in federation()[:2]]
    anchors = Anchors(ipc=1, init="statistics", selected=(), weight=0.0)
    for statistics, owned, said in ((500.0, 1.0, "statistics"), (-500.0, 1.0, "statistics"), (0.5, 1.5, "owned")):

        def answer(self: Anchors, local: Any, reply: Any, values: Any = (statistics, owned)) -> None:
            reply[self.statistics], reply[self.owned] = (torch.full(s, v) for s, v in zip(((3, 2), (3,)), values))

        monkeypatch.setattr(Anchors, "answer", answer)
        refused(lambda: run_method(anchors, clients=own, rounds=1), NoUsableReply, f"Anchors.{said} must lie in")


def test_noise_anchors_ignore_requests_of_other_addons() -> None:
    def answer(self: Any, local: Any, reply: Any) -> None:
        reply[self.said] = 1.0

    def expect_answer(self: Any, server: Any, client: int, schema: Any) -> None:
        schema[self.said.key] = EntrySpec(1.0)

    def loss(self: Any, step: Any) -> None:
        assert len(step.batch_of(anchors).labels) == 9, "more than the method's batch of 6"

    hooks = {"answer": answer, "expect_answer": expect_answer, "loss": loss}
    asking = [type(name, (AddOn,), {"said": Entry[float]("sum"), **hooks})() for name in ("Asking", "Later")]
    anchors = Anchors(ipc=3, selected=())
    runs = [run_method(anchors, *others, rounds=1) for others in ([], asking)]
    assert_same(*runs)
    assert runs[1].rows[0]["setup"]["up"] == {"Asking.said": 5 * 8, "Later.said": 5 * 8}


# Condensed.


def sets(clients: list[LabeledImages], **options: Any) -> list[LabeledImages]:
    return [
        distribution_matching(
            data, networks=RandomNetworks(lambda: Tiny(3)), ipc=2, steps=3, augment=DSA(),
            generator=derive(0, 1, k, "Condensed", "condense"), **{"init": "statistics", **options},
        )
        for k, data in enumerate(clients)
    ]  # fmt: skip


@pytest.mark.golden("Condensed", source="Huang et al., TMLR 2024, section 3.3.1, Algorithm 1, lines 9-20")
@pytest.mark.parametrize("init", [{}, {"init": "noise"}], ids=["statistics", "noise"])
def test_any_method_on_condensed_data_equals_the_method_on_these_sets(init: dict[str, str]) -> None:
    """Bitwise equal, with one class fewer at a client that has two."""
    clients = federation()
    clients[1] = clients[1][clients[1].labels != 1]
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.3, "batch_real": 3, **init}
    condensed = sets(clients, **options)
    assert [len(s) for s in condensed] == [6, 4, 6, 6, 6]
    for addons in ((), (MOON(), SCAFFOLD())):
        got = run_method(Condensed(**{**FEW, **options, "refine_steps": 0}), *addons, clients=clients, rounds=3)
        want = run_method(*addons, clients=condensed, rounds=3)
        for name, value in want.server.state[FedAvg.model].items():
            assert torch.equal(got.server.state[FedAvg.model][name], value)


@pytest.mark.parametrize("own", [False, True])
def test_selected_rounds_refine_with_the_current_global_network(own: bool) -> None:
    clients, seen = federation()[:2], {}

    class Peek(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            seen[local.round, local.client.id] = (local.data, dict(local.start))

    network = Mock(side_effect=lambda: Tiny(3))
    run_method(Condensed(**FEW, **({"factory": network} if own else {})), Peek(), clients=clients, rounds=4)
    assert network.called == own
    for k, data in enumerate(clients):
        first, start = seen[1, k][0], seen[3, k][1]
        assert torch.equal(first.images, sets(clients)[k].images)
        assert torch.equal(seen[2, k][0].images, first.images)
        net = Tiny(3)
        net.load_state_dict(start)
        want = distribution_matching(
            data, networks=FixedNetwork(net), ipc=2, steps=2, init=first, augment=DSA(),
            generator=derive(0, 3, k, "Condensed", "refine"),
        )  # fmt: skip
        assert torch.equal(seen[3, k][0].images, want.images)
        assert not torch.equal(want.images, first.images)
        assert torch.equal(seen[4, k][0].images, want.images)


def test_initial_networks_can_be_given() -> None:
    network = Mock(side_effect=lambda: Tiny(3))
    run_method(Condensed(**FEW, factory=network), clients=federation()[:1])
    assert network.called


# FedLGD.

SMALL: dict[str, Any] = {
    "ipc": 2, "anchors": 2, "condense_steps": 3, "refine_steps": 2, "match_steps": 2, "batch": 6, "lr": 0.05,
}  # fmt: skip


@pytest.mark.golden(
    "FedLGD", source="Huang et al., TMLR 2024, section 5.1: the constants; its halves have goldens of their own"
)
def test_composition_has_the_papers_defaults() -> None:
    method = FedLGD(factory=Tiny)
    condensed, anchors = method.addons[1], method.addons[0]
    assert isinstance(condensed, Condensed)
    assert isinstance(anchors, Anchors)
    assert (condensed.ipc, condensed.steps, condensed.refine_steps, condensed.init) == (50, 10_000, 100, "statistics")
    assert (anchors.ipc, anchors.steps, anchors.weight, anchors.init) == (10, 500, 1.0, "noise")
    assert condensed.selected == anchors.selected == (1, 6, 11, 16, 21, 26, 31, 36, 41, 46, 51)
    held = method.settings
    assert (held.lr, held.batch, held.phases[0].epochs, held.momentum) == (0.01, 32, 1, 0.0)
    assert held.weights == "uniform"


@pytest.mark.parametrize("joined", ["unselected", "always"])
def test_bytes_are_counted_by_entry_and_client(joined: Any, tmp_path: Path) -> None:
    """Rounds 1 and 3 distil. G is sent in the first round that uses it and after each change, and nothing else."""
    method = FedLGD(factory=Tiny, selected=(1, 3), joined=joined, **SMALL)
    held = [ClientData(c) for c in federation()]
    simulate(method, held, rounds=3, out=tmp_path, progress=False)
    run = simulate(method, held, rounds=5, out=tmp_path, resume=True, workers=3, progress=False)
    weights, body = 5 * 4 * (3 * 9 + 3 + 48 * 3 + 3), 5 * 6 * 16 * 4
    bodies = {"unselected": [None, 1, None, 1, 0], "always": [1, 1, 0, 1, 0]}[joined]
    for row, sent in zip(run.rows, bodies):
        want = {"FedAvg.model": weights}
        if sent is not None:
            want |= {"Anchors.anchors:digest": 5 * 16}
        if sent:
            want |= {"Anchors.anchors": body, "Anchors.anchors:labels": 5 * 6 * 8}
        assert row["down"] == want
        assert row["up"] == {"FedAvg.samples": 5 * 8, "FedAvg.update": weights}
        totals = [sum(row[way].values()) for way in ("up", "down")]
        assert [row["bytes_up"], row["bytes_down"]] == totals
        assert row["bytes_by_client"] == {str(k): [total // 5 for total in totals] for k in range(5)}


def test_refusals() -> None:
    assert FedLGD(factory=Tiny, **{**SMALL, "ipc": 0, "anchors": 0}).addons == ()
    for bad, got in (({"reduction": "sum"}, "0.07, reduction='sum'"), ({"temperature": 0.1}, "0.1, reduction='mean'")):
        said = f"belong to regulariser='contrastive': leave them out with 'mmd', got temperature={got}"
        refused(partial(Anchors, regulariser="mmd", **bad), ValueError, said)
    given: dict[str, Any] = {"ipc": 3, "selected": (2,), "init": "real", "batch_real": 6, "augment": None}
    drawn = lambda: Tiny(3)  # noqa: E731
    made = FedLGD(factory=Tiny, condense_steps=4, refine_steps=5, condense_factory=drawn, **given).addons
    assert made[1] == Condensed(steps=4, refine_steps=5, factory=drawn, **given)
    assert FedLGD(factory=Tiny, anchors_lr=30.0).addons[0] == Anchors(lr=30.0)
    assert FedLGD(factory=Tiny, regulariser="mmd").addons[0] == Anchors(regulariser="mmd")


def test_augmentation_for_other_images_is_refused_before_round_1() -> None:
    """It would pad with grey. The same holds for FedDM and for every method on condensed data."""
    crop = CropFlip(Normalization((0.5,), (0.25,)), pad=1)
    few = Condensed(ipc=1, steps=1, refine_steps=0, augment=crop)
    methods = [
        FedAvg(few, factory=Tiny),
        FedAvg(factory=Tiny, augment=crop),
        FedProto(factory=Tiny, condensed=few),
        FedDM(factory=Tiny, ipc=1, steps=1, server_epochs=1, augment=crop),
    ]
    for method in methods:
        with pytest.raises(ValueError, match="augment pads with black for mean"):
            simulate(method, federation(), rounds=1, progress=False)
    own = [c.replace(normalization=crop.normalization) for c in federation()]
    for method in methods:
        assert simulate(method, own, rounds=1, progress=False).rows[0]["failed"] == {}
