"""One small setting of every add-on and method, on three clients, and how to run and compare them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fl import ClientDP, FedDM, Filtered, Method, Real, Run, simulate
from fl.methods import FedLGD, FedProto, FedRep, PrivateFedDM, SingleImage, SummedFedDM
from fl.study import outcome_hash
from tests.fl.federations import small
from tests.fl.invariances import assert_same
from tests.fl.test_addon_combinations import NAMES, PICTURE, SHARED, Net, addon, digits, federation, normed, plain

DM: dict[str, Any] = {"factory": Net, "ipc": 1, "steps": 2, "server_epochs": 1, "server_batch": 4}
DP: dict[str, Any] = {"sigma": 2.0, "public_statistics": True, **DM, "factory": partial(small, side=8)}

METHODS: dict[str, Callable[[], Method]] = {
    **{name: partial(lambda name: plain(addon(name)), name) for name in NAMES},
    "FedAvg": plain,
    "FedRep": lambda: FedRep(factory=Net, head_epochs=1, lr=0.05, momentum=0.0, batch=4),
    "FedLGD": lambda: FedLGD(
        factory=Net, ipc=1, anchors=1, selected=(2,), augment=None, lr=0.05, batch=4, condense_steps=2,
        refine_steps=1, match_steps=2,
    ),
    "SingleImage": lambda: SingleImage(PICTURE, shared={**SHARED, "rate": 1.0}, factory=Net, epochs=1, batch=4),
    "FedDM": lambda: FedDM(**DM),
    "Real": lambda: Real(**DM),
    "PrivateFedDM": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, **DP),
    "PrivateFedDM warm": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, warm=True, **DP),
    "PrivateFedDM image": lambda: PrivateFedDM(sigma_sizes=2.0, least=0, mechanism="image_sgd", **DP),
    "SummedFedDM": lambda: SummedFedDM(sizes=[10, 10, 10], noise="shares", **DP),
    "SummedFedDM warm": lambda: SummedFedDM(sizes=[10, 10, 10], noise="shares", warm=True, **DP),
    "ClientDP": lambda: Filtered(plain(weights="uniform"), ClientDP(sigma=2.0, rate=0.5, clip=1.0)),
    "FedProto": lambda: FedProto(factory=Net, lr=0.05, batch=4),
    "FedProto of two": lambda: FedProto(
        factory={"a": Net, "b": normed}, assign={0: "a", 1: "b", 2: "a"}, lr=0.05, batch=4
    ),
}  # fmt: skip


def options_of(method: Method, **options: Any) -> dict[str, Any]:
    """Return the options of a run of two rounds, all but the clients."""
    held = {"proxy": digits()[90:96], "test": digits()[100:110]}
    secret = {"secret": 1} if method.private else {}
    return {"test": held["test"], "seed": 3, "server_data": held, "rounds": 2, "evaluate": "all", **secret, **options}


def play(method: Method, **options: Any) -> Run:
    return simulate(method, federation(), progress=False, **options_of(method, **options))


def rows(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "bytes_resent"} for row in run.rows]


def assert_equal(one: Run, other: Run) -> None:
    assert_same(one, other)
    assert rows(one) == rows(other)
    assert outcome_hash(one) == outcome_hash(other)
