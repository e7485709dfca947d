"""Every add-on and method gives equal bits for any workers, interruptions and order of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fl import ClientOptimizer, FedAvg, Filtered, Method, addons
from fl.addons import MOON, SCAFFOLD, VHL, Anchors, Ditto, FedAvgM, FedCOG, FedDF, FedGen, FedNova, FedProx, FedSAM
from fl.averaging.addon import AddOn
from fl.study import outcome_hash
from tests.fl.every_method import METHODS, play
from tests.fl.invariances import assert_same
from tests.fl.test_addon_combinations import NOISE, OPTIONS, normed, plain
from tests.fl.test_fedcog import SmallDecoder
from tests.fl.test_filters import Choose, Scale, Shift, Tolerant


@dataclass(frozen=True)
class Idle(AddOn):
    """Add-on that does nothing, under a key that sorts first."""

    key = "A"


def several(*addons: AddOn) -> FedAvg:
    """Return a method with add-ons in the given order, on a network with batch norm."""
    return plain(*addons, factory=normed, momentum=0.9)


TOGETHER: dict[str, list[AddOn]] = {
    "loss terms": [FedProx(0.1), MOON(), SCAFFOLD()],
    "all kinds of hooks": [FedSAM(), FedProx(0.1), FedNova(), FedAvgM()],
    "generator": [FedGen(**OPTIONS["FedGen"]), FedSAM(0.05)],
    "distillation": [FedDF(**OPTIONS["FedDF"]), FedAvgM(0.5)],
    "virtual set": [VHL(**NOISE, batch=5, layer="body.0"), Ditto(steps=1)],
    "condensed": [
        addons.Condensed(**OPTIONS["Condensed"]),
        Anchors(ipc=2, selected=(1, 3), steps=2, init="statistics"), SCAFFOLD(),
    ],
    "generated images": [
        FedCOG(
            start_round=2, images=6, steps=2, decoder=SmallDecoder, regenerate=True, labels="hard", targets="uniform"
        )
    ],
}  # fmt: skip
OTHERS: dict[str, Callable[[], Method]] = {
    "kept momentum": lambda: plain(Ditto(0.1), momentum=0.9, optimizer=ClientOptimizer(state="client")),
    "kept moments": lambda: plain(Ditto(0.1), optimizer=ClientOptimizer("adam", state="client")),
    "pool without weights": lambda: plain(addons.SharedPool(**{**OPTIONS["SharedPool"], "rate": 0.0}), FedProx(0.1)),
    "filters": lambda: Filtered(plain(SCAFFOLD()), Scale(), Shift()),
    "own draw": lambda: Filtered(Tolerant(SCAFFOLD(), factory=normed, steps=2, batch=4), Choose()),
}


def assert_invariant(make: Callable[[], Method], other: Callable[[], Method], folder: Path) -> None:
    """Compare a run with one of an equal method that has several workers and stops after a round."""
    how = {} if make().draws_clients else {"participation": 2}
    whole = play(make(), rounds=3, **how)
    play(other(), rounds=2, workers=3, out=folder, **how)
    again = play(other(), rounds=3, workers=2, out=folder, resume=True, **how)
    assert_same(whole, again)
    assert make().private or outcome_hash(whole) == outcome_hash(again)  # an interrupted ledger has other remarks


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_workers_and_interruptions_change_no_bit(name: str, tmp_path: Path, global_rng_untouched: None) -> None:
    make = {**METHODS, **OTHERS}[name]
    assert_invariant(make, make, tmp_path)


@pytest.mark.parametrize("name", TOGETHER)
def test_nor_does_the_order_of_add_ons(name: str, tmp_path: Path, global_rng_untouched: None) -> None:
    addons = TOGETHER[name]
    assert_invariant(lambda: several(*addons), lambda: several(*reversed(addons), Idle()), tmp_path)
