"""DP-SGD on the clients: networks and losses that mix examples in any phase are refused before a charge."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from distillkit.privacy import Ledger, PrivacyError
from fl import FedAvg, NoUsableReply, Run, simulate
from fl.addons import DPSGD, MOON, FedProx
from fl.addons.dp_sgd import _CAPTURED
from fl.averaging.addon import AddOn
from fl.batches import Phase
from fl.task import Classification
from tests.distillkit.privacy.faulty_network import FAULTS, OCCASIONS, FaultyNetwork
from tests.fl import linear, quadratic
from tests.fl.federations import images
from tests.refused import refused

DRAWN = 7
CLIENTS = [images(12, seed=k) for k in range(2)]
PHASES = [Phase(1, train="classifier*"), Phase(1, train="!classifier*")]


def play(
    network: Any, *addons: AddOn, clients: Any = CLIENTS, ledger: Ledger | None = None, rounds: int = 1, **options: Any
) -> Run:
    private = DPSGD(sigma=1.0, rate=0.5, size=24, chunk=DRAWN)
    method = FedAvg(private, *addons, factory=network, weights="uniform", **{"phases": PHASES} | options)
    return simulate(method, CLIENTS, rounds=rounds, ledger=ledger, progress=False)


def moved(clients: Any, network: Any, *addons: AddOn, **options: Any) -> torch.Tensor:
    """Return the weights of the server after a step without noise, in clipping norms."""
    private = DPSGD(sigma=0.0, rate=1.0, size=1, clip=1e-3)
    method = FedAvg(private, *addons, factory=network, **{"weights": "uniform", "steps": 1, "lr": 1.0} | options)
    run = simulate(method, clients, rounds=1, progress=False)
    assert not any(row["failed"] for row in run.rows)
    return torch.cat([t.flatten() for t in run.server.state[FedAvg.model].values()]).double() / 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("occasion", OCCASIONS)
@pytest.mark.parametrize("way", FAULTS)
def test_every_violation_is_refused_or_moves_one_clip(way: str, occasion: str, free: bool) -> None:
    network = partial(FaultyNetwork, way=way, occasion=occasion, size=DRAWN, free=free)
    phases = [Phase(1)] if occasion != "in one phase" else PHASES
    if way == "moves a buffer" and occasion in ("always", "in train mode"):
        ledger = Ledger()
        refused(lambda: play(network, ledger=ledger, phases=phases), PrivacyError, "changes moved")
        assert ledger.events == ()
        return
    if way == "draws globally":
        play(network, phases=phases)  # drawn from the secret
        return
    data = CLIENTS[0]
    world, other = (moved([d], network) for d in (data, data[1:]))
    assert float((world - other).norm()) <= 1 + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("addons", [(), (MOON(),), (FedProx(0.1), MOON())])
def test_network_without_a_violation_is_trained(free: bool, addons: tuple[AddOn, ...]) -> None:
    ledger = Ledger()
    run = play(partial(FaultyNetwork, free=free), *addons, ledger=ledger, rounds=2)
    assert not any(row["failed"] for row in run.rows)
    assert {e.count for e in ledger.events} == {2}
    assert len(ledger.events) == 8


def flipped(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(chosen, images.flip(3), images)


def mixing(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images - 0.5 * images.mean(0)


def cropped_to_ink(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images[..., : int(images.abs().amax((0, 1, 2)).count_nonzero())]


class Mixes(AddOn):
    """Declares that it reads one example at a time, but mixes examples."""

    data_access = "example"

    def __repr__(self) -> str:
        return "Mixes()"

    def loss(self, step: Any) -> torch.Tensor:
        z = step.output().embedding
        return (z - z.mean(0)).square().mean()


class Peeks(AddOn):
    """Declares that it reads nothing, but tries to read the records."""

    data_access = "none"
    sizes: ClassVar[list[int]] = []

    def __repr__(self) -> str:
        return "Peeks()"

    def before_training(self, local: Any) -> None:
        self.sizes.extend([len(local.data), len(local.client.data), int(local.counts.sum()), local.client.test is None])

    def loss(self, step: Any) -> torch.Tensor:
        self.sizes.append(len(step.batch.images))
        weights = next(iter(step.trained.values()))
        return 0 * weights.sum() + 1e3 * step.local.data.images.sum()

    def after_step(self, step: Any) -> None:
        self.sizes.append(len(step.local.data) + len(step.local.client.data) + len(step.batch.images))


@pytest.mark.parametrize("addon", [Mixes(), Peeks()])
def test_other_addons_cannot_read_records(addon: AddOn) -> None:
    data = CLIENTS[0]
    Peeks.sizes.clear()
    world, other = (moved([d], FaultyNetwork, addon) for d in (data, data[1:]))
    assert float((world - other).norm()) <= 1 + 1e-3
    assert set(Peeks.sizes) <= {0, 1, 6}  # six are the server's own noise images


@pytest.mark.parametrize(("augment", "accepted"), [(flipped, True), (mixing, True), (cropped_to_ink, False)])
def test_augmentation_is_captured_for_one_image(augment: Any, accepted: bool) -> None:
    if not accepted:
        with pytest.raises(PrivacyError, match="augmentation cropped_to_ink chooses by the values"):
            play(FaultyNetwork, augment=augment)
        return
    data = CLIENTS[0]
    worlds = [moved([d], FaultyNetwork, augment=augment) for d in (data, data[1:])]
    assert float((worlds[0] - worlds[1]).norm()) <= 1 + 1e-3 or augment is flipped


@pytest.mark.parametrize("network", [linear.FourWeights, quadratic.TwoWeights])
def test_weights_outside_layers_are_clipped_per_example(network: Any) -> None:
    """At rate 1 without noise and clip, private training equals plain training with the same public denominator."""
    clients = [c[: len(linear.clients()[0])] for c in linear.clients()]
    count = len(clients[0])
    silent = DPSGD(sigma=0.0, rate=1.0, size=count, clip=float("inf"))
    options: dict[str, Any] = {"factory": network, "weights": "uniform", "steps": 3, "lr": 0.1, "batch": 10**6}
    one, other = (
        simulate(FedAvg(*addons, **options), clients[:1], rounds=1, progress=False).server.state[FedAvg.model]
        for addons in ((silent,), ())
    )
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-7)


def test_capture_is_repeated_only_if_the_setting_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    private = DPSGD(sigma=1.0, rate=0.5, size=24)
    method = FedAvg(private, factory=FaultyNetwork, weights="uniform", phases=PHASES)
    with monkeypatch.context() as patch:
        patch.setattr(DPSGD, "batches", None)
        refused(lambda: simulate(method, CLIENTS, rounds=1, ledger=Ledger()), NoUsableReply, "2 of 2 clients failed")
    assert len(_CAPTURED[method.settings.networks]) == 2  # all phases, on the server
    simulate(method, CLIENTS, rounds=2, ledger=Ledger(), progress=False)
    assert len(_CAPTURED[method.settings.networks]) == 2
    other: Any = type("Other", (Classification,), {"loss": lambda self, *given: -Classification.loss(self, *given)})
    for number, task in enumerate((other(3), other(3))):  # equal, but perhaps with another state
        simulate(method, CLIENTS, rounds=1, ledger=Ledger(), task=task, progress=False)
        assert len(_CAPTURED[method.settings.networks]) == 4 + 2 * number


def test_an_addon_may_charge_before_training_beside_dp_sgd() -> None:
    charge: Any = lambda self, local: local.client.spend("own", 1.0)  # noqa: E731
    own = type("Own", (AddOn,), {"data_access": "none", "private": True, "before_training": charge})()
    play(FaultyNetwork, own, ledger=(ledger := Ledger()))
    assert [e.mechanism for e in ledger.events].count("own") == 2
    refused(lambda: FedAvg(own, factory=FaultyNetwork), ValueError, "Own needs weights='uniform'")


def test_every_process_captures_before_it_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in another process captures again; the server's capture does not count for it."""
    monkeypatch.setattr(DPSGD, "dry_run", lambda self, local: None)
    ledger = Ledger()
    refused(lambda: play(partial(FaultyNetwork, way="moves a buffer"), ledger=ledger), Exception, "round 1")
    assert ledger.events == ()


def test_failure_of_a_private_client_has_constant_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history must not tell what its records are; the reason is logged on the client."""
    batches = DPSGD.batches

    def failing(self: DPSGD, local: Any, data: Any, phase: Phase) -> Any:
        if local.client.id == 0:
            raise ValueError("pixel out of range: 311.25")
        return batches(self, local, data, phase)

    monkeypatch.setattr(DPSGD, "batches", failing)
    failed = play(FaultyNetwork).rows[0]["failed"]
    assert failed == {"0": "failed; the reason is in its own log, because it may depend on private records"}


def test_frozen_parameters_require_gradients_again_afterwards() -> None:
    seen: list[bool] = []

    class Looks(AddOn):
        data_access = "none"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            seen.extend(p.requires_grad for p in local.net.parameters())

    play(FaultyNetwork, Looks())
    assert seen
    assert all(seen)
