"""DP-SGD on the clients: steps in NumPy, noise, charges and refusals."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distillkit import LabeledImages, privacy
from distillkit.augment import CropFlip
from distillkit.normalization import IDENTITY
from distillkit.privacy import BatchStatistics, BudgetExhausted, Ledger, NotSeparable, PrivacyError, Secret, compose
from distillkit.rng import derive
from fl import ClientData, ClientOptimizer, Entry, FedAvg, NoUsableReply, Run, simulate
from fl.addons import DPSGD, MOON, SCAFFOLD, Anchors, FedNova, FedProx, FineTune
from fl.averaging.addon import AddOn
from fl.batches import Phase
from tests.fl import linear
from tests.fl.federations import Tiny, images
from tests.fl.invariances import assert_same
from tests.fl.test_private_runs import charged_rounds
from tests.refused import refused

DELTA = 1e-5


class Linear(nn.Module):
    """Logits x W^T; the embedding is x."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(2, outputs, bias=False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def secret_of(seed: int, number: int, client: int) -> Secret:
    """Return a client's seeded source of noise in a round."""
    return Secret(int(torch.randint(2**62, (), generator=derive(seed, number, client, "secret"))))


@pytest.mark.golden("DPSGD", source="Abadi et al., CCS 2016, Algorithm 1")
@pytest.mark.parametrize(
    ("clip", "sigma", "momentum", "mu", "gradients"),
    [
        (0.3, 0.7, 0.0, 0.0, "captured"),
        (50.0, 0.01, 0.9, 0.0, "captured"),
        (0.6, 0.7, 0.9, 0.5, "captured"),
        (0.6, 0.7, 0.9, 0.5, "opacus"),
        (0.6, 0.7, 0.9, 0.5, "opacus-ghost"),
    ],
)
def test_rounds_follow_algorithm_1(clip: float, sigma: float, momentum: float, mu: float, gradients: str) -> None:
    rate, size, lr, rounds, epochs = 0.4, 5, 0.1, 3, 2
    dp = DPSGD(sigma=sigma, clip=clip, rate=rate, size=size, chunk=2, gradients=gradients)
    start = {"classifier.weight": torch.tensor(linear.START, dtype=torch.float32)}
    method = FedAvg(
        dp, FedProx(mu), factory=Linear, objective=linear.squares, initial=start, lr=lr, momentum=momentum,
        epochs=epochs, weights="uniform",
    )  # fmt: skip
    result = simulate(method, linear.clients(), rounds=rounds, secret=8, progress=False)
    w, clipped, empty = linear.START, 0, 0
    for number in range(1, rounds + 1):
        trained = []
        for k in range(3):
            secret, here, velocity = secret_of(8, number, k), w.copy(), np.zeros_like(w)
            secret.generator()  # of dropout and augmentation
            for _ in range(round(epochs / rate)):
                drawn = secret.poisson(len(linear.YS[k]), rate).numpy()
                empty += not len(drawn)
                total = np.zeros_like(w)
                for x, y in zip(linear.XS[k][drawn], linear.YS[k][drawn]):
                    grad = np.outer(here @ x - np.eye(2)[y], x)
                    clipped += np.linalg.norm(grad) > clip
                    total += grad * min(1, clip / np.linalg.norm(grad))
                noise = secret.add_noise(torch.zeros(2, 2), sigma * clip).numpy()
                velocity = momentum * velocity + (total + noise) / (rate * size) + mu * (here - w)
                here = here - lr * velocity
            trained.append(here)
        w = np.mean(trained, axis=0)
    assert result.server.state[FedAvg.model]["classifier.weight"].double().numpy() == pytest.approx(w, abs=2e-5)
    assert (clipped > 0) == (clip < 50)
    assert empty


def network(outputs: int) -> nn.Module:
    return Tiny(outputs)


def sequential(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.0), nn.Linear(8, outputs))


