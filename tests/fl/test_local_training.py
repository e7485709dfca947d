"""Parts of local training on which personal models are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from distillkit.rng import derive
from fl import Classification, Client, ClientData, ClientOptimizer, FedAvg, Message, simulate
from fl.averaging.addon import AddOn
from fl.batches import Phase
from fl.message import Tensors
from fl.participants import Interrupted
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused


@dataclass(frozen=True)
class Zeros(AddOn):
    """The personal model has zeros as weights with names of this beginning, and the received values elsewhere."""

    names: str = ""

    def personal_model(self, local: Any) -> Tensors:
        return {n: torch.zeros_like(t) for n, t in local.received.items() if n.startswith(self.names)}


@pytest.mark.parametrize("start", ["", "classifier"])
def test_personal_model_is_evaluated_beside_the_global_model(start: str) -> None:
    clients = [ClientData(c, images(30, 40 + k)) for k, c in enumerate(federation())]
    run = simulate(FedAvg(Zeros(start), factory=Tiny, lr=0.2, epochs=3), clients, rounds=2, progress=False)
    zeros = [float((c.test.labels == 0).double().mean()) for c in clients if c.test is not None]
    assert run.rows[-1]["accuracy_personal"]["mean"] == pytest.approx(sum(zeros) / len(zeros))
    assert run.rows[-1]["accuracy_clients"]["mean"] > 0.5


def test_personal_parameters_are_not_sent_and_start_as_drawn() -> None:
    clients, seen = federation(), {}

    class Peek(AddOn):
        def before_training(self, local: Any) -> None:
            seen[local.round, local.client.id] = local.received["classifier.weight"].clone()

    given = torch.full((3,), 0.25)
    method = FedAvg(Peek(), factory=Tiny, personal="classifier.*", initial={"classifier.bias": given}, lr=0.1)
    run = simulate(method, clients, rounds=2, progress=False)
    assert run.rows[0]["down"] == {"FedAvg.model": 5 * 4 * (3 * 9 + 3)}
    drawn = run.server.state[FedAvg.model]
    assert torch.equal(drawn["classifier.bias"], given)
    assert all(torch.equal(seen[1, k], drawn["classifier.weight"]) for k in range(5))
    assert not any(torch.equal(seen[2, k], drawn["classifier.weight"]) for k in range(5))


@pytest.mark.parametrize(("train", "moved"), [("*", 4), ("classifier.*", 2), ("!classifier.*", 2), ("!*", 0)])
def test_phases_include_or_exclude_parameters_by_name(train: str, moved: int) -> None:
    names = ["body.0.weight", "body.0.bias", "classifier.weight", "classifier.bias"]
    assert sum(Phase(train=train).trains(n) for n in names) == moved
    assert not Phase(train="!classifier.*").trains("classifier.bias")


def test_every_phase_trains_in_train_mode() -> None:
    """An add-on may use the network in eval mode before the training or between the phases."""
    modes: list[bool] = []

    class Watching(AddOn):
        needs_previous = True

        def before_training(self, local: Any) -> None:
            local.net.eval()

        def dry_run(self, local: Any) -> None:
            assert local.previous.keys() == local.received.keys()

        def loss(self, step: Any) -> None:
            modes.append(step.local.net.training)

        def after_step(self, step: Any) -> None:
            assert not torch.equal(step.trained["classifier.bias"], step.local.start["classifier.bias"])
            if step.local.steps == 1:  # the last step of the first phase
                step.local.net.eval()

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            assert all(p.grad is None for p in local.net.parameters())
            local.client.stop = Mock(is_set=lambda: True)
            with pytest.raises(Interrupted):
                local.fit(local.state(), self, Phase(1))

    phases = [Phase(steps=2, train="classifier.*"), Phase(steps=2)]
    run = simulate(FedAvg(Watching(), factory=Tiny, phases=phases), federation()[:1], rounds=1, progress=False)
    assert not run.rows[0]["failed"]
    assert modes == [True] * 4


@pytest.mark.parametrize("hook", ["after_step", "before_training"])
def test_training_stops_with_the_run(hook: str) -> None:
    steps: list[int] = []

    def stop(self: AddOn, at: Any) -> None:
        local = getattr(at, "local", at)
        local.client.stop = Mock(is_set=lambda: True)
        if local is at:
            local.fit(local.state(), self, Phase(1))
        steps.append(local.steps)

    method, data = FedAvg(type("Stops", (AddOn,), {hook: stop})(), factory=Tiny, batch=4), federation()[0]
    client, message = Client(0, data, None, Classification(3), 1, 0), Message({FedAvg.model: Tiny(3).state_dict()})
    refused(lambda: method.local(client, message), Interrupted, "^$")
    assert steps == [0] * (hook == "after_step")


def test_dry_run_gets_noise_at_the_first_client_of_each_architecture() -> None:
    class Tries(AddOn):
        needs_previous = True

        def before_training(self, local: Any) -> None:
            local.weight = 0.25

        def dry_run(self, local: Any) -> None:
            start = method.networks.first(local.architecture, 3, 7)
            for name, value in (*local.received.items(), *local.previous.items()):
                assert torch.equal(start[name], value)
            tried.append((local.architecture, local.client.id, local.round, local.lr, local.weight, local.data.shape))
            assert not any(torch.equal(local.data.images[0], data.images[0]) for data in federation())

    tried: list[Any] = []
    options: dict[str, Any] = {"factory": dict.fromkeys("abc", Tiny), "assign": lambda k: "bbaba"[k]}
    options |= {"lr": 0.3, "optimizer": ClientOptimizer(lr_decay=0.5), "personal": "classifier.*"}
    method = FedAvg(AddOn(), Tries(), **options)
    simulate(method, federation(), rounds=1, seed=7, progress=False)
    assert sorted(tried) == [("a", 2, 1, 0.3, 0.25, (1, 4, 4)), ("b", 0, 1, 0.3, 0.25, (1, 4, 4))]


@pytest.mark.parametrize("predict", ["real", "all"])
def test_predictions_are_classes_of_the_task_or_of_all_outputs(predict: Any) -> None:
    class Wider(AddOn):
        extra_outputs = 1

        def personal_model(self, local: Any) -> Tensors:
            return {}

    initial = {"classifier.bias": torch.tensor([0.0, 0.0, 0.0, 99.0])}
    method = FedAvg(Wider(), factory=Tiny, initial=initial, lr=1e-9, predict=predict)
    clients = [ClientData(data, data) for data in federation()]
    row = simulate(method, clients, rounds=1, test=images(9, 9), progress=False).rows[0]
    found = (row["accuracy"], row["accuracy_clients"]["mean"], row["accuracy_personal"]["mean"])
    assert [accuracy > 0 for accuracy in found] == [predict == "real"] * 3


def test_limit_of_an_update_grows_with_the_whole_model() -> None:
    """A hundred times one plus the norm of all weights, or the method's option."""
    weights = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert FedAvg(factory=Tiny).settings.update_limit(weights) == pytest.approx(600.0)
    assert FedAvg(factory=Tiny).settings.update_limit({}) == 100.0
    assert FedAvg(factory=Tiny, max_update_norm=7.0).settings.update_limit(weights) == 7.0


