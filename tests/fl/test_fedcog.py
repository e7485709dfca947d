"""FedCOG against its equations; what it generates and when; on every base of its paper; multi-label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.generate import invert
from distillkit.rng import derive
from fl import FedAvg, MultiLabel, simulate
from fl.addon import AddOn
from fl.addons import MOON, VHL, FedCOG, Proximal, Scaffold, ServerMomentum
from tests.fl.laws import assert_lawful, assert_same
from tests.fl.small import Tiny, federation
from tests.fl.virtual_twins import Small, assert_close, averaged, beginning, toy, trained

FEW: dict[str, Any] = {"start_round": 2, "images": 12, "steps": 3, "lr": 0.1}
SKEWED = [[0, 0, 0, 1], [1, 1, 2, 1, 1, 1, 1]]


def played(*addons: AddOn, rounds: int = 3, clients: list[LabeledImages] | None = None, **options: Any) -> Any:
    method = FedAvg(*addons, **{"network": Tiny, "lr": 0.05, "batch": 6, **options})
    held = clients or [toy_tiny(k) for k in range(4)]
    return simulate(method, held, rounds=rounds, progress=False)


def toy_tiny(seed: int) -> LabeledImages:
    data = federation()[seed]
    return data[data.labels != seed % 3]


@pytest.mark.golden("FedCOG")
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("weight", [None, 0.4])
def test_rounds_follow_the_equations(multi: bool, weight: float | None) -> None:
    """Two skewed clients, whole batches: round 1 plain, in rounds 2 and 3 images from the then global and last local.

    Counts (3, 1, 0): lacking (0, 2, 3), so 12 images are 4 of class 1 and 7 of class 2; N_real 4, N_syn 5. Counts
    (0, 6, 1): lacking (6, 0, 5), so 6 of class 0 and 5 of class 2; N_real 7, N_syn 11.
    """
    clients = [toy(len(labels), k, labels=labels) for k, labels in enumerate(SKEWED)]
    targets = [torch.tensor([1] * 4 + [2] * 7), torch.tensor([0] * 6 + [2] * 5)]
    shares = [4 / 9, 7 / 18] if weight is None else [1.0, 1.0]
    distilled = [5 / 9, 11 / 18] if weight is None else [weight, weight]
    if multi:
        clients = [c.replace(labels=F.one_hot(c.labels, 3).float()) for c in clients]
        targets = [F.one_hot(t, 3).float() for t in targets]
    start = beginning(3)
    task = MultiLabel(3) if multi else None
    cog = FedCOG(**FEW, weight=weight, disagreement=20.0, divergence="jensen_shannon", batch=11)
    method = FedAvg(cog, network=Small, initial=start, lr=0.3, momentum=0.5, batch=20, steps=6)
    run = simulate(method, clients, rounds=3, task=task, progress=False)

    def objective(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels) if multi else F.cross_entropy(logits, labels)

    def distillation(student: Tensor, teacher: Tensor) -> Tensor:
        if multi:
            p, q = teacher.sigmoid(), student.sigmoid()
            return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
        return (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1).mean()

    net = Small(3)
    net.load_state_dict(start)
    previous: dict[int, Any] = {}
    for t in (1, 2, 3):
        nets = []
        for k, data in enumerate(clients):
            made = None
            if t > 1:
                made = invert(
                    net, targets[k], shape=(1, 2, 2), student=previous[k], steps=3, lr=0.1, disagreement=20.0,
                    divergence="jensen_shannon", generator=derive(0, t, k, "FedCOG", "generate"),
                )  # fmt: skip

            def loss(model: Any, data: Any = data, made: Any = made, k: int = k) -> Tensor:
                own = objective(model(data.images), data.labels)
                if made is None:
                    return own
                return shares[k] * own + distilled[k] * distillation(model(made.images), made.columns["logits"])

            nets.append(trained(net, loss, 6, 0.3, 0.5))
        previous = dict(enumerate(nets))
        net = Small(3)
        net.load_state_dict(averaged(nets, [4, 7]))
    assert_close(run.server.state[FedAvg.model], net.state_dict())
    if multi:
        assert {"accuracy", "loss"} <= set(run.rows[0])


def test_nothing_happens_before_the_start_round_or_with_balanced_classes() -> None:
    assert_same(played(FedCOG(start_round=4)), played())
    balanced = [toy(6, k, labels=[0, 1, 2, 0, 1, 2]) for k in range(3)]
    runs = [played(*addons, clients=balanced, network=Small) for addons in ((FedCOG(**FEW),), ())]
    assert_same(*runs)
    assert [row.get("noted") for row in runs[0].rows] == [None, {"FedCOG.balanced": 3}, {"FedCOG.balanced": 3}]
    assert_same(played(FedCOG(weight=0.0)), played())


def test_a_clients_last_model_is_kept_from_before_the_start_round() -> None:
    run = played(FedCOG(**FEW))
    assert "noted" not in run.rows[1]


def test_a_newcomer_has_nothing_to_disagree_with() -> None:
    """It generates without the term; noted."""
    method = FedAvg(FedCOG(**{**FEW, "start_round": 1}), network=Small, lr=0.1, batch=20, initial=beginning(3))
    client = toy(4, 0, labels=SKEWED[0])
    run = simulate(method, [client], rounds=2, progress=False)
    assert [row.get("noted") for row in run.rows] == [{"FedCOG.first": 1}, None]
    net = Small(3)
    net.load_state_dict(beginning(3))
    targets, generator = torch.tensor([1] * 4 + [2] * 7), derive(0, 1, 0, "FedCOG", "generate")
    made = invert(net, targets, shape=(1, 2, 2), steps=3, lr=0.1, generator=generator)

    def loss(model: Any) -> Tensor:
        student, teacher = model(made.images).log_softmax(1), made.columns["logits"].log_softmax(1)
        distilled = (teacher.exp() * (teacher - student)).sum(1).mean()
        return 4 / 9 * F.cross_entropy(model(client.images), client.labels) + 5 / 9 * distilled

    first = simulate(method, [client], rounds=1, progress=False)
    assert_close(first.server.state[FedAvg.model], trained(net, loss, 1, 0.1).state_dict())


@pytest.mark.parametrize(
    "base",
    [
        (),
        (ServerMomentum(0.9),),
        (Proximal(0.1),),
        (Scaffold(),),
        (MOON(1.0),),
        (VHL(classes=3, options={"width": 8}),),
    ],
    ids=["FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "MOON", "VHL"],
)
def test_it_plugs_into_every_base_and_sends_nothing_more(base: tuple[AddOn, ...]) -> None:
    runs = [played(*base, *cog) for cog in ((), (FedCOG(**FEW),))]
    for row, plain in zip(runs[1].rows, runs[0].rows):
        assert row["failed"] == {}
        assert (row["up"], row["down"]) == (plain["up"], plain["down"])
    bias = [r.server.state[FedAvg.model]["classifier.bias"] for r in runs]
    assert not torch.equal(*bias)


def test_a_multi_label_run_has_the_benchmarks_metrics() -> None:
    clients = [c.replace(labels=F.one_hot(c.labels, 3).float()) for c in federation()]
    method = FedAvg(FedCOG(**FEW), network=Tiny, batch=6)
    run = simulate(method, clients, rounds=3, task=MultiLabel(3), test=clients[0], progress=False)
    names = {f"{k}_{m}" for k in "co" for m in ("precision", "recall", "f1")}
    assert names <= set(run.rows[-1])


def test_the_laws(tmp_path: Path, global_rng_untouched: None) -> None:
    assert_lawful(lambda: [FedCOG(**FEW), Scaffold()], tmp_path)


def test_clients_of_one_class_or_one_image() -> None:
    clients = [toy(3, 0, labels=[1, 1, 1]).replace(num_classes=3), toy(1, 1, labels=[2]), toy(7, 2, labels=SKEWED[1])]
    run = played(FedCOG(**FEW), clients=clients, network=Small)
    assert run.rows[-1]["failed"] == {}


def test_refusals() -> None:
    bad: list[dict[str, Any]] = [
        {"start_round": 0}, {"images": 0}, {"steps": -1}, {"lr": 0.0}, {"disagreement": -1.0}, {"divergence": "kl"},
        {"weight": -1.0}, {"batch": 0},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(ValueError, match=next(iter(options))):
            FedCOG(**options)
