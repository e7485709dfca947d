"""Private candidates: FedDM with noise on the clients, and weight averaging under DP-SGD.

In every row with an epsilon, the guarantee protects one record of one client over the whole run. The epsilon is
computed from the run's ledger. Every row searches six configurations at its own epsilon. The search uses other images
than the table: as many images of USPS as there are digits, in a Dirichlet partition. Noise comes from the operating
system, so a repeated run has other noise. The preset `smoke` has one configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distillkit import Normalization
from distillkit.data import partition
from distillkit.privacy import gaussian_sigma, plan_noise
from distillkit.study import Study, Task, grid
from fl import ClientDP, FedAvg, FedDM, Filtered, Method
from fl.addons import DPSGD, SCAFFOLD, FedProx
from fl.methods import PrivateFedDM, SummedFedDM
from fl.study import Federated
from shared.datasets import load_private

CLIENTS, DELTA = 10, 1e-5
RECORDS = {"digits": 1438, "mnist": 60_000, "fashionmnist": 60_000, "public": 1438}  # public numbers
DATASETS = tuple(name for name in RECORDS if name != "public")
LOT = 120  # maximum expected number of records in a step of DP-SGD; limits the cost of larger clients; not tuned
SHARE = 0.05  # share of the Gaussian budget for the histogram of class sizes
TITLES = {
    "class_means": "FedDM-DP, class means", "image_sgd": "FedDM-DP, image SGD", "sums": "FedDM-DP, sums",
    "shares": "FedDM-DP, sums, shared noise", "client_dp": "FedAvg, whole clients protected",
}  # fmt: skip
_MEANS: list[dict[str, Any]] = [
    {"rounds": 1, "num_networks": 20, "server_lr": 0.03, "warm": False},
    {"rounds": 3, "num_networks": 10, "server_lr": 0.01},
    {"rounds": 3, "num_networks": 10, "server_lr": 0.1}, {"rounds": 3, "num_networks": 20, "server_lr": 0.03},
    {"rounds": 5, "num_networks": 5, "server_lr": 0.03}, {"rounds": 5, "num_networks": 5, "server_lr": 0.1},
]  # fmt: skip
_SUMS = [{"times": times, **settings} for times, settings in zip((5, 5, 5, 1, 5, 1), _MEANS)]
_STEPS = [{"rounds": rounds, "rate": rate, "lr": 0.5} for rounds in (10, 20, 40) for rate in (0.2, 0.5)]
SEARCH: dict[str, list[dict[str, Any]]] = {
    "class_means": _MEANS, "sums": _SUMS, "shares": _SUMS, "FedAvg": _STEPS, "SCAFFOLD": _STEPS,
    "FedProx": grid(rounds=[20, 40], rate=[0.5], lr=[0.5], mu=[0.01, 0.1, 1.0]),
    "image_sgd": grid(rounds=[3], steps=[10, 20], lr=[0.03, 0.1, 0.3]),
    "client_dp": grid(rounds=[10], clip=[0.1, 0.3, 1.0], lr=[0.03, 0.1]),
    "FedDM": grid(rounds=[3], server_lr=[0.01, 0.03, 0.1], rho=[5.0, 20.0]),
}  # fmt: skip
"""Six configurations each. `rate`: sampling rate of DP-SGD; `times`: factor of the server's epochs, for methods
in which the server trains on one set instead of ten."""

COMMON: dict[str, Any] = {"dataset": ["digits"], "split": ["dirichlet"], "records": None}
PRIVATE: dict[str, dict[str, Any]] = {
    "smoke": COMMON | {"server_epochs": 2, "records": 300},
    "cpu": COMMON | {"server_epochs": 20}, "paper": COMMON | {"server_epochs": 500},
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {
    "class_means": {"steps": 100, "warm": True, "rho": 5.0}, "image_sgd": {"rate": 0.2, "server_lr": 0.03, "rho": 5.0},
    "FedDM": {"steps": 30, "lr": 1.0}, "client_dp": {"steps": 10, "batch": 32},
}  # fmt: skip
ADDONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "FedAvg": lambda mu: (), "FedProx": lambda mu: (FedProx(mu),), "SCAFFOLD": lambda mu: (SCAFFOLD(),)
}  # fmt: skip


def method(
    name: str, epsilon: float | None, server_epochs: int, records: int | None, factory: Any, task: Task,
    rounds: int, times: int = 1, **tried: Any,
) -> Method:  # fmt: skip
    """Return one of the methods. If `epsilon` is given, the method protects each client over the whole run."""
    size = (records or RECORDS[task.name.split("-")[0]]) // CLIENTS
    chosen = {**FIXED.get("class_means" if name in ("sums", "shares") else name, {"steps": 10}), **tried}
    if "rate" in chosen:
        chosen["rate"] = min(chosen["rate"], LOT / size)
    if name in ADDONS:
        addons, rate = ADDONS[name](chosen.pop("mu", 0.0)), chosen.pop("rate")
        if epsilon is None:
            return FedAvg(*addons, factory=factory, batch=max(1, round(rate * size)), **chosen)
        sigma = plan_noise(epsilon, DELTA, count=chosen["steps"] * rounds, rate=rate).sigma
        return FedAvg(*addons, DPSGD(sigma=sigma, rate=rate, size=size), factory=factory, weights="uniform", **chosen)
    if name == "client_dp" and epsilon is not None:
        sigma, clip = plan_noise(epsilon, DELTA, count=rounds).sigma, chosen.pop("clip")
        return Filtered(FedAvg(factory=factory, weights="uniform", **chosen), ClientDP(sigma, 1.0, clip))
    chosen |= {"server_epochs": server_epochs * times, "server_batch": 32, "factory": factory}
    if epsilon is None:
        return FedDM(batch_real=64, **chosen)
    sigma_sizes = gaussian_sigma(epsilon, DELTA) / SHARE**0.5 * (rounds**0.5 if name == "shares" else 1.0)
    histograms = [(sigma_sizes, 1.0, rounds if name == "shares" else 1)]
    if name == "image_sgd":
        noise = plan_noise(epsilon, DELTA, count=chosen["steps"] * rounds, rate=chosen["rate"], spent=histograms)
        return PrivateFedDM(mechanism="image_sgd", sigma=noise.sigma, sigma_sizes=sigma_sizes, **chosen)
    chosen |= {"sigma_sizes": sigma_sizes, "weights": "samples"}
    chosen["sigma"] = plan_noise(epsilon, DELTA, count=chosen["num_networks"] * rounds, spent=histograms).sigma
    if name == "class_means":
        return PrivateFedDM(**chosen)
    return SummedFedDM(noise="full" if name == "sums" else "shares", **chosen)


def private_study(o: Any) -> Study:
    """Return a study of FedDM without privacy, and of private FedDM and DP-SGD weight averaging at each epsilon."""
    smoke, network = {"rounds": 2, "steps": 2}, {"width": 16, "depth": 2}

    def candidate(name: str, epsilon: float | None) -> Federated:
        search = SEARCH[name] if o.preset != "smoke" else [{**SEARCH[name][2], **smoke}]
        return Federated(partial(method, name, epsilon, o.server_epochs, o.records), search=search, delta=DELTA)

    private = [] if o.dp == ["none"] else [*(name for name in o.dp if name != "none"), *ADDONS]
    candidates = {
        f"{TITLES.get(n, f'{n} with DP-SGD')}, epsilon {e:g}": candidate(n, e) for e in o.epsilon for n in private
    }
    candidates |= {name: candidate(name, None) for name in ["FedDM", *([] if private else ADDONS)]}
    dirichlet = partial(partition.dirichlet, clients=CLIENTS, alpha=0.1)
    assign = dirichlet if o.split == "dirichlet" else partial(partition.iid, clients=CLIENTS)
    fixed: Any = {"size": 16, "normalization": Normalization([0.25], [0.4]), "draw": "records"}
    read = partial(load_private, o.dataset, o.data, o.records, **fixed)
    task = Task(f"{o.dataset}-{o.split}", read, assign, factory_options=network)
    public = Task(
        "public", partial(load_private, "usps", o.data, RECORDS["public"], **fixed), dirichlet, factory_options=network
    )
    return Study(o.out, task, candidates, seeds=o.seeds, tune_on=None if o.preset == "smoke" else public)


PRIVATE_COSTS = ("relation", "rounds", "bytes_up", "client_seconds")
CLOSING = """\
An epsilon here protects one record of one client, over all rounds, against everybody who sees that client's messages.
With shared noise, it protects only against those who see the sum over all clients. Such a run needs a secure sum, which
this program only simulates. Protection of whole clients is against those who see the models, not against the server;
with only ten clients it leaves little to learn. No epsilon covers the choice of the dataset or its test accuracy."""
