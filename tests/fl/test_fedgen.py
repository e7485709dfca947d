"""FedGen against a simple reference of its two loops, and edge cases."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distillkit.networks import initialize
from distillkit.rng import derive
from fl import FedAvg, Phase, simulate
from fl.addons import FedGen
from fl.addons._latent import LatentGenerator
from fl.averaging.addon import AddOn
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused

SIZES: dict[str, Any] = {"noise": 4, "hidden": 6, "steps": 3, "batch": 8, "lr": 0.05}


def loaded(net: Any, state: Any) -> Any:
    net.load_state_dict(copy.deepcopy(state))
    return net


def client(state: Any, k: int, number: int, generator: Any, seen: Any, alpha: float, beta: float) -> Any:
    """Run two epochs of batches of 6 with both terms."""
    net, data = loaded(Tiny(3), state), federation()[k]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    draws = derive(0, number, k, "FedGen", "")
    order = derive(0, number, k, "batches0")
    for index in (i for _ in range(2) for i in torch.randperm(len(data), generator=order).split(6)):
        x, y = data.images[index], data.labels[index]
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        if generator is not None:
            noise = torch.randn(2, len(y), 4, generator=draws)
            drawn = torch.multinomial(seen, len(y), replacement=True, generator=draws)
            target = net.classifier(generator(y, noise[1])).softmax(1).detach()
            kl = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
            loss = loss + alpha * F.cross_entropy(net.classifier(generator(drawn, noise[0])), drawn) + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@pytest.mark.golden("FedGen", source="zhuangdizhu/FedGen: serverpFedGen.py, train_generator; userpFedGen.py, train")
def test_rounds_follow_the_two_loops() -> None:
    """`update_generator_` of the release's serverpFedGen.py without its student, and `train` of userpFedGen.py."""
    alpha, beta, decay, clients = 0.7, 0.4, 0.5, federation()[:2]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "batch": 6, "epochs": 2}
    method = FedAvg(FedGen(alpha, beta, decay, **SIZES), factory=Tiny, initial=Tiny(3).state_dict(), **options)
    first = simulate(method, clients, rounds=1, progress=False)
    result = simulate(method, clients, rounds=3, progress=False)

    state = method.networks.initial
    assert state is not None
    # The release's counts (userpFedGen.py): `clean_up_counts` sets every label to 1, `train` adds each batch's labels.
    labels = torch.stack([torch.bincount(c.labels, minlength=3) for c in clients]).double()
    counts = 1 + 2 * labels
    shares = counts / counts.sum(0)  # `get_label_weights` (serverpFedGen.py)
    n = labels.sum(1)
    assert bool((labels.sum(0) > 0).all())
    generator, trained = LatentGenerator(3, 4, 6, 48), False
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.05, weight_decay=0.01)
    initialize(generator, derive(0, 0, "server", "FedGen init"))
    for number in (1, 2, 3):
        factor = decay ** (number - 1)
        frozen = copy.deepcopy(generator).eval().requires_grad_(False) if trained else None
        nets = [client(state, k, number, frozen, torch.ones(3), alpha * factor, beta * factor) for k in range(2)]
        state = {
            name: sum(float(w) * net.state_dict()[name].double() for w, net in zip(n / n.sum(), nets)).float()
            for name in nets[0].state_dict()
        }
        draws, trained = derive(0, number, "server", "FedGen"), True
        optimizer.param_groups[0]["lr"] = 0.05 * factor
        for _ in range(3):
            y = torch.multinomial(torch.ones(3), 8, replacement=True, generator=draws)
            noise = torch.randn(8, 4, generator=draws)
            z = generator.train()(y, noise)
            apart = torch.stack([torch.stack([(a - b).square().mean() for b in noise]) for a in noise])
            far = torch.stack([torch.stack([(a - b).abs().mean() for b in z]) for a in z])
            loss = torch.exp(-(apart * far).mean())
            for k, net in enumerate(nets):
                each = F.cross_entropy(net.classifier(z), y, reduction="none")
                loss = loss + (shares[k][y].float() * each).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = (first if number == 1 else result).server.state
        if number != 2:
            for name, value in state.items():
                assert torch.allclose(found[FedAvg.model][name], value, atol=1e-5), (number, name)
            for name, value in generator.state_dict().items():
                assert torch.allclose(found[FedGen.generator][name], value, atol=1e-4), (number, name)
    assert result.rows[-1]["generator_loss"] == pytest.approx(float(loss.detach()), abs=1e-4)


def play(*addons: AddOn, rounds: int = 3, **options: Any) -> Any:
    method = FedAvg(*addons, factory=Tiny, lr=0.1, batch=6, **options)
    return simulate(method, federation(), rounds=rounds, progress=False)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 12}, {"phases": [Phase(2), Phase(steps=9)]}])
def test_sample_limit_applies_to_images_not_to_repeated_reads(length: dict[str, Any]) -> None:
    """`max_samples` bounds images. The steps read each image several times, in the extreme all of one class."""
    held = [images(8, seed=k) for k in range(2)]
    one = [data.replace(labels=torch.full((8,), k)) for k, data in enumerate(held)]
    method = FedAvg(FedGen(**SIZES), factory=Tiny, lr=0.1, batch=6, max_samples=8, **length)
    assert simulate(method, one, rounds=1, progress=False).rows[0]["failed"] == {}


