"""Single-image federated learning against its algorithm in NumPy, its traffic, crops and refusals."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distillkit import LabeledImages, Normalization
from distillkit.generate import Patches
from distillkit.rng import derive
from distillkit.select import prune_by_confidence, select
from fl import Classification, FedAvg, NoUsableReply, Run, Server, simulate
from fl.addons import SCAFFOLD, FedAvgM, FedProx, SharedImage
from fl.addons._crops import Crops
from fl.addons._distill import distill, falling_steps, starts_from_average
from fl.averaging.addon import AddOn
from fl.methods import ClippedCrossEntropy, SingleImage
from fl.participants import Interrupted
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.refused import refused

PHOTO = torch.rand(1, 24, 30, generator=derive(0))
SMALL: dict[str, Any] = {"keep": 6, "count": 14, "steps": 3, "batch": 4, "selection": {"clusters": 4}}

# Algorithm 1 in NumPy: images are constant, so that every batch is the same; logits are a x (w_0^2, w_1^2). The squares
# make the mean of the logits another thing than the logits of the mean weights.

LEVEL = 51 / 255  # what the crops of a constant image show
PLAIN = {"rotation": 0.0, "shear": 0.0, "jitter_probability": 0.0}
CLIENTS = [(1.0, 0, 3), (2.0, 1, 1), (1.5, 0, 2)]  # pixel, label, images
START = np.array([0.6, -0.3])


class Scaled(nn.Module):
    """Logits a x (w_0^2, w_1^2) of the mean pixel x."""

    def __init__(self, outputs: int, a: float = 1.0) -> None:
        super().__init__()
        self.a, self.head = a, nn.Linear(1, outputs, bias=False)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.a * images.flatten(1).mean(1, keepdim=True)

    def classifier(self, embedding: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(embedding, self.head.weight**2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def kl_gradient(z: Any, target: Any, clip: float | None) -> Any:
    """Return d/dz of the cross-entropy between `target` and softmax(clipped z)."""
    norm = np.linalg.norm(z)
    long = clip is not None and norm > 1 / clip
    c = clip * z / norm if long else z
    g = np.exp(c) / np.exp(c).sum() - target
    return clip / norm * (g - z * (z @ g) / norm**2) if long else g


def by_hand(
    rounds: int, warm: list[bool], clip: float | None, mu: float, steps: int, scales: dict[str, float], who: list[str]
) -> dict[str, Any]:
    """Compute the clients' two steps of SGD at 0.1 with momentum 0.9, and the server's Adam at 0.05."""
    model = dict.fromkeys(scales, START)
    for number in range(rounds):
        trained, counts = [], [float(n) for _, _, n in CLIENTS]
        for (x, y, _), name in zip(CLIENTS, who):
            w, buffer = model[name].copy(), np.zeros(2)
            for _ in range(2):
                u = scales[name] * x
                buffer = 0.9 * buffer + 2 * u * w * kl_gradient(u * w**2, np.eye(2)[y], clip) + mu * (w - model[name])
                w = w - 0.1 * buffer
            trained.append(w)
        say = [scales[name] * LEVEL * w**2 for w, name in zip(trained, who)]
        mean = np.average(say, axis=0, weights=counts)
        teacher = np.exp(mean) / np.exp(mean).sum()
        for name, a in scales.items():
            mine = [k for k in range(len(CLIENTS)) if who[k] == name]
            w = model[name]
            if warm[number]:
                w = np.average([trained[k] for k in mine], axis=0, weights=[counts[k] for k in mine])
            m, v = np.zeros(2), np.zeros(2)
            for t in range(1, steps + 1):
                g = 2 * a * LEVEL * w * kl_gradient(a * LEVEL * w**2, teacher, clip)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                w = w - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            model = {**model, name: w}
    return model


def constant(x: float, label: int, count: int) -> LabeledImages:
    return LabeledImages(torch.full((count, 1, 4, 4), x), torch.full((count,), label), num_classes=2)


@pytest.mark.golden(
    "SharedImage", "SingleImage", source="Soni, Saeed and Asano, 2024, Algorithm 1; the release's strategy/fed_df.py"
)
@pytest.mark.parametrize(
    ("clip", "scales", "mu"),
    [
        (None, {"": 1.0}, 0.7),
        (2.5, {"": 1.0}, 0.0),
        (2.0, {"": 1.0}, 0.0),
        (None, {"a": 1.0, "b": 3.0}, 0.0),
        (2.5, {"a": 1.0, "b": 3.0}, 0.7),
        (2.0, {"a": 1.0, "b": 3.0}, 0.7),
    ],
)
def test_three_rounds_equal_those_computed_by_hand(clip: float | None, scales: dict[str, float], mu: float) -> None:
    """Rounds 1 and 2 start from the average (rate 1/2), round 3 from the server's own weights."""
    who = ["", "", ""] if "" in scales else ["a", "b", "a"]
    networks = {n: lambda k, a=a: Scaled(k, a) for n, a in scales.items()}
    method = SingleImage(
        torch.full((1, 9, 9), 51, dtype=torch.uint8), FedProx(mu),
        factory=networks if len(scales) > 1 else networks[""], assign=dict(enumerate(who)) if len(scales) > 1 else None,
        initial={f"{n}/head.weight".lstrip("/"): torch.tensor(START).float()[:, None] for n in scales},
        shared={"keep": 5, "count": 5, "rate": 0.5, "steps": 4, "batch": 2, "lr": 0.05, "clip": clip, "crops": PLAIN},
        optimizer="sgd", lr=0.1, momentum=0.9, epochs=2,
    )  # fmt: skip
    run = simulate(method, [constant(*c) for c in CLIENTS], rounds=3, progress=False)
    want = by_hand(3, [True, True, False], clip, mu, 4, scales, who)
    for name, w in want.items():
        got = run.server.state[FedAvg.model][f"{name}/head.weight".lstrip("/")][:, 0].double().numpy()
        assert got == pytest.approx(w, abs=2e-5), name
    assert [row["initialised"] for row in run.rows] == [1, 1, 0]


