"""FedDM with differentially private clients, beside weight averaging under DP-SGD at the same epsilon.

    python examples/feddm.py --preset smoke
    python examples/feddm.py --dp class_means sums shares --epsilon 8 2 --split iid --dataset digits
    python examples/feddm.py --dp none

One record of one client is protected, over the whole run, by every row that states an epsilon; what it states is what
the run's own ledger says. Sigma comes from `plan`. Settings were chosen on other images (USPS; see `--tune`; the
results page says how many tries each method had). Noise comes from the operating system, so a run repeats up to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _options import command_line, parsed
from distillkit import LabeledImages
from distillkit.data import clients, load, partition
from distillkit.files import write_atomically
from distillkit.networks import ConvNet
from distillkit.normalization import Normalization
from distillkit.privacy import Ledger, gaussian_sigma, plan
from distillkit.rng import derive
from distillkit.study import git_commit, mean_std, show
from fl import ClientDP, FedAvg, FedDM, Filtered, Method, simulate
from fl.addons import DPSGD, SCAFFOLD, FedProx
from fl.methods import PrivateFedDM, SummedFedDM
from fl.study import Experiment

CLIENTS = 10
SIZE, WIDTH, DEPTH = 16, 16, 2
PUBLIC = Normalization([0.25], [0.4])
"""A guess at what scans of figures look like, measured on nothing."""

LOT = 120
"""Records in a step of DP-SGD, at most and in expectation: what larger clients can afford here. Not tuned."""

SHARE = 0.05
"""Of the Gaussian budget, for the histogram of class sizes."""

TITLES = {
    "class_means": "FedDM-DP, class means", "image_sgd": "FedDM-DP, image SGD", "sums": "FedDM-DP, sums",
    "shares": "FedDM-DP, sums, shared noise", "client_dp": "FedAvg, whole clients protected",
}  # fmt: skip
AVERAGING: dict[str, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    "FedAvg": lambda chosen: (),
    "FedProx": lambda chosen: (FedProx(chosen.pop("mu")),),
    "SCAFFOLD": lambda chosen: (SCAFFOLD(),),
}
SPLITS: dict[str, float | None] = {"iid": None, "dirichlet": 0.1}

_MEANS: dict[str, Any] = {
    "rounds": 3, "draws": 10, "steps": 100, "warm": True, "server_lr": 0.1, "rho": 5.0
}  # fmt: skip
_STEPS: dict[str, Any] = {"rounds": 20, "steps": 10, "rate": 0.5, "lr": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "class_means": _MEANS, "sums": {**_MEANS, "times": 5}, "shares": {**_MEANS, "times": 5},
    "image_sgd": {"rounds": 3, "steps": 20, "rate": 0.2, "lr": 0.3, "server_lr": 0.03, "rho": 5.0},
    "FedAvg": _STEPS, "FedProx": {**_STEPS, "mu": 0.1}, "SCAFFOLD": {**_STEPS, "rounds": 10},
    "client_dp": {"rounds": 10, "steps": 10, "batch": 32, "lr": 0.1, "clip": 0.3},
    "FedDM": {"rounds": 3, "steps": 30, "lr": 1.0, "server_lr": 0.1, "rho": 5.0},
}  # fmt: skip
"""The best tries of each on USPS (docs/results/feddm_private_tuning.json). `times` multiplies the server's epochs where
it trains on one set, not ten. For whole clients nothing was tried."""

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"seeds": [0], "rounds": 2, "steps": 2, "draws": 2, "server_epochs": 2, "records": 300},
    "cpu": {"seeds": [0, 1, 2], "server_epochs": 20},
    "paper": {"seeds": [0, 1, 2], "server_epochs": 500},
}


def method(name: str, chosen: dict[str, Any], epsilon: float | None, delta: float, size: int) -> Method:
    """One of the methods; with an epsilon for the whole run, of every client.

    Args:
        name: a key of SETTINGS.
        chosen: its settings, with `server_epochs`.
        epsilon: None: without privacy.
        delta: of the guarantee.
        size: a public number of records that a client is taken to have.
    """
    chosen = dict(chosen)
    rounds, server_epochs = chosen.pop("rounds"), chosen.pop("server_epochs") * chosen.pop("times", 1)
    convnet = partial(ConvNet, (1, SIZE, SIZE), width=WIDTH, depth=DEPTH)
    if name in AVERAGING:
        addons, rate = AVERAGING[name](chosen), chosen.pop("rate")
        if epsilon is None:
            return FedAvg(*addons, factory=convnet, batch=max(1, round(rate * size)), **chosen)
        sigma = plan(epsilon, delta, count=chosen["steps"] * rounds, rate=rate).sigma
        addons = (*addons, DPSGD(sigma=sigma, rate=rate, size=size))
        return FedAvg(*addons, factory=convnet, weights="uniform", **chosen)
    if name == "client_dp" and epsilon is not None:
        sigma, clip = plan(epsilon, delta, count=rounds).sigma, chosen.pop("clip")
        return Filtered(FedAvg(factory=convnet, weights="uniform", **chosen), ClientDP(sigma, 1.0, clip))
    chosen |= {"server_epochs": server_epochs, "server_batch": 32, "factory": convnet}
    if epsilon is None:
        return FedDM(batch_real=64, **chosen)
    sigma_sizes = gaussian_sigma(epsilon, delta) / SHARE**0.5 * (rounds**0.5 if name == "shares" else 1.0)
    histograms = [(sigma_sizes, 1.0, rounds if name == "shares" else 1)]
    if name == "image_sgd":
        noise = plan(epsilon, delta, count=chosen["steps"] * rounds, rate=chosen["rate"], spent=histograms)
        return PrivateFedDM(mechanism="image_sgd", sigma=noise.sigma, sigma_sizes=sigma_sizes, **chosen)
    chosen |= {"sigma_sizes": sigma_sizes, "weights": "samples"}
    chosen["sigma"] = plan(epsilon, delta, count=chosen["draws"] * rounds, spent=histograms).sigma
    return PrivateFedDM(**chosen) if name == "class_means" else SummedFedDM(noise=_NOISE[name], **chosen)


_NOISE: dict[str, Any] = {"sums": "full", "shares": "shares"}


def images(dataset: str, root: Path | None, records: int | None) -> tuple[LabeledImages, LabeledImages]:
    """Training images (so many of them, if said) and test images, normalised by public constants."""
    train, test = load(dataset, root=root, size=SIZE, normalization=PUBLIC)
    if records is not None:
        train = train[torch.randperm(len(train), generator=derive(0, "records"))[:records]]
    return train, test


def dealt(train: LabeledImages, split: str, seed: int) -> list[LabeledImages]:
    """What each client holds."""
    alpha = SPLITS[split]
    if alpha is None:
        return clients(train, partition.iid(train.labels, CLIENTS, generator=seed))
    return clients(train, partition.dirichlet(train.labels, CLIENTS, alpha, generator=seed))


def told(ledger: Ledger | None, row: dict[str, Any]) -> None:
    """Say how far a run is, and what every client has paid."""
    said = f"  round {row['round']}: {100 * row['accuracy']:.1f} %"
    if ledger is not None:
        paid = [ledger.epsilon(k) or 0.0 for k in range(CLIENTS)]
        said += f", epsilon of the {CLIENTS} clients {min(paid):.3f} to {max(paid):.3f}"
    print(said, flush=True)


def one(
    experiment: Experiment, arguments: argparse.Namespace, name: str, epsilon: float | None, seed: int
) -> dict[str, Any]:
    """One run; a finished one is only read."""
    preset, dataset, split = PRESETS[arguments.preset], arguments.dataset, arguments.split
    train, test = images(dataset, arguments.data, preset.get("records"))
    chosen = {**SETTINGS[name], "server_epochs": preset["server_epochs"]}
    chosen |= {k: preset[k] for k in ("rounds", "steps", "draws") if k in preset and k in chosen}
    delta, size = arguments.delta, round(len(train) / CLIENTS)
    if "rate" in chosen:
        chosen["rate"] = min(chosen["rate"], LOT / size)
    run = f"{dataset}-{split}-{name}-{'none' if epsilon is None else f'{epsilon:g}'}-{seed}".lower()
    print(f"{run}:", flush=True)
    facts = {
        "method": TITLES.get(name, name if epsilon is None else f"{name} with DP-SGD"), "task": dataset, "split": split,
        "seed": seed, "epsilon_wanted": epsilon, "delta": delta, "records": size, "settings": chosen,
        "command": f"python examples/feddm.py {' '.join(sys.argv[1:])}",
    }  # fmt: skip
    ledger = None if epsilon is None else Ledger(arguments.out / run / "ledger.jsonl", delta=delta)
    make = partial(method, name, chosen, epsilon, delta, size)
    return experiment.run(
        run, make, dealt(train, split, seed), facts=facts, rounds=chosen["rounds"], test=test, ledger=ledger,
        on_round=partial(told, ledger), progress=False,
    )  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """One row per dataset, split, method and epsilon; epsilon is the ledgers'."""
    header = ["data, split, method", "epsilon", "for one", "rounds", "accuracy %", "seeds", "MB up", "client CPU s"]
    rows = []
    for key in dict.fromkeys((x["task"], x["split"], x["method"], x["epsilon_wanted"]) for x in lines):
        own = [x for x in lines if (x["task"], x["split"], x["method"], x["epsilon_wanted"]) == key]
        stated = [x["epsilon"] for x in own]
        rows.append(
            [
                ", ".join(key[:3]),
                "–" if key[3] is None else "none" if None in stated else f"{max(stated):.3f}",
                "–" if key[3] is None else "client" if key[2] == TITLES["client_dp"] else "record",
                str(own[0]["rounds"]),
                mean_std([x["accuracy_last"] for x in own], 100),
                str(len(own)),
                mean_std([x["bytes_up"] for x in own], 1e-6, 2),
                mean_std([x["client_seconds"] for x in own]),
            ]
        )
    return show(header, rows)


