"""Ten clients with different handwritten digits train one model: by weights, by distilled images, by raw images.

Run `make demo`, or `python examples/quickstart.py --help`. The default is a first look, one seed of the harder split;
`--preset cpu` makes the table of both splits and three seeds. Real digits (they ship with scikit-learn, nothing is
downloaded), split over ten clients by Dirichlet(0.1) and Dirichlet(0.01). FedAvg and FedProx send weights; FedDM sends
small synthetic sets; Real sends as many random raw images to the same server: the control that a distilled set has to
be measured against.
"""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _options import command_line, parsed
from distillkit import plot
from distillkit.data import clients, load, partition
from distillkit.files import write_atomically
from distillkit.networks import ConvNet
from distillkit.rng import derive
from distillkit.study import git_commit, mean_std, processes, show, spark
from fl import FedAvg, FedDM, Method, Real, simulate
from fl.addons import FedProx
from fl.engine.store import Store, read_history
from fl.study import Experiment

CLIENTS = 10
METHODS = ("FedAvg", "FedProx", "FedDM", "Real")
SPLITS = {"Dirichlet 0.1": 0.1, "Dirichlet 0.01": 0.01}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"seeds": [0], "rounds": 2, "epochs": 1, "steps": 2, "server_epochs": 2},
    "look": {"splits": ["Dirichlet 0.01"], "seeds": [0], "rounds": 10, "epochs": 5, "steps": 10, "server_epochs": 20},
    "cpu": {"seeds": [0, 1, 2], "rounds": 10, "epochs": 5, "steps": 10, "server_epochs": 20},
    "paper": {"seeds": [0, 1, 2], "rounds": 20, "epochs": 5, "steps": 1000, "server_epochs": 500},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": {"lr": 0.3},
    "FedProx": {"lr": 0.3, "mu": 0.01},
    "FedDM": {"server_lr": 0.03, "rho": 20.0},
}
"""The best of eight tries each on images held out of the training set (docs/results/quickstart_tuning.json), in which
FedAvg and FedProx both did best with the 5 local epochs of the presets; Real takes FedDM's."""

TRIES: dict[str, list[dict[str, Any]]] = {
    "FedAvg": [{"lr": lr, "epochs": epochs} for epochs in (1, 5) for lr in (0.03, 0.1, 0.3, 1.0)],
    "FedProx": [{"lr": lr, "epochs": n, "mu": mu} for n in (1, 5) for lr in (0.1, 0.3) for mu in (0.01, 0.1)],
    "FedDM": [{"server_lr": lr, "rho": rho} for lr in (0.003, 0.01, 0.03, 0.1) for rho in (5.0, 20.0)],
}


def convnet(outputs: int) -> ConvNet:
    """A ConvNet of two blocks, 14,826 parameters for ten classes."""
    return ConvNet((1, 16, 16), outputs, width=32, depth=2)


def method(name: str, preset: dict[str, Any], **settings: Any) -> Method:
    """One of the four methods; `settings` replace the tuned ones."""
    chosen = {**SETTINGS["FedDM" if name == "Real" else name], **settings}
    if name in ("FedDM", "Real"):
        kind = FedDM if name == "FedDM" else Real
        sizes = {"ipc": 10, "batch_real": 32, "steps": preset["steps"]}
        return kind(factory=convnet, server_batch=32, server_epochs=preset["server_epochs"], **sizes, **chosen)
    addons = (FedProx(chosen.pop("mu")),) if name == "FedProx" else ()
    return FedAvg(*addons, factory=convnet, batch=32, **{"epochs": preset["epochs"], **chosen})