SIZE = 9
CLIENTS = [images(SIZE, seed=k) for k in range(3)]


def play(*addons: AddOn, rounds: int = 3, clients: list[Any] | None = None, how: Any = None, **options: Any) -> Run:
    chosen = {"factory": network, "lr": 0.1, "weights": "uniform", "batch": SIZE, **options}
    return simulate(FedAvg(*addons, **chosen), clients or CLIENTS, rounds=rounds, progress=False, **(how or {}))


def noisy(**options: Any) -> DPSGD:
    return DPSGD(**{"sigma": 1.5, "rate": 0.5, "size": SIZE, **options})


SILENT = DPSGD(sigma=0.0, clip=math.inf, rate=1.0, size=SIZE)
BESIDE: dict[str, tuple[list[AddOn], dict[str, Any]]] = {
    "momentum and decay": ([], {"momentum": 0.9, "optimizer": ClientOptimizer(weight_decay=0.01, lr_decay=0.9)}),
    "Adam": ([], {"optimizer": "adam", "lr": 0.01}),
    "a network without the split": ([], {"factory": sequential}),
    "several architectures": ([], {"factory": {"a": network, "b": sequential}, "assign": lambda k: "ab"[k % 2]}),
    "phases": ([], {"phases": [Phase(2, train="classifier.*"), Phase(steps=1, train="!classifier.*")]}),
    "personal parameters": ([], {"personal": "classifier.*"}),
    "SCAFFOLD": ([SCAFFOLD()], {"momentum": 0.5}),
    "MOON, FedProx and FedNova": ([MOON(1.0), FedProx(0.1), FedNova()], {}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_without_noise_clip_and_sampling_equals_full_batch_base(name: str) -> None:
    addons, options = BESIDE[name]
    options = options if "phases" in options else {**options, "epochs": 2}
    base = play(*addons, **options)
    ours = play(*addons, SILENT, **options)
    start = play(*addons, rounds=1, **{**options, "lr": 1e-12})
    for key, value in base.server.state[FedAvg.model].items():
        torch.testing.assert_close(ours.server.state[FedAvg.model][key], value, rtol=1e-4, atol=2e-6)
        if not key.endswith("bias") and "personal" not in options:
            assert not torch.allclose(start.server.state[FedAvg.model][key], value, atol=1e-4), key
    assert ours.rows[-1]["privacy"]["reason"] == "dp_sgd was released without noise"


def wide(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 700), nn.ReLU(), nn.Linear(700, outputs))


@pytest.mark.parametrize("empty", ["client", "batch"])
def test_empty_client_sends_pure_noise_on_every_parameter(empty: str) -> None:
    held = images(3, seed=1)
    rate = 0.25 if empty == "client" else 1e-9
    clients = [held[torch.zeros(0, dtype=torch.int64)] if empty == "client" else held]
    dp = DPSGD(sigma=2.0, clip=0.5, rate=rate, size=8)
    after = play(dp, clients=clients, rounds=1, steps=1, lr=rate, factory=wide).server.state[FedAvg.model]
    before = play(SILENT, rounds=1, lr=1e-30, factory=wide).server.state[FedAvg.model]
    noise = {n: after[n] - before[n] for n in after}
    for name in ("1.weight", "3.weight"):
        assert float(noise[name].std()) == pytest.approx(2.0 * 0.5 / 8, rel=0.05), name
    assert all(float((t != 0).double().mean()) > 0.9 for t in noise.values())  # one in 2^20 lies on the grid's 0


@pytest.mark.parametrize(
    "options", [{"epochs": 2}, {"steps": 3}, {"phases": [Phase(1, train="classifier.*"), Phase(steps=2)]}]
)
def test_every_noise_tensor_and_every_batch_is_accounted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[float] = []
    batches: list[tuple[int, ...]] = []
    add_noise, poisson = Secret.add_noise, Secret.poisson

    def spied(self: Secret, values: torch.Tensor, std: float) -> Any:
        noise.append(std)
        return add_noise(self, values, std)

    def drawn(self: Secret, count: int, rate: float) -> Any:
        batches.append((count, rate, *poisson(self, count, rate).tolist()))
        return torch.tensor(batches[-1][2:], dtype=torch.int64)

    monkeypatch.setattr(Secret, "add_noise", spied)
    monkeypatch.setattr(Secret, "poisson", drawn)
    ledger = Ledger(delta=DELTA)
    play(noisy(clip=0.3), rounds=2, how={"ledger": ledger}, **options)
    charged = sum(e.count for e in ledger.events)
    steps = {"epochs": 4, "steps": 3, "phases": 4}[next(iter(options))]
    assert charged == len(noise) == len(batches) == 2 * 3 * steps
    assert {(e.mechanism, e.sigma, e.rate, e.sampling) for e in ledger.events} == {("dp_sgd", 1.5, 0.5, "poisson")}
    assert set(noise) == {1.5 * 0.3}
    assert {b[:2] for b in batches} == {(SIZE, 0.5)}
    assert len(set(batches)) > len(batches) // 2


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {
            "augment": CropFlip(IDENTITY, pad=1, cutout=2),
            "optimizer": ClientOptimizer(state="client"),
            "momentum": 0.9,
        },
    ],
    ids=["alone", "crops and kept momentum"],
)
def test_epsilon_is_that_of_all_steps_of_one_client(beside: dict[str, Any], tmp_path: Path) -> None:
    """Per-image augmentation, and momentum of noised gradients, are post-processing."""
    run = play(noisy(), rounds=3, steps=4, how={"out": tmp_path}, **beside)
    assert not any(row["failed"] for row in run.rows)
    wanted = [compose([(1.5, 0.5, 4 * n)], DELTA).epsilon for n in (1, 2, 3)]
    assert [row["epsilon"] for row in run.rows] == pytest.approx(wanted)
    few = play(noisy(), rounds=4, steps=4, how={"participation": 1, "seed": 1})
    times = max(sum(k in row["drawn"] for row in few.rows) for k in range(3))
    assert times < 4
    assert few.rows[-1]["epsilon"] == pytest.approx(compose([(1.5, 0.5, 4 * times)], DELTA).epsilon)


