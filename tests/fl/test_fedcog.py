"""FedCOG against its equations: generation schedule, every base method of its paper, and multi-label tasks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization
from distillkit.generate import LatentDecoder, SmallDecoder, invert
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from fl import FedAvg, MultiLabel, simulate
from fl.addons import FedCOG
from fl.averaging.addon import AddOn
from fl.batches import Phase
from tests.fl.federations import Tiny, federation
from tests.fl.invariances import assert_same
from tests.fl.virtual_reference import Small, assert_close, averaged, initial_network, toy, trained
from tests.refused import refused

FEW: dict[str, Any] = {"start_round": 2, "images": 12, "steps": 3, "lr": 0.1}
SKEWED = [[0, 0, 0, 1], [1, 1, 2, 1, 1, 1, 1]]


def train(*addons: AddOn, rounds: int = 3, clients: list[LabeledImages] | None = None, **options: Any) -> Any:
    method = FedAvg(*addons, **{"factory": Tiny, "lr": 0.05, "batch": 6, **options})
    held = clients or [toy_tiny(k) for k in range(4)]
    return simulate(method, held, rounds=rounds, progress=False)


def toy_tiny(seed: int) -> LabeledImages:
    data = federation()[seed]
    return data[data.labels != seed % 3]


@pytest.mark.golden(
    "FedCOG",
    source="Ye et al., ICLR 2024, Eqs. 1-3, appendix A.1.1; rui-ye/FedCOG: gen_utils/generate_image.py and fedcog.py",
)
@pytest.mark.parametrize(
    ("options", "multi"),
    [
        ({}, False), ({}, True), ({"weight": 0.4}, False), ({"weight": 0.4}, True), ({"labels": "hard"}, False),
        ({"labels": "hard"}, True), ({"targets": "uniform"}, True), ({"targets": "uniform", "weight": 0.4}, False),
        ({"decoder": SmallDecoder, "latent": 5}, False), ({"regenerate": True}, False), ({"steps": 0}, False),
        ({"start_round": 1}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("space", [IDENTITY, Normalization((0.3,), (0.5,))], ids=["identity", "shifted"])
def test_rounds_follow_the_equations_and_the_releases_variants(
    options: dict[str, Any], multi: bool, space: Normalization
) -> None:
    """Two skewed clients, whole batches: round 1 plain, in rounds 2 and 3 images from the then global and last local.
    If they are generated in round 1, when clients have no last model, there is no disagreement, which is noted.

    Counts (3, 1, 0): lacking (0, 2, 3), so 12 images are 4 of class 1 and 7 of class 2; N_real 4, N_syn 5. Counts
    (0, 6, 1): lacking (6, 0, 5), so 6 of class 0 and 5 of class 2; N_real 7, N_syn 11.

    Released lines: hard labels are the teacher's argmax (generate_image.py, 146-147). Uniform: every class equally
    often, the weights still by counts (generate_image.py, 74-79; fedcog.py, 24-25). Decoder: betas .5 and .999
    (generate_image.py, 86-91). Regenerated: at step int(n / 2), against the net in training (fedcog.py, 52-55).
    """
    clients = [toy(len(labels), k, labels=labels).replace(normalization=space) for k, labels in enumerate(SKEWED)]
    targets = [torch.tensor([1] * 4 + [2] * 7), torch.tensor([0] * 6 + [2] * 5)]
    if options.get("targets") == "uniform":
        targets = [torch.arange(3).repeat_interleave(4)] * 2
    weights = [(1.0, options["weight"])] * 2 if "weight" in options else [(s, 1 - s) for s in (4 / 9, 7 / 18)]
    if multi:
        clients = [c.replace(labels=F.one_hot(c.labels, 3).float()) for c in clients]
        targets = [F.one_hot(t, 3).float() for t in targets]
    start, task = initial_network(3), MultiLabel(3) if multi else None
    momentum = 0.0 if options.get("regenerate") else 0.5
    how: dict[str, Any] = {**FEW, "disagreement": 20.0, "divergence": "jensen_shannon", **options}
    method = FedAvg(FedCOG(**how, batch=12), factory=Small, initial=start, lr=0.3, momentum=momentum, batch=20, steps=7)
    run = simulate(method, clients, rounds=3, task=task, progress=False)

    def objective(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels) if multi else F.cross_entropy(logits, labels)

    def from_teacher(student: Tensor, teacher: Tensor) -> Tensor:
        if options.get("labels") == "hard":
            return objective(student, (teacher > 0).float() if multi else teacher.argmax(1))
        if multi:
            p, q = teacher.sigmoid(), student.sigmoid()
            return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
        return (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1).mean()

    def local(net: Any, k: int, t: int, before: Any) -> Any:
        teacher, data = copy.deepcopy(net), clients[k]

        def generate(student: Any, purpose: str) -> LabeledImages:
            more: dict[str, Any] = {}
            if "decoder" in options:
                more = {"parametrize": LatentDecoder(lambda: SmallDecoder((1, 2, 2), 5), 5), "betas": (0.5, 0.999)}
            return invert(
                teacher, targets[k], shape=(1, 2, 2), student=student, steps=how["steps"], lr=0.1, disagreement=20.0,
                divergence="jensen_shannon", normalization=space, generator=derive(0, t, k, "FedCOG", purpose), **more,
            )  # fmt: skip

        def on(made: LabeledImages) -> Any:
            def loss(model: Any) -> Tensor:
                taught = from_teacher(model(made.images), made.columns["logits"])
                return weights[k][0] * objective(model(data.images), data.labels) + weights[k][1] * taught

            return loss

        if t < how["start_round"]:
            return trained(net, lambda model: objective(model(data.images), data.labels), 7, 0.3, momentum)
        first = on(generate(before, "generate"))
        if not options.get("regenerate"):
            return trained(net, first, 7, 0.3, momentum)
        halfway = trained(net, first, 3, 0.3)
        return trained(halfway, on(generate(halfway, "generate again")), 4, 0.3)

    net, previous = Small(3), list[Any]([None, None])
    net.load_state_dict(start)
    for t in (1, 2, 3):
        previous = [local(net, k, t, previous[k]) for k in range(2)]
        net = Small(3)
        net.load_state_dict(averaged(previous, [4, 7]))
    assert_close(run.server.state[FedAvg.model], net.state_dict())
    assert not multi or {"accuracy", "loss"} <= set(run.rows[0])
    noted = {"FedCOG.first": 2} if how["start_round"] == 1 else None
    assert [row.get("noted") for row in run.rows] == [noted, None, None]


def test_uniform_targets_work_for_a_balanced_client_with_a_weight() -> None:
    balanced = [toy(6, k, labels=[0, 1, 2, 0, 1, 2]) for k in range(3)]
    plain = train(clients=balanced, factory=Small)
    for targets in ("complement", "uniform"):
        by_counts = train(FedCOG(**FEW, targets=targets), clients=balanced, factory=Small)  # type: ignore[arg-type]
        assert_same(plain, by_counts)
        assert by_counts.rows[-1]["noted"] == {"FedCOG.balanced": 3}
        nothing = [c.replace(labels=torch.zeros(6, 3)) for c in balanced]
        method = FedAvg(FedCOG(**FEW, targets=targets), factory=Small)  # type: ignore[arg-type]
        run = simulate(method, nothing, rounds=2, task=MultiLabel(3), progress=False)
        assert run.rows[-1]["noted"] == {"FedCOG.balanced": 3}
    given = train(FedCOG(**FEW, targets="uniform", weight=1.0), clients=balanced, factory=Small)
    assert "noted" not in given.rows[-1]


@pytest.mark.parametrize("phases", [[Phase(epochs=2), Phase(steps=3, train="classifier.*")], [Phase(steps=1)]])
def test_half_of_the_steps_counts_all_phases(phases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 images in batches of 2: 2 x 3 + 3 = 9 steps, half after 4. Half of one step is 0, as int(1 / 2).

    12 generated images in batches of 5, from the first one again with the new images.
    """
    at: list[int] = []
    sizes: list[int] = []

    class Peek(AddOn):
        def after_step(self, step: Any) -> None:
            sizes.extend(len(batch.images) for batch in step.extra.values())

    def generate(self: Any, local: Any, targets: Any, student: Any, purpose: str) -> Any:
        at.append(local.steps if purpose == "generate again" else -1)
        return original(self, local, targets, student, purpose)

    original = FedCOG._generated
    monkeypatch.setattr(FedCOG, "_generated", generate)
    client = toy(5, 0, labels=[0, 0, 0, 1, 1])
    options: dict[str, Any] = {"clients": [client], "factory": Small, "batch": 2, "phases": phases, "rounds": 2}
    train(FedCOG(**FEW, regenerate=True, batch=5), Peek(), **options)
    assert at == [-1, 4 if len(phases) == 2 else 0]
    at.clear()
    train(FedCOG(**FEW, regenerate=True), **options)
    assert at == [-1, 4 if len(phases) == 2 else 0]
    assert sizes == ([5, 5, 2, 5, 5, 5, 2, 5, 5] if len(phases) == 2 else [5])


def test_refusals() -> None:
    refused(lambda: FedCOG(latent=64), ValueError, "latent=64 belongs to a decoder, but there is none: give one, or")
    refused(lambda: FedCOG(decoder="small"), TypeError, "decoder must be a function of a shape and a length, got str")
    few = FedCOG(start_round=1, images=2, targets="uniform")
    refused(lambda: train(few), ValueError, "targets='uniform' needs images >= 3 classes, got 2")

    class Makes(AddOn):
        def batches(self, local: Any, data: Any, phase: Any) -> Any:
            return 3 * list(local.batches(data, phase, "batches"))

    for options in (FEW, {**FEW, "images": 2}):
        assert not train(FedCOG(**options), Makes()).rows[-1]["failed"]
    said = "needs the number of steps, but Makes makes the batches; give regenerate=False"
    refused(lambda: FedAvg(FedCOG(regenerate=True), Makes(), factory=Tiny), ValueError, said)