def table(lines: list[dict[str, Any]]) -> str:
    """One row per split and method."""
    header = ["split, method", "last %", "best %", "MB up", "MB down", "client CPU s", "seconds"]
    rows = []
    for key in dict.fromkeys((x["split"], x["method"]) for x in lines):
        own = [x for x in lines if (x["split"], x["method"]) == key]
        rows.append(
            [
                ", ".join(key),
                mean_std([x["accuracy_last"] for x in own], 100),
                mean_std([x["accuracy_best"] for x in own], 100),
                *(mean_std([x[k] for x in own], 1e-6, 2) for k in ("bytes_up", "bytes_down")),
                *(mean_std([x[k] for x in own]) for k in ("client_seconds", "seconds")),
            ]
        )
    return show(header, rows)


CLOSING = """\
Local epochs a round: FedAvg {FedAvg}, FedProx {FedProx}. Rates, epochs (1 or 5) and FedProx's mu were tuned on images
held out.

What this shows: with strongly skewed clients and few rounds, a server that trains on images of every client learns
faster than one that averages weights, and with fewer bytes. What it does not show: that distillation is what helps.
At 10 images a class, random raw images (Real) do about as well, and those are the private data themselves; nor does
FedDM without its differentially private variant promise any privacy. With enough rounds FedAvg catches up."""


def closing(preset: dict[str, Any]) -> str:
    """What stands below the table of a run at this preset."""
    return CLOSING.format(**{name: {**preset, **SETTINGS[name]}["epochs"] for name in ("FedAvg", "FedProx")})


def pictures(out: Path, experiment: Experiment, lines: list[dict[str, Any]], train: Any) -> None:
    """Curves over rounds, bytes and client seconds for the hardest split, the partitions, and synthetic digits."""
    split = lines[-1]["split"]
    last = [x["run"] for x in lines if x["method"] == "FedDM" and x["split"] == split][-1]
    synthetic = Store(out / last).state()[FedDM.images]
    plot.real_and_synthetic(train, synthetic, per_class=8).savefig(out / "synthetic_digits.png", dpi=150)
    runs: dict[str, list[Any]] = {}
    for line in lines:
        if line["split"] == split:
            runs.setdefault(line["method"], []).append(experiment.rows[line["run"]])
    for x in ("round", "bytes_up", "client_seconds"):
        figure = plot.curves(runs, x=x)
        figure.axes[0].set_title(f"Digits, {CLIENTS} clients, {split}")
        figure.savefig(out / f"accuracy_by_{x}.png", dpi=150)
    for name, alpha in SPLITS.items():
        parts = partition.dirichlet(train.labels, CLIENTS, alpha, generator=0)
        plot.partition(train.labels, parts).savefig(out / f"partition_{name.split()[1]}.png", dpi=150)


def one(experiment: Experiment, preset: dict[str, Any], task: tuple[str, int, str]) -> dict[str, Any]:
    """One run, in a process of its own (a run is the same whatever runs beside it); finished ones are only read."""
    split, seed, name = task
    train, test = load("digits", size=16)
    held = clients(train, partition.dirichlet(train.labels, CLIENTS, SPLITS[split], generator=seed))
    facts = {"method": name, "task": "digits", "split": split, "seed": seed}
    make = partial(method, name, preset)
    run = f"{name.lower()}-{SPLITS[split]}-{seed}"
    return experiment.run(run, make, held, facts=facts, rounds=preset["rounds"], test=test, progress=False)


def equal_seconds(experiment: Experiment, lines: list[dict[str, Any]], preset: dict[str, Any]) -> str:
    """FedAvg with as many rounds as fit into the client seconds of FedDM's run, for every split and seed."""
    train, test = load("digits", size=16)
    found: dict[str, list[tuple[float, float, int]]] = {}
    for line in lines:
        if line["method"] == "FedDM":
            alpha, seed = SPLITS[line["split"]], line["seed"]
            held = clients(train, partition.dirichlet(train.labels, CLIENTS, alpha, generator=seed))
            run = line["run"].replace("feddm", "fedavg-long")
            facts = {"method": "FedAvg, more rounds", "task": "digits", "split": line["split"], "seed": seed}
            make = partial(method, "FedAvg", preset)
            experiment.run(run, make, held, facts=facts, rounds=6 * preset["rounds"], test=test)
            spent = list(itertools.accumulate(row["client_seconds"] for row in experiment.rows[run]))
            rounds = max(1, sum(s <= line["client_seconds"] for s in spent))
            accuracy = experiment.rows[run][rounds - 1]["accuracy"]
            found.setdefault(line["split"], []).append((line["accuracy_last"], accuracy, rounds))
    said = []
    for split, runs in found.items():
        ours, theirs, rounds = (list(column) for column in zip(*runs, strict=True))
        said.append(
            f"{split}, at equal client CPU seconds ({len(runs)} seeds): FedDM {mean_std(ours, 100)} %, FedAvg "
            f"{mean_std(theirs, 100)} % after {min(rounds)} to {max(rounds)} rounds."
        )
    return "\n".join(said)