def test_budget_stops_the_run_before_the_round_draws_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    uniform = Secret.uniform
    monkeypatch.setattr(Secret, "uniform", lambda self, n: (drawn.append(n), uniform(self, n))[1])
    rows: list[dict[str, Any]] = []
    ledger = Ledger(delta=DELTA, budget=compose([(1.5, 0.5, 6)], DELTA).epsilon)
    with pytest.raises(BudgetExhausted, match="the state after round 2 is kept") as caught:
        play(noisy(), rounds=5, steps=3, how={"ledger": ledger, "on_round": rows.append})
    assert caught.value.remaining == 0
    assert [row["round"] for row in rows] == [1, 2]
    assert charged_rounds(ledger) == {k: [1, 2] for k in range(3)}
    before = len(drawn)
    with pytest.raises(BudgetExhausted):
        play(noisy(), rounds=1, steps=3, how={"ledger": ledger})
    assert len(drawn) == before


def dropping(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, outputs))


def jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.5 * torch.rand(len(x), 1, 1, 1, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"augment": jitter}, {"factory": dropping}, {"momentum": 0.9}])
def test_seeded_run_repeats_with_any_workers_and_has_no_guarantee(
    options: dict[str, Any], tmp_path: Path, global_rng_untouched: None
) -> None:
    def seeded(*addons: AddOn, **how: Any) -> Run:
        return play(noisy(), *addons, rounds=2, clients=CLIENTS[:2], how={"secret": 4, **how}, **options)

    run = seeded(SCAFFOLD(), MOON())
    assert_same(run, seeded(MOON(), SCAFFOLD(), workers=3))
    seeded(SCAFFOLD(), MOON(), out=tmp_path, workers=2)
    assert_same(run, seeded(SCAFFOLD(), MOON(), out=tmp_path, resume=True))
    assert run.rows[-1]["epsilon"] is None
    assert "seeded" in run.rows[-1]["privacy"]["reason"]
    assert not torch.equal(*(weights_of(r) for r in (run, seeded(SCAFFOLD(), MOON(), secret=5))))
    assert not torch.equal(*(weights_of(play(noisy(), rounds=1, **options)) for _ in range(2)))


