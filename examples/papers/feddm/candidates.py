"""Candidates: FedDM, its ablations and weight averaging; searched settings and the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillkit.study import grid
from fl import AddOn, FedAvg, FedDM, Method, Real
from fl.addons import SCAFFOLD, FedNova, FedProx
from fl.study import Federated

COSTS = ("bytes_up", "bytes_down", "client_seconds", "seconds")
SEARCH = {"FedAvg": grid(epochs=[5, 1], lr=[0.1, 0.03]), "FedDM": grid(server_lr=[0.01, 0.03], rho=[5.0, 20.0])}
PAPER_SEARCH = {  # within the paper's grid; the paper does not state its choice for weight averaging
    "FedAvg": [*grid(epochs=[10, 5], lr=[0.1]), {"epochs": 10, "lr": 0.01}, {"epochs": 20, "lr": 0.1}],
    "FedDM": [*grid(server_lr=[0.01], rho=[5.0, 3.0, 10.0]), {"server_lr": 0.03, "rho": 5.0}],
}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "dataset": ["digits"], "split": ["0.01", "iid"], "tries": 1, "given": SEARCH, "others": 1,
        "switched": "digits-dirichlet0.01", "train": 600, "network": {"width": 16, "depth": 2}, "rounds": 3,
        "steps": 3, "batch_real": 16, "server_epochs": 5, "batch": 32,
    },
    "cpu": {
        "dataset": ["mnist", "cifar10"], "split": ["0.01", "0.1", "iid"], "tries": 4, "given": SEARCH, "others": 1,
        "switched": "cifar10-dirichlet0.01", "train": 4000, "network": {"width": 32, "depth": 3}, "rounds": 10,
        "steps": 15, "batch_real": 32, "server_epochs": 20, "batch": 32,
    },
    "paper": {
        "dataset": ["mnist", "cifar10"], "split": ["0.01", "0.1", "0.5", "iid"], "tries": 4, "given": PAPER_SEARCH,
        "others": None, "switched": "cifar10-dirichlet0.5", "train": None, "network": {"width": 128, "depth": 3},
        "rounds": 20, "steps": 1000, "batch_real": 256, "server_epochs": 500, "batch": 256,
    },
}  # fmt: skip
"""`tries`: largest number of searched configurations; `train`: number of training images; `batch`: batch size of
FedAvg's clients and of FedDM's server; `others`: number of splits on which FedProx, FedNova and SCAFFOLD run;
`switched`: task on which FedDM's options are varied."""

SOURCE = (
    "Xiong et al., CVPR 2023, Table 2 (alpha 0.1, 0.01), Table 3 (noise), Table 4 (rho), section 4.5 (ipc, Real): all "
    "images, ConvNet of width 128, 20 rounds, 1,000 steps; mean ± std of 3 seeds, after the last round."
)
_ROWS = ("FedAvg", "FedProx", "FedNova", "SCAFFOLD", "FedDM")
_TABLE_2 = {
    "mnist-dirichlet0.1": "96.92 ± 0.09|96.72 ± 0.04|98.04 ± 0.03|98.32 ± 0.06|98.67 ± 0.01",
    "cifar10-dirichlet0.1": "57.32 ± 0.04|56.92 ± 0.30|60.76 ± 0.14|60.96 ± 1.20|67.38 ± 0.32",
    "mnist-dirichlet0.01": "91.04 ± 0.80|91.18 ± 0.16|90.27 ± 0.49|88.37 ± 0.25|98.21 ± 0.23",
    "cifar10-dirichlet0.01": "39.28 ± 0.25|40.30 ± 0.15|36.46 ± 0.42|32.42 ± 1.13|63.82 ± 0.17",
}
PAPER: dict[str, dict[str, str]] = {task: dict(zip(_ROWS, row.split("|"))) for task, row in _TABLE_2.items()}
PAPER["cifar10-dirichlet0.1"]["FedDM from noise"] = "62.75 ± 0.24"
PAPER["cifar10-dirichlet0.01"]["FedDM from noise"] = "59.00 ± 0.26"
PAPER["cifar10-dirichlet0.5"] = {
    "SCAFFOLD": "66.12 ± 0.17", "FedDM": "69.66 ± 0.13", "FedDM from noise": "64.12 ± 0.15", "Real": "68.66 ± 0.08",
    "FedDM, rho 3": "69.15 ± 0.09", "FedDM, rho 5": "69.66 ± 0.13", "FedDM, rho 10": "69.32 ± 0.24",
    "FedDM, ipc 3": "53.64 ± 0.35", "FedDM, ipc 5": "62.24 ± 0.04",
}  # fmt: skip


def averaging(o: Any, *addons: AddOn, **given: Any) -> Federated:
    """Return FedAvg with add-ons. The option `--steps` replaces the epochs of each client."""

    def make(factory: Any, lr: float, epochs: int) -> Method:
        length: dict[str, Any] = {"epochs": epochs} if o.few is None else {"steps": o.few}
        return FedAvg(*addons, factory=factory, batch=o.batch, lr=lr, **length)

    return Federated(make, **given)


def headline(o: Any) -> dict[str, Federated]:
    """Return the candidates of the claim.

    Args:
        o: options of the command line.
    """
    sizes = {"ipc": 10, "batch_real": o.batch_real, "steps": min(o.few or o.steps, o.steps), "server_batch": o.batch}
    sizes["server_epochs"] = o.server_epochs if o.few is None else min(o.few, o.server_epochs)
    search = {name: own[: o.tries] for name, own in o.given.items()}
    return {
        "FedAvg": averaging(o, search=search["FedAvg"]),
        "FedDM": Federated(FedDM, search["FedDM"], sizes),
        "Real": Federated(Real, settings=sizes, like="FedDM"),
    }


def ablations(
    o: Any, tasks: list[str], averaged: Mapping[str, Any], matched: Mapping[str, Any]
) -> dict[str, Federated]:
    """Return the one-seed candidates: other averaging methods, other splits, and variants of FedDM on one split.

    Args:
        o: options of the command line.
        tasks: names of the tasks of a dataset, one per split. The first is the task of the claim.
        averaged: selected settings of FedAvg.
        matched: selected settings of FedDM.
    """
    others, switched = tasks[1:], tasks[:1] if o.pictures else [name for name in tasks if name == o.switched]
    found: dict[str, Federated] = {}
    for name, addon in {"FedProx": FedProx(0.01), "FedNova": FedNova(), "SCAFFOLD": SCAFFOLD()}.items():
        found[name] = averaging(o, addon, settings=averaged, tasks=tasks[: o.others])
    if others:
        found["FedAvg"] = averaging(o, settings=averaged, tasks=others)
        found["FedDM"] = Federated(FedDM, settings=matched, tasks=others)
        found["Real"] = Federated(Real, settings=matched, tasks=others)
    switches: dict[str, dict[str, Any]] = {f"FedDM, rho {rho}": {"rho": float(rho)} for rho in (3, 5, 10)}
    switches |= {f"FedDM, ipc {ipc}": {"ipc": ipc} for ipc in (3, 5)} | {"FedDM from noise": {"init": "noise"}}
    kept = {name: one for name, one in switches.items() if {**matched, **one} != dict(matched)}
    for name, one in kept.items() if switched else ():
        found[name] = Federated(FedDM, settings={**matched, **one}, tasks=switched)
    return found