@pytest.mark.parametrize("masks", [False, True])
def test_best_weights_are_those_after_the_best_scored_step(masks: bool) -> None:
    x, teacher = torch.randn(6, 1, 4, 4, generator=derive(1)), torch.randn(6, 3, generator=derive(2))

    def after(steps: int, **options: Any) -> torch.Tensor:
        net = Tiny(3)
        net.load_state_dict(start)
        student = nn.Sequential(net, nn.Dropout(0.5)) if masks else net
        distill(student, x, teacher, steps=steps, batch=4, lr=0.01, generator=derive(3), **options)
        return net.classifier.bias

    start, asked = Tiny(3).state_dict(), iter([0.1, 0.9, 0.4, 0.5])
    best = after(7, score=lambda net: -1.0 if net.training else next(asked), every=3)  # scored after 1, 3, 6 and 7
    assert torch.equal(best, after(3))
    assert next(asked, None) is None


# Crops: the same bits everywhere.


def server(side: int = 4) -> Server:
    return Server(Classification(3), (1, side, side), Normalization([0.5], [0.25]), 1, 0)


def test_crops_equal_those_of_patches_for_any_first_caller() -> None:
    photo = (255 * PHOTO).round().to(torch.uint8)
    want = (Patches(photo, 3, size=4, count=40, flip=0.5).batch(list(range(40))) - 0.5) / 0.25
    crops = Crops(3, 40, None, {"flip": 0.5})
    orders = [torch.randperm(40, generator=derive(k))[:25] for k in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda order: crops.images(photo, order, server()), orders))
    assert all(torch.equal(one, want[order]) for one, order in zip(found, orders, strict=True))
    assert not torch.equal(crops.images(255 - photo, orders[0], server()), found[0])
    assert torch.equal(crops.images(photo.clone(), orders[0], server()), found[0])
    wide = (Patches(photo, 3, size=6, count=40, flip=0.5).batch(list(range(40))) - 0.5) / 0.25
    given = SharedImage(PHOTO, keep=5, count=40, seed=3, size=6, crops={"flip": 0.5}).source
    for source, side in ((crops, 6), (given, 4), (copy.deepcopy(given), 4)):
        double = replace(server(side), dtype=torch.float64)
        assert torch.equal(source.images(photo, orders[0], double), wide[orders[0]].double())


def test_rendering_stops_with_the_run() -> None:
    stopped = server()
    stopped.stop.set()
    with pytest.raises(Interrupted):
        Crops(0, 9, None, {}).images(PHOTO, torch.arange(9), stopped)


# Selection.


def play(rounds: int = 3, shared: dict[str, Any] | None = None, **options: Any) -> Run:
    held = {"factory": Tiny, "epochs": 1, "batch": 8, "clients": federation(), **options}
    clients, simulation = held.pop("clients"), held.pop("simulation", {})
    method = SingleImage(PHOTO, shared={**SMALL, **(shared or {})}, **held)
    return simulate(method, clients, rounds=rounds, progress=False, **simulation)