def weights_of(run: Run) -> torch.Tensor:
    return next(iter(run.server.state[FedAvg.model].values()))


@pytest.mark.parametrize("options", [{"augment": jitter}, {"factory": dropping}])
def test_augmentation_and_dropout_use_the_secret_generator(options: dict[str, Any]) -> None:
    def moved(**how: Any) -> torch.Tensor:
        return weights_of(play(SILENT, rounds=1, how=how, **options))

    one = moved(secret=1)
    assert torch.equal(one, moved(secret=1))
    assert not torch.equal(one, moved(secret=2))
    assert not torch.equal(one, moved())


@pytest.mark.filterwarnings("error")
def test_training_leaves_no_hooks_and_warns_of_nothing() -> None:
    class Looks(AddOn):
        data_access = "none"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            assert not any(m._forward_hooks or m._backward_hooks for m in local.net.modules())
            assert not any(hasattr(m, "activations") for m in local.net.modules())
            assert not any(hasattr(p, "grad_sample") or hasattr(p, "summed_grad") for p in local.net.parameters())

    run = play(
        noisy(), Looks(), MOON(), rounds=2, clients=CLIENTS[:1], phases=[Phase(1, train="classifier.*"), Phase(1)]
    )
    assert not any(row["failed"] for row in run.rows)


def test_parameters_outside_the_phase_get_no_gradient_and_no_noise() -> None:
    run = play(noisy(), rounds=1, phases=[Phase(1, train="classifier.*")])
    start = play(SILENT, rounds=1, lr=1e-30).server.state[FedAvg.model]
    same = {n: torch.equal(t, start[n]) for n, t in run.server.state[FedAvg.model].items()}
    assert same == {n: not n.startswith("classifier") for n in same}


def test_personal_model_voids_the_guarantee_only_if_its_test_is_sent() -> None:
    addon = FineTune()
    held = [ClientData(c, images(4, seed=9)) for c in CLIENTS]
    quiet = play(noisy(), addon, clients=held)
    assert quiet.rows[-1]["epsilon"] == pytest.approx(compose([(1.5, 0.5, 6)], DELTA).epsilon)
    asked = play(noisy(), addon, clients=held, how={"evaluate": [1]})
    assert asked.rows[-1]["epsilon"] is None
    assert "personal model" in asked.rows[-1]["privacy"]["reason"]
    assert asked.server.ledger is not None
    assert asked.server.ledger.epsilon(0) == pytest.approx(quiet.rows[-1]["epsilon"])
    shared = play(noisy(), clients=held, personal="classifier.*", how={"evaluate": "all"})
    assert shared.rows[-1]["epsilon"] == pytest.approx(quiet.rows[-1]["epsilon"])


# Refusals.


class Terms(AddOn):
    """User-written loss term, with optional hooks that a test fills in."""

    def __init__(self, data_access: Any) -> None:
        self.data_access = data_access

    def loss(self, step: Any) -> torch.Tensor:
        return step.output().logits.square().mean()


class Sends(Terms):
    hardship = Entry[float]("sum")

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        reply[self.hardship] = float(local.client.data.images.sum())


class Records(Terms):
    def extra_records(self, local: Any) -> LabeledImages:
        return CLIENTS[0]


class Asks(Terms):
    def answer(self, local: Any, reply: Any) -> None:
        """Send a reply to the query before round 1."""

    def expect_answer(self, server: Any, client: int, schema: Any) -> None:
        """Expect no entry."""