def test_count_beyond_the_steps_capacity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = FedAvg(FedGen(**SIZES), factory=Tiny, lr=0.1, batch=6, max_samples=24, epochs=2)
    after_training = FedGen.after_training

    def claimed(self: FedGen, local: Any, update: Any, reply: Any) -> None:
        after_training(self, local, update, reply)
        if local.client.id == 3:
            reply[self.counts] = torch.full((1, 3), 50.0)

    monkeypatch.setattr(FedGen, "after_training", claimed)
    failed = simulate(method, federation(), rounds=1, progress=False).rows[0]["failed"]
    assert failed == {"3": "FedGen.counts must lie in [0, 49], got 50"}


def test_sends_classifier_generator_and_counts(global_rng_untouched: None) -> None:
    rows = play(FedGen(**SIZES), rounds=2).rows
    weights = (4 + 3) * 6 + 6 + 2 * 6 + 6 * 48 + 48
    statistics = 4 * 2 * 6 + 8
    assert [r["up"]["FedGen.counts"] for r in rows] == [5 * 12, 5 * 12]
    assert set(rows[0]["up"]) == {"FedAvg.samples", "FedAvg.update", "FedGen.counts"}
    assert set(rows[0]["down"]) == {"FedAvg.model"}
    assert rows[1]["down"]["FedGen.generator"] == 5 * (4 * weights + statistics)
    assert rows[1]["down"]["FedGen.seen"] == 5 * 12


def test_generator_learns_the_classifiers_classes() -> None:
    run = play(FedGen(**{**SIZES, "steps": 60}), rounds=6)
    net = loaded(LatentGenerator(3, 4, 6, 48), run.server.state[FedGen.generator]).eval()
    y = torch.arange(3).repeat(20)
    z = net(y, torch.randn(60, 4, generator=torch.Generator().manual_seed(0)))
    assert float((run.models[""].classifier(z).argmax(1) == y).float().mean()) > 0.9


def test_absent_classes_are_never_generated_and_add_no_gradient() -> None:
    clients = [images(12, k).replace(num_classes=5) for k in range(2)]
    run = simulate(FedAvg(FedGen(**SIZES), factory=Tiny, lr=0.1), clients, rounds=2, progress=False)
    assert run.server.state[FedGen.seen].tolist() == [1, 1, 1, 0, 0]


def in_turn(*addons: AddOn, drawn: tuple[int, ...]) -> Any:
    """Return a run that draws one client a round in this order: client 0 has classes 0 and 1, client 1 class 2."""
    data = [images(30, 1), images(30, 2)]
    data = [data[0][data[0].labels < 2], data[1][data[1].labels == 2]]
    method = FedAvg(*addons, factory=Tiny, lr=0.1, batch=6)
    for seed in range(100):
        how: dict[str, Any] = {"rounds": len(drawn), "participation": 0.5, "seed": seed, "progress": False}
        rows = simulate(FedAvg(factory=Tiny, batch=99), data, **how).rows
        if [row["drawn"] for row in rows] == [[k] for k in drawn]:
            return simulate(method, data, **how)
    raise AssertionError("no seed draws the clients in this order")


def test_seen_class_is_generated_in_rounds_without_it() -> None:
    assert in_turn(FedGen(**SIZES), drawn=(0, 0)).server.state[FedGen.seen].tolist() == [1, 1, 0]
    assert in_turn(FedGen(**SIZES), drawn=(0, 1, 1)).server.state[FedGen.seen].tolist() == [1, 1, 1]


def test_unseen_classes_add_no_gradient() -> None:
    """alpha = 0 leaves the KL term, which is zero for client 1 in round 2: its classes are not seen yet."""
    kl = FedGen(0.0, 50.0, **SIZES)
    for drawn, same in (((0, 1), True), ((0, 0), False)):
        states = [in_turn(*addons, drawn=drawn).server.state[FedAvg.model] for addons in ((), (kl,))]
        assert all(torch.equal(states[0][n], states[1][n]) for n in states[0]) == same


def test_batch_of_one_is_refused() -> None:
    refused(lambda: FedGen(batch=1), ValueError, "batch must be at least 2")


def test_frozen_features_named_architectures_and_any_network_are_accepted() -> None:
    """The classifier is found on a network without the split and with all other parameters frozen."""

    def network(outputs: int) -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, outputs))
        net[1].requires_grad_(False)
        return net

    method = FedAvg(FedGen(**SIZES), factory={"only": network}, lr=0.1)
    run = simulate(method, federation(), rounds=2, progress=False)
    assert not run.rows[-1]["failed"]
    assert run.server.state[FedGen.generator]["out.bias"].shape == (5,)


def test_round_without_weights_leaves_the_generator_unchanged() -> None:
    class Silent(AddOn):
        key = "Z"

        def expect(self, server: Any, client: int, schema: Any) -> None:
            schema[FedAvg.update.key] = replace(schema[FedAvg.update.key], optional=True)

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            if local.round > 1:
                del reply[FedAvg.update]

    one, two = (play(FedGen(**SIZES), Silent(), rounds=n) for n in (1, 2))
    for name, value in one.server.state[FedGen.generator].items():
        assert torch.equal(two.server.state[FedGen.generator][name], value)