CLOSING = """\
What an epsilon says here: one record of one client, over all rounds, against everybody who sees what that client
sends. The row with shared noise speaks only of those who see the sum over all clients, so it needs a secure sum, which
this program does not have: it simulates one. Whole clients are protected from those who see the models, not from the
server; among ten clients that leaves little to learn. No row covers the choice of the data set, the test accuracy
printed above, or settings tuned on these images; the ones here were chosen on others. Clients of some hundred records
pay for epsilon with much of their accuracy, whatever the method."""

_MEANS_TRIES: list[dict[str, Any]] = [
    {"rounds": 1, "draws": 20},
    {"rounds": 3, "draws": 10},
    {"rounds": 3, "draws": 10, "server_lr": 0.01},
    {"rounds": 3, "draws": 10, "warm": True},
    {"rounds": 5, "draws": 5},
    {"rounds": 5, "draws": 5, "warm": True},
    {"rounds": 3, "draws": 10, "warm": True, "server_lr": 0.1},
    {"rounds": 3, "draws": 20, "warm": True},
    {"rounds": 3, "draws": 10, "warm": True, "steps": 300},
]
_SUM_TRIES: list[dict[str, Any]] = [
    {"rounds": 3, "draws": 10, "warm": True, "server_lr": 0.1, "times": 5},
    {"rounds": 3, "draws": 10, "warm": True, "server_lr": 0.1, "ipc": 50},
]
_BATCHES = ((0.2, 0.5), (0.5, 0.5), (0.5, 2.0))
_IMAGE_TRIES = ((20, 0.03), (20, 0.1), (20, 0.3), (20, 1.0), (20, 3.0))
_STEPS_TRIES: list[dict[str, Any]] = [
    {"rounds": rounds, "rate": rate, "lr": lr} for rounds in (5, 10, 20) for rate, lr in _BATCHES
]
TRIES: dict[str, list[dict[str, Any]]] = {
    "class_means": _MEANS_TRIES,
    "sums": _MEANS_TRIES + _SUM_TRIES,
    "shares": _MEANS_TRIES + _SUM_TRIES,
    "image_sgd": [{"steps": steps, "lr": lr} for steps, lr in _IMAGE_TRIES],
    "FedAvg": _STEPS_TRIES,
    "FedProx": [{"rounds": 20, "rate": 0.5, "lr": 0.5, "mu": mu} for mu in (0.01, 0.1)],
    "SCAFFOLD": _STEPS_TRIES,
    "FedDM": [{"server_lr": lr, "rho": rho} for lr in (0.01, 0.03, 0.1) for rho in (5.0, 20.0)],
}