REFUSED: dict[str, tuple[AddOn, str]] = {
    "statistics": (Anchors(init="statistics"), "Anchors, which asks the clients for statistics"),
    "records": (Records("none"), "Records, which adds records"),
    "setup": (Asks("none"), "Asks, which asks the clients"),
    "a user's": (Terms("batch"), r"Terms, which reads .* \(data_access = 'batch'\)"),
    "what it sends": (Sends("example"), "Sends, which reads private examples .* and fills 'after_training'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_addon_that_leaks_private_data_is_refused_in_any_order(name: str) -> None:
    addon, why = REFUSED[name]
    for addons in ((noisy(), addon), (addon, noisy()), (FedProx(), addon, SCAFFOLD(), noisy())):
        with pytest.raises(ValueError, match=why):
            FedAvg(*addons, factory=network, weights="uniform")


def test_method_whose_own_code_sees_records_beside_a_private_addon_is_refused() -> None:
    class Counting(FedAvg):
        def local(self, client: Any, message: Any) -> Any:
            return super().local(client, message)

    class Asking(FedAvg):
        exchanges = ("count", "local")

        def count(self, client: Any, message: Any) -> Any:
            return message

    running = type("Running", (FedAvg,), {"run_on_client": lambda *given: FedAvg.run_on_client(*given)})
    for kind, name in ((Counting, "local"), (Asking, "count"), (running, "run_on_client")):
        with pytest.raises(PrivacyError, match=rf"\.{name} sees the clients' records beside DPSGD"):
            kind(noisy(), factory=network, weights="uniform")
        kind(factory=network)


def test_per_example_term_is_clipped_together_with_the_objective() -> None:
    run = play(Terms("example"), SILENT, rounds=2)
    for key, value in play(Terms("example"), rounds=2).server.state[FedAvg.model].items():
        torch.testing.assert_close(run.server.state[FedAvg.model][key], value, rtol=1e-4, atol=1e-6)


def test_counts_and_batch_statistics_are_refused_when_built() -> None:
    with pytest.raises(ValueError, match="DPSGD needs weights='uniform': the number of a client's records is private"):
        FedAvg(noisy(), factory=network)
    normed = partial(Tiny, norm=True)
    with pytest.raises(BatchStatistics, match=r"DPSGD: .*norm='instance'.*without_batch_norm"):
        FedAvg(noisy(), factory=normed, weights="uniform")
    with pytest.raises(BatchStatistics, match="DPSGD"):
        FedAvg(noisy(), factory={"a": network, "b": normed}, assign={}, weights="uniform")
    play(noisy(), factory=lambda k: privacy.without_batch_norm(normed(k)), rounds=1)
    run = play(noisy(), factory=lambda k: normed(k).eval(), rounds=1)  # fixed statistics
    assert not run.rows[0]["failed"]
    assert all(float(t.sum()) in (0.0, len(t)) for n, t in run.server.state[FedAvg.model].items() if "running" in n)


class ByColumn(AddOn):
    """Weights the logits' squares by a column of the clients' sets, which the server does not know."""

    data_access = "example"

    def __repr__(self) -> str:
        return "ByColumn()"

    def loss(self, step: Any) -> torch.Tensor:
        return (step.batch.columns["gain"] * step.output().logits.square().sum(1)).mean()


def test_column_of_a_client_is_read_by_a_term() -> None:
    clients = [d.replace(columns={"gain": torch.ones(len(d))}) for d in CLIENTS]
    assert not play(noisy(), ByColumn(), clients=clients, rounds=1).rows[0]["failed"]
    refused(lambda: play(noisy(), ByColumn(), rounds=1), NoUsableReply, "3 of 3 clients failed")
    columns = {"other": torch.zeros(SIZE), "gain": torch.ones(SIZE)}
    runs = [
        play(SILENT, ByColumn(), clients=[CLIENTS[0].replace(columns={n: columns[n] for n in names})], rounds=1)
        for names in (("gain", "other"), ("other", "gain"))
    ]
    first, second = (run.server.state[FedAvg.model] for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)  # whatever their order


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))


