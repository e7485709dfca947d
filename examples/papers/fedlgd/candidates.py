"""Candidates of FedLGD, and their searched settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.study import grid
from fl import AddOn, FedAvg
from fl.addons import MOON, SCAFFOLD, VHL, Condensed, FedNova, FedProx
from fl.methods import FedLGD
from fl.study import Federated

RATES, TWO = [0.03, 0.1, 0.3, 1.0], [0.1, 0.3]
SEARCH: dict[str, list[dict[str, Any]]] = {
    "FedAvg": grid(lr=RATES), "FedProx": grid(lr=TWO, mu=[0.01, 0.1]), "FedNova": grid(lr=RATES),
    "SCAFFOLD": grid(lr=RATES), "VHL": grid(lr=TWO, calibration=[0.1, 1.0]), "FedLGD": grid(lr=TWO, weight=[1.0, 10.0]),
}  # fmt: skip
PUBLISHED: dict[str, Any] = {"FedProx": {"mu": 0.01}, "VHL": {"calibration": 1.0}, "FedLGD": {"weight": 10.0}}
"""Settings of the preset `paper` besides the rate 0.01: from sections 5.1 and 5.5; FedProx's from the authors' code."""


def candidates(o: argparse.Namespace) -> dict[str, Federated]:
    """Return the methods of Table 1 with their search, and one-seed ablations with one change each."""
    augment = DSA(NATURAL if o.pictures else DIGITS)
    sizes = {"steps": o.condense, "batch_real": o.batch_real, "augment": augment, "refine_steps": 0}

    def averaging(*parts: Callable[..., AddOn], condensed: bool = True) -> Callable[..., FedAvg]:
        def make(factory: Any, lr: float, ipc: int = o.ipc, first: Any = None, **tried: Any) -> FedAvg:
            learnt = [Condensed(ipc=ipc, **{**sizes, **(first or {})})] if condensed else []
            added = [part(**tried) for part in parts]
            return FedAvg(*learnt, *added, factory=factory, lr=lr, weights="uniform", batch=32, epochs=1)

        return make

    makes: dict[str, Callable[..., FedAvg]] = {
        "FedAvg": averaging(), "FedProx": averaging(FedProx), "FedNova": averaging(FedNova),
        "SCAFFOLD": averaging(SCAFFOLD), "VHL": averaging(partial(VHL, **o.noise)), "FedLGD": FedLGD,
    }  # fmt: skip
    own: dict[str, Any] = {"ipc": o.ipc, "anchors": o.anchors, "batch": 32, "batch_real": o.batch_real}
    own |= {"condense_steps": o.condense, "refine_steps": o.refine, "match_steps": o.match, "augment": augment}
    search = {n: t if o.preset == "cpu" else [{"lr": 0.01 if o.preset == "paper" else 0.1, **PUBLISHED.get(n, {})}]
             for n, t in SEARCH.items()}  # fmt: skip
    found = {n: Federated(m, search[n], own if n == "FedLGD" else {}) for n, m in makes.items()}

    def fedlgd(**settings: Any) -> Federated:
        return Federated(FedLGD, settings={**own, **settings}, like="FedLGD", seeds=o.seeds[:1])

    def fedavg(make: Callable[..., FedAvg] = makes["FedAvg"], **settings: Any) -> Federated:
        return Federated(make, settings=settings, like="FedAvg", seeds=o.seeds[:1])

    whole, later = "statistics-whole-set", sum(number <= o.rounds for number in Condensed.selected[1:])
    further = {
        "FedAvg on random images": fedavg(first={"steps": 0, "init": "real"}),
        "FedAvg, FedLGD's number of steps": fedavg(first={"steps": o.condense + later * o.refine}),
        "FedAvg on all images": fedavg(averaging(condensed=False)),
        "MOON": fedavg(averaging(partial(MOON, 1.0))),
        **{f"FedLGD, weight {w:g}": fedlgd(weight=w) for w in (0.0, 0.03, 0.1, 0.3, 1.0, 10.0, 20.0)},
        **{f"FedLGD, MMD, weight {w:g}": fedlgd(weight=w, regulariser="mmd") for w in (1.0, 10.0, 20.0)},
        "FedLGD, nothing distilled later": fedlgd(selected=()),
        "FedLGD, no anchors": fedlgd(anchors=0),
        "FedLGD, from noise": fedlgd(init="noise"),
        "FedLGD, from real images": fedlgd(init="real"),
        "FedLGD, anchors as released": fedlgd(anchors_init=whole, joined="always"),
        "FedLGD, anchors' rate 30": fedlgd(anchors_lr=30.0),
        "FedLGD, as released": fedlgd(init=whole, anchors_init=whole, joined="always"),
        **{f"FedAvg, {ipc} a class": fedavg(ipc=ipc) for ipc in o.other_ipc},
        **{f"FedLGD, {ipc} a class": fedlgd(ipc=ipc) for ipc in o.other_ipc},
    }
    return found if o.no_ablations else {**found, **further}