@pytest.mark.parametrize("keep", [6, 13])
def test_crops_are_selected_by_confidence_alone_by_default(keep: int) -> None:
    """Section 4.1 removes 90 % by entropy and keeps 5,000 of 50,000, which leaves none for k-means, as released."""
    shared = {**{name: value for name, value in SMALL.items() if name != "selection"}, "keep": keep}
    method = SingleImage(PHOTO, factory=Tiny, epochs=1, shared=shared)
    server = simulate(method, federation(), rounds=1, progress=False).server
    crops = Patches((255 * PHOTO).round().to(torch.uint8), 0, size=4, count=14).batch(list(range(14)))
    net = Tiny(3).eval()
    net.load_state_dict(server.state[FedAvg.model])
    with torch.no_grad():
        logits = net(crops)
    assert server.state[SharedImage.index].tolist() == prune_by_confidence(logits, keep=keep).tolist()


def test_architecture_with_the_best_validation_accuracy_selects() -> None:
    networks = {"plain": Tiny, "norm": lambda k: Tiny(k, norm=True)}
    assign = lambda k: ["plain", "norm"][k % 2]  # noqa: E731
    data = {"validation": images(40, 9)}
    run = play(factory=networks, assign=assign, simulation={"server_data": data, "test": images(40, 9)})
    best = max(run.rows[-1]["accuracy_by"], key=run.rows[-1]["accuracy_by"].get)
    net = run.models[best]
    crops = Patches((255 * PHOTO).round().to(torch.uint8), 0, size=4, count=14).batch(list(range(14)))
    with torch.no_grad():
        embeddings = net.features(crops)
        want = select(
            embeddings, net.classifier(embeddings), keep=6, clusters=4,
            generator=run.server.generator("SharedImage selection"),
        )  # fmt: skip
    assert run.server.state[SharedImage.index].tolist() == want.tolist()


# Traffic.


def test_buffers_are_sent_only_with_the_weights() -> None:
    run = play(rounds=2, shared={"rate": 0.0}, factory=lambda k: Tiny(k, norm=True))
    assert {"FedAvg.buffers", "FedAvg.counters"} <= set(run.rows[0]["up"])
    assert set(run.rows[1]["up"]) == {"FedAvg.samples", "SharedImage.logits"}


def test_initialisations_are_evenly_spaced() -> None:
    rates = (0.0, 0.2, 0.3, 0.5, 0.91, 1.0)
    assert {rate: [t for t in range(1, 13) if starts_from_average(t, rate, 0)] for rate in rates} == {
        0.0: [], 0.2: [5, 10], 0.3: [4, 7, 10], 0.5: [2, 4, 6, 8, 10, 12], 0.91: list(range(2, 12)),
        1.0: list(range(1, 13)),
    }  # fmt: skip


def test_schedule_of_table_4_equals_the_release() -> None:
    """Run in sunnysoni97/single_image_fl at d211367: `int(cosine_annealing_round(500, 250, 30, round, True, 5))`."""
    first = [500, 375, 286, 250, 500, 463, 375, 286, 250, 500, 463]
    assert [falling_steps(500, 250, 5, t) for t in range(1, 12)] == first
    assert [t for t in range(1, 31) if falling_steps(500, 250, 5, t) == 500] == [1, 5, 10, 15, 20, 25, 30]
    assert sum(falling_steps(500, 250, 5, t) for t in range(1, 31)) == 11_281  # "11.3K" in Table 4
    assert [falling_steps(500, 250, 1, t) for t in (1, 2, 3)] == [500, 500, 500]
    run = play(rounds=4, shared={"steps": 9, "least_steps": 2, "rate": 1 / 3, "warm_rounds": 1})
    assert [row["distillation_steps"] for row in run.rows] == [9, 2, 9, 5]
    assert [row["initialised"] for row in run.rows] == [1, 0, 1, 0]
    run = play(rounds=4, shared={"steps": 9, "least_steps": 2, "rate": 0.28, "warm_rounds": 1})
    assert [row["distillation_steps"] for row in run.rows] == [9, 3, 2, 9]
    assert [row["initialised"] for row in run.rows] == [1, 0, 0, 1]