def added(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def mixup(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return 0.9 * x + 0.1 * x[torch.randperm(len(x), generator=generator)]


class Centred(nn.Module):
    """Network that sums up its examples in a buffer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(16, outputs)
        self.register_buffer("seen", torch.zeros(16))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            self.seen = self.seen + x.detach().sum(0)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "class weights": ({"objective": weighted}, NotSeparable, "Use the mean over examples"),
    "a sum": ({"objective": added}, NotSeparable, "Use the mean over examples"),
    "no number": ({"objective": each}, ValueError, "must return one number"),
    "mixup": (
        {"augment": mixup},
        privacy.NotCapturable,
        "the augmentation mixup draws random numbers by aten.randperm",
    ),
    "two of one": ({"augment": lambda x, g: torch.cat([x, x])}, ValueError, r"augment must return torch.float32 \[2,"),
    "a network with memory": ({"factory": Centred}, BatchStatistics, "pass changes seen"),
}


@pytest.mark.parametrize("name", BAD)
def test_networks_and_losses_that_mix_examples_are_refused_at_the_start(name: str) -> None:
    options, kind, why = BAD[name]
    rows: list[Any] = []
    clients = CLIENTS if "weights" not in name or name == "class weights" else linear.clients()
    refused(lambda: play(noisy(), clients=clients, how={"on_round": rows.append}, **options), kind, why)
    assert not rows


def test_crop_flip_and_kept_momentum_keep_the_same_epsilon() -> None:
    """Per-image augmentation passes the check, and momentum of noised gradients is post-processing."""
    clients, crop = [images(12, k) for k in range(2)], CropFlip(IDENTITY, pad=1, cutout=2)
    private = DPSGD(sigma=1.0, rate=0.3, size=12)
    plain = FedAvg(private, factory=Tiny, weights="uniform")
    kept = FedAvg(
        private, factory=Tiny, weights="uniform", augment=crop, momentum=0.9, optimizer=ClientOptimizer(state="client")
    )
    epsilons = []
    for method in (plain, kept):
        run = simulate(method, clients, rounds=2, progress=False)
        assert [row["failed"] for row in run.rows] == [{}, {}]
        epsilons.append([row["epsilon"] for row in run.rows])
    assert epsilons[0] == epsilons[1]


@pytest.mark.parametrize(
    ("rate", "epochs", "steps"), [(0.15, 1, 7), (0.6, 1, 2), (0.6, 2, 3), (0.95, 3, 3), (1.0, 1, 1)]
)
def test_epochs_are_rounded_to_the_nearest_number_of_steps(rate: float, epochs: int, steps: int) -> None:
    ledger = Ledger(delta=DELTA)
    method = FedAvg(DPSGD(sigma=1.5, rate=rate, size=12), factory=Tiny, epochs=epochs, weights="uniform", lr=0.1)
    simulate(method, [images(12, 1)], rounds=1, ledger=ledger, progress=False)
    assert [event.count for event in ledger.events] == [steps]


def test_clip_and_delta_that_bound_nothing_are_refused() -> None:
    for clip in (0.0, math.inf):
        refused(lambda: noisy(clip=clip), ValueError, "clip must be")  # noqa: B023
    with pytest.raises(privacy.NotAccountable, match="delta must be below one over the number of records"):
        play(noisy(size=10), how={"ledger": Ledger(delta=0.2)})


def test_opacus_trains_on_the_objective_alone() -> None:
    with pytest.raises(ValueError, match=r"DPSGD\(gradients='opacus-ghost'\) trains on the objective alone, but MOON"):
        play(noisy(gradients="opacus-ghost"), MOON())
    refused(lambda: noisy(gradients="ghost"), ValueError, "gradients must be one of")