def tune(out: Path, preset: dict[str, Any], workers: int, methods: list[str]) -> None:
    """Try every setting on a validation split, a fifth of the training images: Dirichlet 0.01, two seeds."""
    train, _ = load("digits", size=16)
    order = torch.randperm(len(train), generator=derive(0, "validation"))
    validation, rest = train[order[: len(train) // 5]], train[order[len(train) // 5 :]]
    found = []
    for name in methods:
        for settings in TRIES[name]:
            accuracies = []
            for seed in (100, 101):
                held = clients(rest, partition.dirichlet(rest.labels, CLIENTS, 0.01, generator=seed))
                run = simulate(
                    method(name, preset, **settings), held, rounds=preset["rounds"], test=validation, seed=seed,
                    workers=workers, progress=False,
                )  # fmt: skip
                accuracies.append(run.accuracy_last)
            found.append({"method": name, "settings": settings, "accuracy_last": accuracies, "commit": git_commit()})
            print(found[-1], flush=True)
            write_atomically(out / "tuning.json", json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Run what the options ask for."""
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/quickstart", presets=tuple(PRESETS))
    parser.set_defaults(preset="look")
    parser.add_argument("--equal-seconds", action="store_true", help="also give FedAvg FedDM's client seconds")
    parser.add_argument("--tune", action="store_true", help="try the settings on a validation split instead")
    parser.add_argument("--methods", nargs="+", choices=list(TRIES), metavar="M", help="with --tune: only these")
    arguments = parsed(parser)
    preset = PRESETS[arguments.preset]
    out = arguments.out
    if arguments.methods and not arguments.tune:
        parser.error("--methods is for --tune; a table has all four")
    if arguments.tune:
        tune(out, preset, arguments.workers, arguments.methods or list(TRIES))
        return
    began = time.perf_counter()
    train, _ = load("digits", size=16)
    seeds = arguments.seeds or preset["seeds"]
    splits = preset.get("splits", list(SPLITS))
    tasks = [(split, seed, name) for split in splits for seed in seeds for name in METHODS]
    print(f"{len(tasks)} runs; for each, as soon as it is done, accuracy by round (a full block is 100 %):", flush=True)
    experiment = Experiment(out, resume=arguments.resume, device=arguments.device)
    lines = []
    with experiment.owned():
        with processes(arguments.workers) as pool:
            for line in pool.map(partial(one, experiment, preset), tasks):
                lines.append(line)
                accuracy = f"{100 * line['accuracy_last']:.1f} % after round {line['rounds']}"
                curve = spark([row["accuracy"] for row in read_history(out / line["run"] / "history.jsonl")])
                said = f"{line['split']}, seed {line['seed']}, {line['method']}".ljust(32)
                print(f"{said} {curve} {accuracy}", flush=True)
        for line in lines:
            one(experiment, preset, (line["split"], line["seed"], line["method"]))  # reads the finished histories
        pictures(out, experiment, lines, train)
        text = table(lines)
        if arguments.equal_seconds:
            text += f"\n\n{equal_seconds(experiment, lines, preset)}"
        write_atomically(out / "table.md", f"{text}\n\n{closing(preset)}\n")
    print(f"\n{text}\n\n{closing(preset)}\n\nWritten to {out} in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
