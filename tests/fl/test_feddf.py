"""FedDF against its algorithm in NumPy, and against evaluating the teachers one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distillkit import LabeledImages
from fl import FedAvg, simulate
from fl.addons import FedDF
from fl.addons._distill import distill, validation_accuracy
from fl.averaging.addon import AddOn
from tests.fl import linear
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.fl.reference_problems import wave
from tests.refused import refused

PROXY = np.array([[0.3, 1.2], [-0.8, 0.4], [1.1, -0.9], [0.5, 0.6]])


def proxy() -> LabeledImages:
    return LabeledImages(
        torch.tensor(PROXY, dtype=torch.float32).view(-1, 1, 1, 2), torch.zeros(4, dtype=torch.int64), num_classes=2
    )


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def adam(f: Any, w: Any, steps: int, lr: float, cosine: bool = False, longest: float = np.inf) -> Any:
    first, second, highest = np.zeros_like(w), np.zeros_like(w), lr
    for t in range(1, steps + 1):
        g = linear.numerical_gradient(f, w)
        g = g * min(1.0, longest / np.linalg.norm(g))
        if cosine:
            lr = highest * (1 + np.cos(np.pi * (t - 1) / steps)) / 2
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        w = w - lr * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.golden("FedDF", source="Lin et al., NeurIPS 2020, Algorithm 1, Eq. 3; its release for the schedule")
@pytest.mark.parametrize(("momentum", "participation"), [(0.0, 1.0), (0.9, 2)])
def test_rounds_follow_algorithm_1(momentum: float, participation: float | int) -> None:
    """The teachers' mean logits are unweighted, the student's start is weighted by samples; rates are as released."""
    how = {"participation": participation, "server_data": {"proxy": proxy()}}
    addon = FedDF(steps=4, lr=0.02, gradient_norm=0.002)
    result = linear.run(addon, rounds=3, momentum=momentum, epochs=3, lr=0.3, how=how)
    w = linear.START
    for row in result.rows:
        trained = []
        for k in row["drawn"]:
            trained.append(
                linear.descend(lambda v, k=k: linear.base_loss(k, v), w, 3, lr=0.3, momentum=momentum)  # type: ignore[misc]
            )
        teacher = softmax(sum(PROXY @ v for v in trained) / len(trained))

        def divergence(v: Any, teacher: Any = teacher) -> float:
            return float((teacher * (np.log(teacher) - np.log(softmax(PROXY @ v)))).sum(1).mean())

        average = linear.average(trained, row["drawn"])
        w = adam(divergence, average, 4, 0.02, cosine=True, longest=0.002)
        assert np.abs(w - average).max() > 0.005, "what is told apart is a hundred times the tolerance"
    assert linear.weights(result) == pytest.approx(w, abs=2e-5)


def test_distillation_equals_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 2, at most 9 steps, scored after each. Stops 3 steps after the best, step 3, whose weights are kept.

    The numbers are those of `NoiseKTSolver.distillation` with avg_logits (epfml/federated-learning-public-code,
    FedDF-code/pcode/aggregation/noise_knowledge_transfer.py): two teachers, Adam at 0.05 along a cosine, gradients
    of norms 5.4, 7.0, 13.3 clipped to 5, and these scores as its validation.
    """
    order = torch.tensor([3, 0, 4, 1, 2, 1, 4, 2, 0, 3, 2, 3, 1, 0, 4])
    batches = [part for epoch in order.split(5) for part in epoch.split(2)]
    monkeypatch.setattr(
        "fl.addons._distill.shuffled_indices",
        lambda count, batch, generator, epochs, steps, merge_single, like: iter(batches[:steps]),
    )
    images, scores = 12 * wave((5, 1, 2, 2), 0.3), iter([0.1, 0.4, 0.6, 0.6, 0.5, 0.6, 0.9])
    student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).double()
    student.load_state_dict({"1.weight": wave((3, 4), 0.0), "1.bias": wave((3,), 0.5)})
    teacher = sum(
        scale * (images.flatten(1) @ wave((3, 4), phase).T + wave((3,), 0.5 + phase))
        for phase, scale in ((0.2, 0.5), (0.9, 0.7))
    )
    distill(
        student, images, torch.as_tensor(teacher) / 2, steps=9, batch=2, lr=0.05, generator=torch.Generator(),
        schedule="cosine", gradient_norm=5.0, score=lambda net: next(scores), every=1, patience=3,
    )  # fmt: skip
    assert next(scores) == 0.9
    released = {
        "1.weight": [
            0.1297697985663, 1.12055073933, -0.3882017784914, -1.050539866975, 0.4627456462697, 0.7031682562477,
            -0.6509725512979, -0.5128823521503, 0.7303815643443, 0.3841192071171, -0.8337002757738, -0.1572496064366,
        ],
        "1.bias": [0.6123210630283, 0.7421172420679, -0.8154282136621],
    }  # fmt: skip
    for name, want in released.items():
        assert student.state_dict()[name].flatten().tolist() == pytest.approx(want, rel=0, abs=1e-10)