def tune(arguments: argparse.Namespace, epsilon: float) -> None:
    """Tries on as many USPS images, Dirichlet: nothing of the dataset itself is looked at."""
    train, test = images("usps", arguments.data, len(images(arguments.dataset, arguments.data, None)[0]))
    path, size = arguments.out / "tuning.json", round(len(train) / CLIENTS)
    found = json.loads(path.read_text()) if path.exists() else []
    for name, tries in TRIES.items():
        for settings in tries:
            if any((x["method"], x["tried"]) == (name, settings) for x in found):
                continue
            chosen = {**SETTINGS[name], "server_epochs": 20, **settings}
            began, goal = time.process_time(), None if name == "FedDM" else epsilon
            run = simulate(
                method(name, chosen, goal, arguments.delta, size), dealt(train, "dirichlet", 100),
                rounds=chosen["rounds"], test=test, seed=100, progress=False,
            )  # fmt: skip
            line = {"method": name, "tried": settings, "settings": chosen, "data": "usps", "records": size}
            line |= {"epsilon": goal, "accuracy_last": run.accuracy_last, "seconds": time.process_time() - began}
            found.append({**line, "commit": git_commit()})
            print(found[-1], flush=True)
            write_atomically(path, json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Run what the options ask for."""
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/feddm")
    add = parser.add_argument
    add("--dp", nargs="+", choices=["none", *TITLES], default=["class_means"], help="how FedDM's clients are private")
    add("--epsilon", type=float, nargs="+", default=[8.0], help="of the whole run, for every private row")
    add("--delta", type=float, default=1e-5)
    add("--dataset", choices=["digits", "mnist", "fashionmnist", "usps"], default="digits")
    add("--split", choices=tuple(SPLITS), default="dirichlet", help="of the training images over ten clients")
    add("--tune", action="store_true", help="try settings on other public images instead")
    arguments = parsed(parser)
    preset = PRESETS[arguments.preset]
    torch.set_num_threads(1)
    if arguments.tune:
        tune(arguments, arguments.epsilon[0])
        return
    experiment = Experiment(
        arguments.out, resume=arguments.resume, device=arguments.device, workers=arguments.workers
    )  # fmt: skip
    private = [] if arguments.dp == ["none"] else [n for n in arguments.dp if n != "none"] + [*AVERAGING]
    plain = ["FedDM", *([] if private else AVERAGING)]
    tasks = [
        (name, e, seed) for e in arguments.epsilon for name in private for seed in arguments.seeds or preset["seeds"]
    ]
    tasks += [(name, None, seed) for name in plain for seed in arguments.seeds or preset["seeds"]]
    began = time.perf_counter()
    with experiment.owned():
        lines = [one(experiment, arguments, *task) for task in tasks]
    text = table(lines)
    write_atomically(arguments.out / "table.md", f"{text}\n\n{CLOSING}\n")
    print(f"\n{text}\n\n{CLOSING}\n\nWritten to {arguments.out} in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
