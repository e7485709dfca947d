"""Candidates of FedCOG, their searched settings, and the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distillkit import Normalization
from distillkit.augment import CropFlip
from distillkit.study import Task, grid
from fl import AddOn, ClientOptimizer, FedAvg, Method
from fl.addons import MOON, SCAFFOLD, Ditto, FedAvgM, FedCOG, FedProx, FineTune, LocalAccuracy
from fl.study import Federated

SPACES = {
    "fashionmnist": Normalization([0.5], [0.5]),
    "cifar10": Normalization([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]),
}
"""The datasets, and their normalization in the authors' code."""

BASES: dict[str, tuple[AddOn, ...]] = {
    "FedAvg": (), "FedAvgM": (FedAvgM(0.9),), "FedProx": (FedProx(0.01),), "SCAFFOLD": (SCAFFOLD(),),
    "MOON": (MOON(0.01),),
}  # fmt: skip
"""The methods of Table 3 with the weights in the authors' code. The available text of the paper lacks these numbers."""

TERMS: dict[str, Mapping[str, Any]] = {
    "noise": {"steps": 0},
    "global model only": {"disagreement": 0.0},
    "hard labels": {"labels": "hard"},
    "all classes alike": {"targets": "uniform"},
    "weight 1": {"weight": 1.0},
}
"""Ablations: rows 1 to 3 of Table 5, the targets of section 4.1, and Eq. 3 with lambda 1 in place of appendix A.2.2."""

PAPER = {
    "fashionmnist-dirichlet": {
        "FedAvg": "73.07", "FedAvgM": "76.81", "FedProx": "73.35", "SCAFFOLD": "77.02", "MOON": "73.21",
        "FedCOG": "77.34",
    },
    "fashionmnist-two-classes": {
        "FedAvg": "64.11", "FedAvgM": "67.73", "FedProx": "64.44", "SCAFFOLD": "58.47", "MOON": "63.11",
        "FedCOG": "73.68",
    },
    "cifar10-dirichlet": {
        "FedAvg": "64.36", "FedAvgM": "64.36", "FedProx": "63.91", "SCAFFOLD": "64.36", "MOON": "63.65",
        "FedCOG": "64.83", "FedAvgM + FedCOG": "64.63", "FedProx + FedCOG": "64.87", "SCAFFOLD + FedCOG": "65.36",
        "MOON + FedCOG": "63.24", "FedCOG, noise": "60.98", "FedCOG, global model only": "64.72",
        "FedCOG, hard labels": "63.59",
    },
    "cifar10-two-classes": {
        "FedAvg": "50.55", "FedAvgM": "51.32", "FedProx": "53.51", "SCAFFOLD": "48.35", "MOON": "51.01",
        "FedCOG": "54.00",
    },
}  # fmt: skip
"""Test accuracy in per cent, as printed in the paper."""
SOURCE = (
    "Ye et al., ICLR 2024, Table 1; rows '+ FedCOG' Table 3 (one round of FedCOG), ablations Table 5; on all training "
    "images, after 70 rounds of 400 steps (as in the authors' code; the available text of the paper lacks these "
    "numbers)."
)


def method(
    base: str, cog: Mapping[str, Any] | None, also: Sequence[AddOn], preset: Mapping[str, Any],
    factory: Any, task: Task, lr: float,
) -> Method:  # fmt: skip
    """Return a base method, with FedCOG unless `cog` is None. The server tests the last round's client models."""
    parts = [*BASES[base], LocalAccuracy("proxy", every=task.rounds), *also]
    if cog is not None:
        given = {"start_round": preset["start"], "images": preset["images"], "steps": preset["generation"], **cog}
        parts.append(FedCOG(**given))
    space = SPACES.get(task.name.split("-")[0]) if preset["augment"] else None
    return FedAvg(
        *parts, factory=factory, lr=lr, momentum=0.9, optimizer=ClientOptimizer(weight_decay=1e-5),
        steps=preset["steps"], batch=preset["batch"],
        augment=None if space is None else CropFlip(space), weights="uniform" if base == "SCAFFOLD" else "samples",
    )  # fmt: skip


def pair(preset: Mapping[str, Any]) -> dict[str, Federated]:
    """Return the main comparison: FedAvg with its search, and FedCOG with the settings that the search selects."""
    averaging = Federated(partial(method, "FedAvg", None, (), preset), search=grid(lr=preset["lr"]))
    return {"FedAvg": averaging, "FedCOG": _like(preset, {})}


def ablations(preset: Mapping[str, Any], tasks: Sequence[str], seeds: Sequence[int]) -> dict[str, Federated]:
    """Return the one-seed candidates: other base methods with and without FedCOG, personal models, and ablations.

    Args:
        preset: values of the script's preset.
        tasks: names of the tasks with Dirichlet clients. FedCOG's ablations run on the last task, and all other
            candidates on the first.
        seeds: seeds of the runs.
    """
    bases = {base: _like(preset, None, base=base) for base in list(BASES)[1:]}
    bases |= {f"{base} + FedCOG": _like(preset, {}, base=base) for base in bases}
    bases |= {
        "FedAvg, fine-tuned": _like(preset, None, FineTune()),
        "FedAvg, Ditto": _like(preset, None, Ditto()),
        "FedCOG, fine-tuned": _like(preset, {}, FineTune()),
    }
    parts = {f"FedCOG, {name}": _like(preset, term) for name, term in TERMS.items()}
    for start in (max(1, 2 * preset["rounds"] // 3), preset["rounds"]):
        parts[f"FedCOG from round {start}"] = _like(preset, {"start_round": start})
    found = {name: replace(candidate, tasks=tasks[:1]) for name, candidate in bases.items()}
    found |= {name: replace(candidate, tasks=tasks[-1:]) for name, candidate in parts.items()}
    return {name: replace(candidate, seeds=seeds) for name, candidate in found.items()}


def _like(preset: Mapping[str, Any], cog: Mapping[str, Any] | None, *also: AddOn, base: str = "FedAvg") -> Federated:
    return Federated(partial(method, base, cog, also, preset), like="FedAvg")
