"""FedAvg and FedProx against values computed by hand, buffers, tied weights, images of add-ons and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distillkit import LabeledImages
from fl import ClientData, ClientOptimizer, FedAvg, simulate
from fl.addons import FedProx
from fl.averaging.addon import AddOn
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused


class OneWeight(nn.Module):
    """Logits (w x, 0) of the mean pixel x, with a closed-form gradient of the cross-entropy."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).mean(1, keepdim=True)

    def classifier(self, embedding: torch.Tensor) -> torch.Tensor:
        z = self.scale(embedding)
        return torch.cat([z, torch.zeros_like(z)], dim=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def constant(x: float, label: int, count: int) -> LabeledImages:
    return LabeledImages(torch.full((count, 1, 2, 2), x), torch.full((count,), label), num_classes=2)


def weight_after(method: FedAvg, clients: list[LabeledImages], rounds: int = 1) -> float:
    run = simulate(method, clients, rounds=rounds, progress=False)
    return float(run.server.state[FedAvg.model]["scale.weight"])


@pytest.mark.golden("FedAvg", source="McMahan et al., AISTATS 2017, Algorithm 1")
def test_one_round_of_one_weight_equals_the_average_by_hand() -> None:
    """Clients see x = 1, label 0 (3 images) and x = 2, label 1 (1 image); w_0 = 0, full batch, one step, lr .5.

    d CE / dw = x (sigmoid(w x) - [label = 0]); at w = 0: -0.5 and 2 * 0.5 = 1. Steps: +0.25 and -0.5.
    Average by samples: (3 * 0.25 - 1 * 0.5) / 4 = 0.0625; uniform: (0.25 - 0.5) / 2 = -0.125.
    """
    clients = [constant(1.0, 0, 3), constant(2.0, 1, 1)]
    options: dict[str, Any] = {"factory": OneWeight, "initial": {"scale.weight": torch.zeros(1, 1)}, "lr": 0.5}
    assert weight_after(FedAvg(**options), clients) == pytest.approx(0.0625, abs=1e-7)
    assert weight_after(FedAvg(weights="uniform", **options), clients) == pytest.approx(-0.125, abs=1e-7)


def test_steps_with_momentum_weight_decay_and_lr_decay_follow_formulas() -> None:
    clients = [constant(1.0, 0, 2)]
    w, buffer = 0.3, 0.0
    for round_number in (1, 2):
        lr, buffer = 0.5 * 0.8 ** (round_number - 1), 0.0
        for _ in range(2):
            gradient = 1 / (1 + 2.718281828459045**-w) - 1 + 0.01 * w
            buffer = 0.9 * buffer + gradient
            w -= lr * buffer
    method = FedAvg(
        factory=OneWeight, initial={"scale.weight": torch.tensor([[0.3]])},
        lr=0.5, momentum=0.9, optimizer=ClientOptimizer(weight_decay=0.01, lr_decay=0.8), epochs=2,
    )  # fmt: skip
    assert weight_after(method, clients, rounds=2) == pytest.approx(w, abs=1e-6)


@pytest.mark.golden("FedProx", source="Li et al., MLSys 2020, Eq. 2")
def test_proximal_gradient_is_mu_times_the_distance() -> None:
    """The first step has no distance and no pull. In the second the gradient gains mu (w - w_0)."""
    clients = [constant(1.0, 0, 2)]
    w, mu = 0.0, 0.7
    for _ in range(2):
        w -= 0.5 * (1 / (1 + 2.718281828459045**-w) - 1 + mu * w)
    method = FedAvg(
        FedProx(mu), factory=OneWeight, initial={"scale.weight": torch.zeros(1, 1)}, lr=0.5, epochs=2
    )  # fmt: skip
    assert weight_after(method, clients) == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize("name", ["", "small"])
def test_second_name_of_a_layer_changes_no_weight(name: str) -> None:
    """The second name of a layer does not bring back the old weight."""

    def tied(outputs: int) -> nn.Module:
        network = Tiny(outputs)
        network.same = network.classifier
        return network

    where, start = f"{name}/" if name else "", Tiny(3).state_dict()
    several: dict[str, Any] = {"factory": {name: tied, "other": Tiny}, "assign": lambda client: name}
    initial = {f"{where}{n}": t for n, t in start.items()}
    ours = FedAvg(initial=initial, lr=0.5, **several if name else {"factory": tied})
    plain = FedAvg(initial=start, lr=0.5, factory=Tiny)
    run, other = (simulate(method, federation()[:1], rounds=1, progress=False) for method in (ours, plain))
    for n, value in other.server.state[FedAvg.model].items():
        found = [key for key in (n, n.replace("classifier", "same")) if not torch.equal(value, start[n])]
        assert found
        assert all(torch.equal(run.server.state[FedAvg.model][f"{where}{key}"], value) for key in found), n
        assert torch.equal(run.models[name].state_dict()[n], value), n


@pytest.mark.parametrize("rule", ["mean", "local", "drop"])
def test_batch_norm_buffers_follow_their_rule(rule: str) -> None:
    clients, known = federation(), set()

    class Peek(AddOn):
        def before_training(self, local: Any) -> None:
            known.add((local.round, bool(local.received["body.1.running_mean"].any())))

    method = FedAvg(Peek(), factory=lambda k: Tiny(k, norm=True), buffers=rule, batch=6)
    run = simulate(method, clients, rounds=2, test=images(40, 9), progress=False)
    state = run.server.state[FedAvg.model]
    assert state["body.1.num_batches_tracked"].dtype == torch.int64
    assert known == {(1, False), (2, rule != "drop")}
    sent = sum(t.numel() * t.element_size() for t in state.values()) - (2 * 3 * 4 if rule == "local" else 0)
    assert [row["down"] for row in run.rows] == [{"FedAvg.model": 5 * sent}] * 2
    moved = not torch.equal(state["body.1.running_mean"], torch.zeros(3))
    assert moved == (rule == "mean")
    steps = [-(-len(c) // 6) for c in clients]
    assert int(state["body.1.num_batches_tracked"]) == (2 * max(steps) if rule != "drop" else 0)
    assert (run.accuracy_last is None) == (rule != "mean")
    if rule != "mean":
        data, held = {"calibration": images(30, 10)}, [ClientData(c, c[:5]) for c in clients]
        again = simulate(method, held, rounds=2, test=images(40, 9), server_data=data, progress=False)
        assert again.accuracy_last is not None
        names = ("accuracy_clients", "accuracy_personal")
        assert [name in again.rows[1] for name in names] == [rule == "drop", rule == "local"]


class _Dropping(Tiny):
    """Network with dropout before the layer of the estimated statistics."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs, norm=True)
        self.body = nn.Sequential(nn.Dropout(0.5), *self.body)


@pytest.mark.parametrize(
    ("parts", "rules"), [([30], ("local", "local")), ([64, 65], ("local", "drop"))], ids=["one chunk", "two chunks"]
)
def test_estimated_statistics_ignore_dropout_and_use_no_random_numbers(
    parts: list[int], rules: tuple[str, str]
) -> None:
    """The global model is evaluated without dropout, so its statistics are those of passes without dropout.

    They are the mean over chunks of 64 images; a last chunk of one image is merged into the one before.
    """
    data = images(sum(parts), 10)
    states = []
    for seed, rule in enumerate(rules):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run = simulate(
            FedAvg(factory=_Dropping, buffers=rule), federation()[:2], rounds=1, server_data={"calibration": data},
            progress=False,
        )  # fmt: skip
        assert torch.equal(torch.get_rng_state(), before)
        states.append(run.models[""].state_dict())
    seen = run.models[""].body[1](data.images).split(parts)
    norm = "body.2.running_"
    assert torch.allclose(states[0][f"{norm}mean"], sum(part.mean((0, 2, 3)) for part in seen) / len(parts), atol=1e-6)
    assert torch.allclose(states[0][f"{norm}var"], sum(part.var((0, 2, 3)) for part in seen) / len(parts), atol=1e-6)
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_invalid_options_are_refused_when_built() -> None:
    class Slow(AddOn):
        def server_step(self, server: Any, mean: Any) -> Any:
            return mean

    class Fast(Slow):
        def server_step(self, server: Any, mean: Any) -> Any:
            return mean

    with pytest.raises(ValueError, match="Fast and Slow cannot be combined: both fill the slot 'server_step'"):
        FedAvg(Slow(), Fast(), factory=Tiny)
    refused(lambda: FedAvg(FedProx(0.1), FedProx(0.2), factory=Tiny), ValueError, "FedProx is given twice")
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match=f"names that are not empty and hold no '/'.*got '{name}'"):
            FedAvg(factory={name: Tiny, "c": Tiny}, assign={0: name, 1: "c"})
    refused(lambda: FedAvg(factory={"a": Tiny, "b": Tiny}), ValueError, "assign must say")
    with pytest.raises(ValueError, match="initial holds names that the network lacks: nothing"):
        simulate(FedAvg(factory=Tiny, initial={"nothing": torch.zeros(1)}), federation(), rounds=1, progress=False)


def test_dropout_uses_the_clients_own_generator(global_rng_untouched: None) -> None:
    def network(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, outputs))

    runs = [simulate(FedAvg(factory=network), federation(), rounds=2, workers=w, progress=False) for w in (1, 3)]
    for name, value in runs[0].server.state[FedAvg.model].items():
        assert torch.equal(value, runs[1].server.state[FedAvg.model][name])


def test_images_of_add_ons_are_trained_on_in_place_of_and_beside_the_clients_own() -> None:
    """The clients' weights are the sizes of the sets that stand in for their images."""

    class Mine(AddOn):
        def dataset(self, local: Any) -> LabeledImages:
            return local.client.data[: 3 + 2 * local.client.id]

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            assert local.counts.tolist() == local.client.data.counts().tolist()

        def receive(self, server: Any, replies: Any, old: Any) -> None:
            server.notes["weight"] = float(replies.weight(FedAvg.update))

    def more(key: str, rows: slice) -> AddOn:
        return type(key, (AddOn,), {"extra_records": lambda self, local: local.client.data[5:][rows]})()

    clients = federation()[:2]
    options: dict[str, Any] = {"factory": Tiny, "batch": 99, "momentum": 0.9, "epochs": 2}
    method = FedAvg(more("A", slice(0, 2)), more("B", slice(2, None)), Mine(), AddOn(), **options)
    run = simulate(method, clients, rounds=1, progress=False)
    whole = LabeledImages.concatenate([clients[0][:3], clients[0][5:]])
    alone = [simulate(FedAvg(**options), [data], rounds=1, progress=False) for data in (whole, clients[1])]
    for name, value in run.server.state[FedAvg.model].items():
        first, second = (one.server.state[FedAvg.model][name] for one in alone)
        assert torch.allclose(value, (3 * first + 5 * second) / 8, atol=1e-6), name
    assert run.rows[0]["weight"] == 8


def test_weight_of_the_objective_is_a_factor_of_its_gradient() -> None:
    """Half the weight at twice the rate and twice at half are the same bits; a layer without a gradient stays."""

    class Idle(Tiny):
        def __init__(self, outputs: int) -> None:
            super().__init__(outputs)
            self.unused = nn.Linear(2, 2)

    def trained(weight: float) -> dict[str, torch.Tensor]:
        class Weigh(AddOn):
            def before_training(self, local: Any) -> None:
                local.weight = weight

        method = FedAvg(Weigh(), factory=Idle, lr=0.125 / weight, momentum=0.5, batch=5)
        return simulate(method, federation(), rounds=1, progress=False).server.state[FedAvg.model]

    start, plain, *others = FedAvg(factory=Idle).networks.first("", 3, 0), *map(trained, (1.0, 0.5, 2.0))
    for name, value in plain.items():
        assert torch.equal(value, start[name]) == name.startswith("unused"), name
        assert all(torch.equal(value, other[name]) for other in others), name