def test_patience_stops_the_distillation_and_is_recorded() -> None:
    """The student is best at the start: after 300 of 900 steps no score has risen for 200."""
    data = {"proxy": images(6, 99), "validation": images(30, 98)}
    addon = FedDF(steps=900, batch=6, lr=1e-9, returns="best", patience=200)
    rows = [play(a, rounds=1, data=data).rows[0] for a in (addon, FedDF(steps=7, batch=6))]
    assert [row["distillation_steps"] for row in rows] == [300, 7]


def test_validation_counts_the_task_s_outputs_only() -> None:
    data = images(30, 98)
    server = simulate(
        FedAvg(factory=Tiny), federation(), rounds=1, server_data={"validation": data}, progress=False
    ).server
    network = Tiny(5)
    network.classifier.bias.data[3:] = 100.0
    right = (network(data.images)[:, :3].argmax(1) == data.labels).float().mean()
    assert validation_accuracy(server, network) == pytest.approx(float(right))


def clipped(z: Any, norm: float) -> Any:
    """Apply clip_logits of the single image's release (strategy/tools/clipping.py): norms above 1 / s become s."""
    long = np.linalg.norm(z, axis=1, keepdims=True)
    return np.where(long > 1 / norm, norm * z / long, z)


@pytest.mark.golden(
    "FedDF", source="sunnysoni97/single_image_fl at d211367: strategy/fed_df.py, lines 366-375 and 498-502"
)
@pytest.mark.parametrize(("rate", "starts"), [(0.5, [1, 1, 0, 1, 0]), (0.4, [1, 0, 1, 0, 1]), (0.0, [1, 0, 0, 0, 0])])
def test_single_images_feddf_starts_from_the_average_in_some_rounds(rate: float, starts: list[int]) -> None:
    """`server_round <= warm_start_rounds or server_round % interval == 0`, else the last fused model; clipped logits
    (lines 366-375 and 498-502 of the release's strategy/fed_df.py; every client counts alike, as in FedDF)."""
    feddf = FedDF(steps=4, lr=0.05, schedule="constant", gradient_norm=None, rate=rate, clip=2.5)
    result = linear.run(feddf, rounds=5, epochs=3, lr=0.3, how={"server_data": {"proxy": proxy()}})
    w = linear.START
    for warm in starts:
        trained = [linear.descend(lambda v, k=k: linear.base_loss(k, v), w, 3, lr=0.3) for k in range(3)]  # type: ignore[misc]
        teacher = softmax(sum(PROXY @ v for v in trained) / 3)

        def divergence(v: Any, teacher: Any = teacher) -> float:
            return float((teacher * (np.log(teacher) - np.log(softmax(clipped(PROXY @ v, 2.5))))).sum(1).mean())

        w = adam(divergence, linear.average(trained) if warm else w, 4, 0.05)
    assert linear.weights(result) == pytest.approx(w, abs=5e-5)
    assert [row["initialised"] for row in result.rows] == starts


