"""Claims about condensed images."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from claims.claim import Claim
from claims.real_images import SIZES
from distillkit.augment import DIGITS, DSA
from distillkit.data import partition
from distillkit.study import Candidate, Task, grid
from fl import FedAvg, FedDM, Filtered, Method
from fl.addons import Anchors, Condensed
from fl.filters import SetQuality
from fl.methods import FedLGD
from fl.study import Federated
from papers.feddm.candidates import PRESETS, headline
from papers.fedlgd.domains import digits
from shared.datasets import load_subset

DIGITS_SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "domains": ("digits", "digits-m-like"), "train": 100, "test": 40, "rounds": 2, "ipc": 2, "condense": 3,
        "refine": 1, "match": 2, "batch_real": 8, "width": 8,
    },
    "cpu": {
        "domains": ("mnist", "usps", "mnistm", "synthdigits-like"), "train": 2000, "test": 500, "rounds": 60,
        "ipc": 10, "condense": 100, "refine": 10, "match": 100, "batch_real": 32, "width": 32,
    },
}  # fmt: skip
"""Sizes of FedLGD's task; `train`, `test`: images per client; `condense`, `refine`, `match`: steps of a phase."""


def averaging(condensed: Mapping[str, Any], factory: Any, lr: float) -> FedAvg:
    """Return FedAvg on condensed sets, with FedLGD's other settings."""
    return FedAvg(Condensed(**condensed), factory=factory, lr=lr, weights="uniform", batch=32, epochs=1)


def with_quality(make: Callable[..., Method], quality: SetQuality, **given: Any) -> Method:
    """Return a method that also measures how well its synthetic set and its updates stand for real images."""
    return Filtered(make(**given), quality)


def measured(candidates: Mapping[str, Candidate], qualities: Mapping[str, SetQuality]) -> dict[str, Candidate]:
    """Return the candidates with measurements of their sets, without a search.

    Args:
        candidates: candidates of a claim.
        qualities: measurement of each candidate.
    """
    makes = {label: cast(Callable[..., Method], candidates[label].make) for label in qualities}
    return {
        label: replace(candidates[label], make=partial(with_quality, makes[label], quality), search=[{}])
        for label, quality in qualities.items()
    }


def fedlgd(o: argparse.Namespace) -> Claim:
    """Return the claim for FedLGD with anchors that resemble images. FedAvg trains on sets with as many steps."""
    s = DIGITS_SIZES[o.preset]
    small, augment = o.preset == "smoke", DSA(DIGITS)
    shared: dict[str, Any] = {"ipc": s["ipc"], "batch_real": s["batch_real"], "augment": augment}
    refinements = sum(round_number <= s["rounds"] for round_number in Condensed.selected[1:])
    steps = s["condense"] + s["refine"] * refinements
    rivals = shared | {"steps": steps, "refine_steps": 0}
    own = shared | {"anchors": s["ipc"], "batch": 32, "anchors_init": "statistics-whole-set", "joined": "always"}
    own |= {"condense_steps": s["condense"], "refine_steps": s["refine"], "match_steps": s["match"]}
    candidates: dict[str, Candidate] = {
        "FedAvg": Federated(partial(averaging, rivals), grid(lr=[0.1] if small else [0.03, 0.1, 0.3, 1.0])),
        "FedLGD": Federated(
            FedLGD, grid(lr=[0.1] if small else [0.1, 0.3], weight=[0.3] if small else [0.1, 1.0]), own
        ),
    }
    options: dict[str, Any] = {"rounds": s["rounds"], "factory_options": {"width": s["width"], "depth": 2}}
    task = Task("domains", partial(digits, s["domains"], None, 16, s["train"], s["test"]), **options)
    pilot = {"FedAvg": {"lr": 0.3}, "FedLGD": {"lr": 0.3, "weight": 1.0}}
    text = (
        "On four kinds of digits, one per client, FedLGD is more accurate than FedAvg on sets that were condensed with "
        "as many steps in total, on average over the second half of the rounds. The effect is that of the paper's "
        "Table 1 (ConvNet, 10 images per class): 80.6 against 75.9 %."
    )
    inside = measured(candidates, {"FedAvg": SetQuality(), "FedLGD": SetQuality(Anchors.anchors, judge=10)})
    proxy = replace(task, server_share=0.1)
    return Claim(text, (task,), candidates, max(1, s["rounds"] // 2), 0.047, pilot, inside, proxy)


def feddm(o: argparse.Namespace) -> Claim:
    """Return the claim for FedDM on the paper's partitions of CIFAR-10. It is tested on Dirichlet(0.1)."""
    small = o.preset == "smoke"
    p = PRESETS[o.preset] | {"few": None}
    name = "digits" if small else "cifar10"
    data = partial(load_subset, name, None, SIZES[o.preset]["records"], 16 if small else None)
    options = {"rounds": p["rounds"], "factory_options": p["network"]}
    tasks = tuple(
        Task(f"{name}-dirichlet{alpha:g}", data, partial(partition.dirichlet, clients=10, alpha=alpha), **options)
        for alpha in (0.1, 0.01, 0.5)
    )
    both = headline(argparse.Namespace(**p))
    pilot = {"FedAvg": {"epochs": 5, "lr": 0.1}, "FedDM": {"server_lr": 0.03, "rho": 5.0}}
    text = (
        "On CIFAR-10 under Dirichlet 0.1, FedDM is more accurate than FedAvg, on average over the second half of the "
        "rounds. The effect is that of the paper's Table 2 after 20 rounds: 67.38 against 57.32 %."
    )
    found: dict[str, Candidate] = {n: both[n] for n in pilot}
    inside = measured(found, {"FedAvg": SetQuality(per_class=50), "FedDM": SetQuality(FedDM.images)})
    few = partial(load_subset, name, None, 600 if small else 2000, 16 if small else None)
    smaller = replace(tasks[0], data=few, server_share=0.1)  # a run of minutes
    return Claim(text, tasks, found, max(1, p["rounds"] // 2), 0.1006, pilot, inside, smaller)


CLAIMS: dict[str, Callable[[argparse.Namespace], Claim]] = {"feddm": feddm, "fedlgd": fedlgd}
