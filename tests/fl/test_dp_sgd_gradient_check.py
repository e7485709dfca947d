"""DP-SGD on the clients: networks and losses that mix examples in any phase are refused before a charge."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from distillkit.privacy import BatchStatistics, Ledger, PrivacyError
from fl import FedAvg, Run, simulate
from fl.addons import DPSGD, MOON, FedProx
from fl.addons.dp_sgd import _ENGINES
from fl.averaging.addon import AddOn
from fl.batches import Phase
from tests.distillkit.privacy.faulty_network import FAULTS, OCCASIONS, FaultyNetwork
from tests.fl import linear, quadratic
from tests.fl.federations import images

DRAWN = 7
CLIENTS = [images(12, seed=k) for k in range(2)]
PHASES = [Phase(1, train="classifier*"), Phase(1, train="!classifier*")]


def play(
    network: Any, *addons: AddOn, clients: Any = CLIENTS, ledger: Ledger | None = None, rounds: int = 1, **options: Any
) -> Run:
    private = DPSGD(sigma=1.0, rate=0.5, size=24, chunk=DRAWN)
    method = FedAvg(private, *addons, factory=network, weights="uniform", **{"phases": PHASES} | options)
    return simulate(method, CLIENTS, rounds=rounds, ledger=ledger, progress=False)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("occasion", OCCASIONS)
@pytest.mark.parametrize("way", FAULTS)
def test_every_violation_in_any_phase_is_refused_before_a_charge(way: str, occasion: str, free: bool) -> None:
    network = partial(FaultyNetwork, way=way, occasion=occasion, size=DRAWN, free=free)
    ledger = Ledger()
    if way == "folds rows" and free and occasion != "at the drawn size":
        # torch.func takes whole examples, where the parameter outside a layer is trained
        run = play(network, ledger=ledger, phases=[Phase(1)] if occasion != "in one phase" else PHASES)
        assert not any(row["failed"] for row in run.rows)
        return
    with pytest.raises(PrivacyError):
        play(network, ledger=ledger)
    assert ledger.events == ()


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("addons", [(), (MOON(),), (FedProx(0.1), MOON())])
def test_network_without_a_violation_is_trained(free: bool, addons: tuple[AddOn, ...]) -> None:
    ledger = Ledger()
    run = play(partial(FaultyNetwork, free=free), *addons, ledger=ledger, rounds=2)
    assert not any(row["failed"] for row in run.rows)
    assert {e.count for e in ledger.events} == {2}
    assert len(ledger.events) == 8


class Mixes(AddOn):
    """Declares that it reads one example at a time, but mixes examples."""

    data_access = "example"

    def __repr__(self) -> str:
        return "Mixes()"

    def loss(self, step: Any) -> torch.Tensor:
        z = step.output().embedding
        return (z - z.mean(0)).square().mean()


def test_term_that_declares_example_but_reads_the_batch_is_refused() -> None:
    ledger = Ledger()
    with pytest.raises(BatchStatistics, match="or its loss treats an example differently"):
        play(FaultyNetwork, Mixes(), ledger=ledger)
    assert ledger.events == ()


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


def test_folded_rows_can_be_requested_as_whole_examples() -> None:
    network = partial(FaultyNetwork, way="folds rows")
    private = DPSGD(sigma=1.0, rate=0.5, size=24, chunk=DRAWN, gradients="func")
    ledger = Ledger()
    method = FedAvg(private, factory=network, weights="uniform")
    run = simulate(method, CLIENTS, rounds=1, ledger=ledger, progress=False)
    assert not any(row["failed"] for row in run.rows)
    assert set(_ENGINES[method.settings.networks].values()) == {"vmap"}


def test_every_process_runs_the_check_before_it_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in another process repeats the check; the server's check does not count for it."""
    monkeypatch.setattr(DPSGD, "dry_run", lambda self, local: None)
    ledger = Ledger()
    with pytest.raises(Exception, match="round 1|batch of 7"):
        play(partial(FaultyNetwork, way="mixes examples"), ledger=ledger)
    assert ledger.events == ()


def test_frozen_parameters_require_gradients_again_afterwards() -> None:
    seen: list[bool] = []

    class Looks(AddOn):
        data_access = "none"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            seen.extend(p.requires_grad for p in local.net.parameters())

    play(FaultyNetwork, Looks())
    assert seen
    assert all(seen)