def play(*addons: AddOn, rounds: int = 3, data: Any = None, **how: Any) -> Any:
    method = FedAvg(*addons, factory=lambda k: Tiny(k, norm=True), lr=0.1, momentum=0.5, batch=6)
    data = data or {"proxy": images(30, 99), "validation": images(30, 98)}
    return simulate(
        method, federation(), rounds=rounds, participation=3, server_data=data, seed=5, progress=False, **how
    )


def test_every_architecture_learns_from_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ensemble's logits are the mean over the clients' trained models, including batch statistics."""
    seen: list[Any] = []
    trained: dict[int, Any] = {}

    def record(student: Any, proxy: Any, logits: Any, *, generator: Any, **options: Any) -> int:
        seen.append((logits, generator.initial_seed(), options))
        return 9 - len(seen)

    class Peek(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            trained[local.client.id] = local.at(local.state())

    monkeypatch.setattr("fl.addons._distill.distill", record)
    networks = {"plain": Tiny, "norm": lambda k: Tiny(k, norm=True)}
    options: dict[str, Any] = {
        "steps": 9, "batch": 5, "lr": 0.3, "schedule": "constant", "gradient_norm": 2.0, "clip": 0.4, "patience": 7,
    }  # fmt: skip
    addons = (FedDF(**options, returns="best"), Peek())
    method = FedAvg(*addons, factory=networks, assign=lambda k: "norm" if k % 2 else "plain", lr=0.1)
    data = images(30, 99)
    run = simulate(method, federation(), rounds=1, server_data={"proxy": data, "validation": data}, progress=False)
    want = torch.stack([trained[k](data.images) for k in range(5)]).mean(0)
    assert run.rows[0]["distillation_steps"] == 8
    for name, (logits, seed, given) in zip(networks, seen, strict=True):
        assert torch.allclose(logits, want, atol=1e-5)
        assert seed == run.server.generator(f"FedDF {name}").initial_seed()
        assert given.pop("score").func is validation_accuracy
        assert given.pop("check_running").__name__ == "check_running"
        assert given == {**options, "every": 100}


def test_proxy_of_other_classes_gives_the_same_run() -> None:
    proxy, clients = images(30, 99), [data.replace(class_names=("a", "b", "c")) for data in federation()]
    others = [proxy.replace(labels=proxy.labels + 4, num_classes=7), proxy.replace(class_names=("x", "y", "z"))]
    others += [proxy.replace(labels=proxy.labels // 2, num_classes=2, class_names=("b", "a"), classes_given=False)]
    method = FedAvg(FedDF(steps=2), factory=Tiny)
    want, *found = (
        simulate(method, clients, rounds=1, server_data={"proxy": data}, progress=False) for data in (proxy, *others)
    )
    for run in found:
        assert_same(run, want)


def test_refusals() -> None:
    for option, value in {"rate": 1.5, "clip": 0.0, "gradient_norm": 0.0, "patience": 0}.items():
        refused(lambda o=option, v=value: FedDF(**{o: v}), ValueError, option)  # type: ignore[misc,arg-type]
    refused(lambda: FedDF(patience=100), ValueError, "patience needs returns='best'")
    for slot in ("aggregate", "server_step", "evaluation_model"):
        other = type("Other", (AddOn,), {slot: lambda *_: {}})()
        said = r"Other needs the average in every round: use FedDF\(rate=1\)"
        refused(lambda o=other: FedAvg(FedDF(rate=0.5), o, factory=Tiny), ValueError, said)  # type: ignore[misc]
    said, how = "FedDF needs images on the server: server_data={'proxy': ...}", {"server_data": {"proxy": proxy()}}
    refused(lambda: linear.run(FedDF(), rounds=1), ValueError, said)
    refused(lambda: linear.run(FedDF(returns="best"), rounds=1, how=how), ValueError, "server_data={'validation': ...}")
    refused(lambda: play(FedDF(), data={"other": images(3, 0)}), ValueError, "server_data={'proxy'")
    refused(lambda: play(FedDF(returns="best"), data={"proxy": images(3, 0)}), ValueError, "server_data={'validation'")