@dataclass(frozen=True)
class Stubborn(AddOn):
    """Client 1 sends weights in every round, or nothing at all."""

    weights: bool

    key = "Z"

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        if local.client.id == 1 and self.weights:
            reply[FedAvg.update] = {n: 100 + u for n, u in update.items()}
        elif local.client.id == 1:
            raise RuntimeError("lost")


# Properties of every add-on, and refusals.


class Weightless(AddOn):
    """Clients report that they have no images."""

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        reply[FedAvg.samples] = 0.0


def test_unrequested_weights_are_refused_by_name() -> None:
    shared = {**SMALL, "rate": 0.0, "warm_rounds": 0}
    lost, stubborn = (
        simulate(SingleImage(PHOTO, a, factory=Tiny, shared=shared, epochs=1), federation(), rounds=2, progress=False)
        for a in (Stubborn(False), Stubborn(True))
    )
    assert_same(lost, stubborn)
    assert [list(row["failed"]) for row in stubborn.rows] == [["1"], ["1"]]
    assert "FedAvg.update is not expected" in stubborn.rows[0]["failed"]["1"]


def test_round_with_zero_total_weight_fails() -> None:
    method = SingleImage(PHOTO, Weightless(), factory=Tiny, shared={**SMALL, "warm_rounds": 0}, epochs=1)
    refused(lambda: simulate(method, federation(), rounds=1, progress=False), NoUsableReply, "all weights")


def test_defaults_are_the_papers_setting() -> None:
    method = SingleImage(PHOTO, factory=Tiny)
    held = method.settings
    assert (held.optimizer.name, held.lr, held.batch, held.phases[0].epochs) == ("adam", 0.01, 512, 40)
    assert held.objective == ClippedCrossEntropy(2.5)
    [shared] = method.addons
    assert isinstance(shared, SharedImage)
    assert (shared.keep, shared.count, shared.rate, shared.steps, shared.lr) == (5000, 50_000, 0.2, 500, 0.005)
    assert shared.selection == {"kmeans_share": 0.0}
    assert SingleImage(PHOTO, factory=Tiny, shared={"clip": None}).settings.objective is None
    assert SingleImage(PHOTO, factory=Tiny, lr=0.3).settings.lr == 0.3
    assert repr(method) != repr(SingleImage(1 - PHOTO, factory=Tiny))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep": 15}, "keep must be at most 14"),
        ({"least_steps": 4}, "least_steps must be at most 3"),
        ({"crops": {"shear": 90.0}}, "shear must be less than 90"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: str) -> None:
    refused(lambda: SharedImage(PHOTO, **{**SMALL, **options}), ValueError, error)


def test_weights_in_every_round_suit_server_steps_and_labels_of_the_loss_are_checked() -> None:
    for other in (FedAvgM(0.9), SCAFFOLD()):
        FedAvg(SharedImage(PHOTO, **SMALL, rate=1.0), other, factory=Tiny)
    for slot in ("scale_update", "aggregate", "server_step", "evaluation_model"):
        addons = SharedImage(PHOTO, **SMALL, rate=0.9), type("Other", (AddOn,), {slot: lambda *_: {}})()
        said = r"Other needs weights .* every round: use SharedImage\(rate=1\) with it, got rate=0.9$"
        refused(lambda a=addons: FedAvg(*a, factory=Tiny), ValueError, said)
    refused(lambda: ClippedCrossEntropy(0.0), ValueError, "max_norm must be greater than 0")
    for labels in (torch.zeros(4), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)):
        refused(
            lambda odd=labels: ClippedCrossEntropy()(torch.ones(4, 3), odd), ValueError, "labels must be class indices"
        )


def test_images_of_another_space_are_refused() -> None:
    wide = LabeledImages(torch.zeros(6, 1, 4, 5), torch.arange(6) % 3, num_classes=3)
    rgb = LabeledImages(torch.zeros(6, 3, 4, 4), torch.arange(6) % 3, num_classes=3)
    for data, error in (
        (wide, "size must be given for images that are not square, such as 4x5"),
        (rgb, "image must have the 3 channels of the clients' images, got 1: convert it"),
    ):
        flat = data.images[0].numel()
        with pytest.raises(ValueError, match=error):
            play(
                clients=[data], factory=lambda k, d=flat: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(d, k))
            )
    said = "returns='best' needs server_data={'validation': ...}, labelled images on the server; or give returns='last'"
    refused(lambda: play(shared={"returns": "best"}), ValueError, "returns='best' needs server_data")
    other = {"server_data": {"other": images(3, 0)}}
    refused(lambda: play(shared={"returns": "best"}, simulation=other), ValueError, said)