@pytest.mark.parametrize("batch_norm", [False, True])
def test_draws_and_streams_of_an_add_on(batch_norm: bool) -> None:
    """Draws differ between rounds, clients and purposes; a single last image joins a batch if there is batch norm."""
    states, sizes, drawn = dict[tuple[int, int, str], torch.Tensor](), list[list[int]](), list[torch.Tensor]()

    def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn.append(torch.rand((), generator=generator))
        return images

    class Peek(AddOn):
        def before_training(self, local: Any) -> None:
            for purpose in ("", "x"):
                states[local.round, local.client.id, purpose] = local.generator(self, purpose).get_state()
            stream = local.stream(self, local.client.data[:5], batch=4, augment=augment)
            sizes.append([len(next(stream).images) for _ in range(3)])

    layers = [nn.BatchNorm1d(16)] if batch_norm else []
    method = FedAvg(Peek(), factory=lambda outputs: nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, outputs)))
    simulate(method, federation()[:2], rounds=2, seed=3, progress=False)
    assert len(states) == 8
    assert all(torch.equal(state, derive(3, r, k, "Peek", p).get_state()) for (r, k, p), state in states.items())
    assert sizes == [[5, 5, 5] if batch_norm else [4, 1, 4]] * 4
    assert len(torch.stack(drawn).unique()) == 12  # and between batches


def test_networks_of_a_training_have_the_received_or_the_trained_values() -> None:
    """`fit` of an add-on whose key names the draws of the method's own training repeats it."""

    class Twice(AddOn):
        key = "batches0"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            given = {"classifier.bias": torch.ones(3)}
            twin, fresh, phase = local.at(given), local.new_network(), local.settings.phases[0]
            assert twin is local.at(given) is not local.at(dict(given))
            assert (twin.training, fresh.training) == (False, True)
            assert {p.requires_grad for p in twin.parameters()} == {False}
            other = local.fit(local.received, AddOn(), phase)
            for name, value in local.net.state_dict().items():
                received = local.received[name]
                assert torch.equal(twin.state_dict()[name], given.get(name, received)), name
                assert torch.equal(fresh.state_dict()[name], received), name
                assert torch.equal(local.fit(local.received, self, phase)[name], value), name
                assert not torch.equal(received, value), name
                assert torch.equal(other[name], value) == name.endswith("tracked"), name
                if name in local.delta:
                    assert torch.equal(local.delta[name], value - received), name

    method = FedAvg(Twice(), factory=lambda k: Tiny(k, norm=True), momentum=0.9, batch=5, epochs=2)
    assert not simulate(method, federation()[:1], rounds=1, progress=False).rows[0]["failed"]
