"""Every federated method on the same ten clients: handwritten digits under Dirichlet(0.1), one table.

Run `python examples/methods.py --help`. Each client keeps a fifth of its digits for its own tests; a seventh of the
training images stays with the server, for the methods that need images there (nobody else sees them). Methods have
their papers' defaults where those make sense for ten short rounds, and FedAvg's rate otherwise; the few that were
tuned, and on what, stand in TRIES.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from _options import command_line, parsed
from distillkit import LabeledImages
from distillkit.data import clients, load, partition
from distillkit.data.split import hold_out
from distillkit.files import write_atomically
from distillkit.networks import ConvNet
from distillkit.study import git_commit, mean_std, show
from fl import AddOn, FedAvg, FedDM, Holding, Method, Real, simulate
from fl.addons import (
    MOON,
    SCAFFOLD,
    VFA,
    VFTL,
    VHL,
    Condensed,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedCOG,
    FedDecorr,
    FedDF,
    FedExP,
    FedGen,
    FedNova,
    FedProx,
    FedReg,
    FedSAM,
    FedYogi,
    FineTune,
    NaiveVHL,
)
from fl.methods import FedLGD, FedProto, FedRep, SingleImage
from fl.study import Experiment

CLIENTS, ALPHA = 10, 0.1
Settings = dict[str, Any]
PRESETS: dict[str, Settings] = {
    "smoke": {"seeds": [0], "rounds": 2, "epochs": 1, "late": 2, "cut": 20},
    "cpu": {"seeds": [0, 1, 2], "rounds": 10, "epochs": 1, "late": 9, "cut": 1},
}
"""`late` is the round in which FedCOG begins to generate; `cut` divides the numbers of distillation steps."""

TRIES: dict[str, tuple[Settings, ...]] = {
    "FedAvg": tuple({"lr": lr} for lr in (0.03, 0.1, 0.2, 0.3)),
    "FedAdam": tuple({"lr": lr} for lr in (0.003, 0.01, 0.03)),
    "FedYogi": tuple({"lr": lr} for lr in (0.003, 0.01, 0.03)),
    "FedAdagrad": tuple({"lr": lr} for lr in (0.01, 0.03, 0.1)),
    "FedAvgM": tuple({"momentum": beta} for beta in (0.3, 0.6, 0.9)),
    "SCAFFOLD": tuple({"lr": lr} for lr in (0.03, 0.1, 0.3)),
    "FedNova": tuple({"lr": lr} for lr in (0.1, 0.3)),
    "FedSAM": tuple({"rho": rho} for rho in (0.01, 0.05)),
    "FedReg": tuple({"eta": eta, "lr": lr} for eta in (0.1, 0.2) for lr in (0.1, 0.3)),
    "FedDecorr": tuple({"beta": beta, "lr": lr} for beta in (0.05, 0.1) for lr in (0.1, 0.3)),
    "VFA": tuple({"weight": weight, "lr": lr} for weight in (0.1, 1.0) for lr in (0.1, 0.3)),
    "Single image, rate 1": tuple({"server": a, "clients": b} for a in (0.0005, 0.005) for b in (0.003, 0.01)),
    "FedGen": ({"alpha": 1.0, "beta": 1.0}, {"alpha": 0.1, "beta": 0.1}, {"alpha": 0.1, "beta": 0.0}),
    "FedLGD": tuple({"weight": weight} for weight in (0.1, 1.0)),
}
TUNED: dict[str, Settings] = {
    "FedAvg": {"lr": 0.2}, "FedAdam": {"lr": 0.03}, "FedYogi": {"lr": 0.03}, "FedAdagrad": {"lr": 0.03},
    "FedAvgM": {"momentum": 0.9}, "SCAFFOLD": {"lr": 0.3}, "FedNova": {"lr": 0.3},
    "FedSAM": {"rho": 0.01}, "FedReg": {"eta": 0.2, "lr": 0.3}, "FedGen": {"alpha": 0.1, "beta": 0.1},
    "FedLGD": {"weight": 1.0}, "FedDecorr": {"beta": 0.05, "lr": 0.1}, "VFA": {"weight": 0.1, "lr": 0.3},
    "Single image, rate 1": {"server": 0.0005, "clients": 0.003},
}  # fmt: skip
"""What `--tune` chose on images held out of the training set (see TRIES)."""

PERSONAL = ("FedProto", "FedProto, distance as released", "FedRep", "Ditto", "Fine-tuned FedAvg")
"""Methods made for the clients' own tests, not for a global model."""


def narrow(outputs: int) -> ConvNet:
    """A ConvNet of two blocks, half as wide."""
    return ConvNet((1, 16, 16), outputs, width=16, depth=2)


def convnet(outputs: int) -> ConvNet:
    """A ConvNet of two blocks, 14,826 parameters for ten classes."""
    return ConvNet((1, 16, 16), outputs, width=32, depth=2)


def photograph() -> torch.Tensor:
    """A grey photograph that ships with scikit-learn, [1, 427, 640]."""
    from sklearn.datasets import load_sample_image

    return torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1).float().mean(0, keepdim=True) / 255


def methods(preset: Settings, tuned: dict[str, Settings]) -> dict[str, Callable[[], Method]]:
    """Every method's name and how to build it, in the order of the table: the papers' first, then their variants."""
    cut: Callable[[int], int] = lambda steps: max(1, steps // preset["cut"])  # noqa: E731
    common: Settings = {"factory": convnet, **tuned["FedAvg"], "batch": 32, "epochs": preset["epochs"]}
    noise: Settings = {"per_class": 50, "options": {"width": 16}}
    cog = FedCOG(start_round=preset["late"], images=64, steps=cut(50))
    condensed = Condensed(ipc=10, steps=cut(50), refine_steps=0, batch_real=32)
    rates = tuned["Single image, rate 1"]
    shared: Settings = {"keep": 400, "count": 4000, "steps": cut(60), "lr": rates["server"]}
    adam: Settings = {"optimizer": "adam", "lr": rates["clients"], "epochs": 3 * preset["epochs"], "batch": 32}
    two: Settings = {"factory": {"narrow": narrow, "wide": convnet}, "assign": lambda k: ("narrow", "wide")[k % 2]}
    sizes: Settings = {"ipc": 10, "batch_real": 32, "steps": cut(10), "server_batch": 32, "server_epochs": cut(20)}
    feddm: Settings = {"factory": convnet, "server_lr": 0.03, "rho": 20.0, **sizes}
    lgd: Settings = {"ipc": 10, "condense_steps": cut(50), "refine_steps": cut(10), "match_steps": cut(50)}

    def split(name: str, option: str) -> tuple[Any, Settings]:
        """An option of an add-on, and the other settings, which are FedAvg's."""
        return tuned[name][option], {key: value for key, value in tuned[name].items() if key != option}

    (beta, decorr), (eta, reg), (weight, vfa) = (
        split(*key) for key in (("FedDecorr", "beta"), ("FedReg", "eta"), ("VFA", "weight"))
    )

    def averaging(*addons: AddOn, **others: Any) -> Callable[[], Method]:
        return lambda: FedAvg(*addons, **{**common, **others})

    def shared_image(*addons: AddOn, rate: float, **others: Any) -> Callable[[], Method]:
        arguments = {"factory": convnet, **adam, **others}
        return lambda: SingleImage(photograph(), *addons, shared={**shared, "rate": rate}, **arguments)

    return {
        "FedAvg": averaging(**tuned["FedAvg"]),
        "FedProx": averaging(FedProx(0.1)),
        "SCAFFOLD": averaging(SCAFFOLD(), weights="uniform", **tuned["SCAFFOLD"]),
        "FedNova": averaging(FedNova(), **tuned["FedNova"]),
        "FedAvgM": averaging(FedAvgM(**tuned["FedAvgM"])),
        "FedAdam": averaging(FedAdam(**tuned["FedAdam"])),
        "FedYogi": averaging(FedYogi(**tuned["FedYogi"])),
        "FedAdagrad": averaging(FedAdagrad(**tuned["FedAdagrad"])),
        "FedExP": averaging(FedExP()),
        "MOON": averaging(MOON(1.0)),
        "FedSAM": averaging(FedSAM(**tuned["FedSAM"])),
        "FedDecorr": averaging(FedDecorr(beta), **decorr),
        "FedReg": averaging(FedReg(eta=eta), weights="uniform", **reg),
        "FedGen": averaging(FedGen(**tuned["FedGen"])),
        "FedDF": averaging(FedDF(steps=cut(60), batch=32)),
        "Ditto": averaging(Ditto(0.1)),
        "Fine-tuned FedAvg": averaging(FineTune()),
        "FedRep": lambda: FedRep(head_epochs=5, momentum=0.0, **{k: v for k, v in common.items() if k != "epochs"}),
        "FedProto": lambda: FedProto(**common),
        "FedProto, distance as released": lambda: FedProto(**common, lam=1 / 512),
        "VHL": averaging(VHL(**noise)),
        "FedCOG": averaging(cog),
        "FedLGD": lambda: FedLGD(**lgd, **tuned["FedLGD"], **common),
        "FedDM": lambda: FedDM(**feddm),
        "Real": lambda: Real(**feddm),
        "Single image, rate 1": shared_image(rate=1.0),
        "Naive VHL": averaging(NaiveVHL(**noise)),
        "VFA": averaging(VFA(weight), **vfa),
        "VFTL": averaging(VFTL(**noise)),
        "FedAvg on condensed data": averaging(condensed),
        "SCAFFOLD on condensed data": averaging(condensed, SCAFFOLD(), weights="uniform"),
        "FedNova on condensed data": averaging(condensed, FedNova()),
        "VHL, upsampled noise": averaging(VHL(source="gaussian", per_class=50)),
        "VHL, noise of a CNN": averaging(VHL(source="cnn", per_class=50)),
        "VHL with FedProx": averaging(VHL(**noise), FedProx(0.1)),
        "VHL with SCAFFOLD": averaging(VHL(**noise), SCAFFOLD(), weights="uniform"),
        "VHL with FedNova": averaging(VHL(**noise), FedNova()),
        "FedCOG with FedAvgM": averaging(cog, FedAvgM(**tuned["FedAvgM"])),
        "FedCOG with FedProx": averaging(cog, FedProx(0.1)),
        "FedCOG with SCAFFOLD": averaging(cog, SCAFFOLD(), weights="uniform"),
        "FedCOG with MOON": averaging(cog, MOON(1.0)),
        "Single image, rate 0.2": shared_image(rate=0.2),
        "Single image with FedProx, rate 1": shared_image(FedProx(0.1), rate=1.0),
        "Single image, two architectures, rate 1": shared_image(rate=1.0, **two),
        "FedDF, two architectures": averaging(FedDF(steps=cut(60), batch=32), **two),
    }


def federation(train: LabeledImages, seed: int) -> list[Holding]:
    """Ten clients with a fifth of each class kept for their own tests."""
    held = clients(train, partition.dirichlet(train.labels, CLIENTS, ALPHA, generator=seed))
    parts = [(data, *hold_out(data.labels, 0.2)) for data in held]
    return [Holding(data[kept], data[test] if len(test) else None) for data, kept, test in parts]


def own_accuracy(row: Settings) -> float:
    """The mean over clients on their own tests: of their personal models where there are some, else of the global."""
    found = row.get("accuracy_personal") or row["accuracy_clients"]
    return float(found["mean"])


def merged(lines: Sequence[Settings], command: str) -> list[Settings]:
    """One object a method: a list over seeds for what differs between them."""
    found = []
    varying = ("accuracy_last", "accuracy_best", "accuracy_own", "bytes_up", "bytes_down", "client_seconds", "seconds")
    for name in dict.fromkeys(line["method"] for line in lines):
        own = [line for line in lines if line["method"] == name]
        commits = sorted({line["commit"] for line in own if line["commit"]})
        columns = {key: [line[key] for line in own] for key in varying}
        failed = sum(line["failed"] for line in own)
        found.append(
            {
                "method": name, "seeds": [line["seed"] for line in own], "rounds": own[0]["rounds"], **columns,
                "failed": failed, "command": command, "commit": commits,
            }
        )  # fmt: skip
    return found


def table(rows: Sequence[Settings]) -> str:
    """One row a method: means over seeds, with the standard deviation where there are several."""
    header = ["method", "seeds", "last %", "best %", "own tests %", "MB up", "MB down", "client CPU s"]
    lines = []
    for row in rows:
        shares = [mean_std(row[k], 100) for k in ("accuracy_last", "accuracy_best", "accuracy_own")]
        megabytes = [f"{statistics.mean(row[k]) / 1e6:.2f}" for k in ("bytes_up", "bytes_down")]
        seconds = f"{statistics.mean(row['client_seconds']):.0f}"
        lines.append([row["method"], str(len(row["seeds"])), *shares, *megabytes, seconds])
    return show(header, lines)


def behind(rows: Sequence[Settings]) -> str:
    """The methods that trail FedAvg by more than three points, personal ones by their clients' own tests."""
    by_name = {row["method"]: row for row in rows}
    said = []
    for name, row in by_name.items():
        key = "accuracy_own" if name in PERSONAL else "accuracy_last"
        pairs = dict(zip(by_name["FedAvg"]["seeds"], by_name["FedAvg"][key])) if "FedAvg" in by_name else {}
        gaps = [100 * (pairs[seed] - own) for seed, own in zip(row["seeds"], row[key]) if seed in pairs]
        if gaps and statistics.mean(gaps) > 3:
            said.append(f"{name} ({statistics.mean(gaps):.1f})")
    return f"Behind FedAvg by more than 3 points: {', '.join(said) or 'none'}."


def tune(preset: Settings, train: LabeledImages, proxy: LabeledImages, names: Sequence[str], out: Path) -> None:
    """Every try of TRIES on a fifth of the training images, held out: one seed that the table does not have."""
    kept, held = hold_out(train.labels, 0.2)
    found = []
    for name in names:
        for settings in TRIES[name]:
            method = methods(preset, {**TUNED, name: settings})[name]()
            run = simulate(
                method, federation(train[kept], 100), rounds=preset["rounds"], test=train[held], seed=100,
                server_data={"proxy": proxy}, evaluate="none", progress=False,
            )  # fmt: skip
            found.append(
                {"method": name, "settings": settings, "accuracy_last": run.accuracy_last, "commit": git_commit()}
            )
            print(found[-1], flush=True)
            write_atomically(out / "tuning.json", json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Run what the options ask for."""
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/methods", presets=tuple(PRESETS))
    parser.add_argument("--methods", nargs="+", default=None, metavar="NAME", help="only these")
    parser.add_argument("--tune", action="store_true", help="try the settings of TRIES on held-out images instead")
    arguments = parsed(parser)
    preset, began = PRESETS[arguments.preset], time.perf_counter()
    out = arguments.out
    known, test = load("digits", size=16)
    kept, held = hold_out(known.labels, 1 / 7)
    train, proxy = known[kept], known[held]
    if arguments.tune:
        tune(preset, train, proxy, [n for n in TRIES if n in (arguments.methods or TRIES)], out)
        return
    chosen = methods(preset, TUNED)
    unknown = sorted(set(arguments.methods or ()) - set(chosen))
    if unknown:
        parser.error(f"--methods must be among {', '.join(chosen)}, got {', '.join(unknown)}")
    experiment = Experiment(out, resume=arguments.resume, device=arguments.device, workers=arguments.workers)
    command = f"python {shlex.join(sys.argv)}"
    lines: list[Settings] = []
    with experiment.owned():
        for seed in arguments.seeds or preset["seeds"]:
            clients_of_seed = federation(train, seed)
            for name in arguments.methods or chosen:
                run = f"{name.lower().replace(',', '').replace(' ', '-')}-{seed}"
                facts = {"method": name, "task": "digits", "split": f"Dirichlet {ALPHA}", "seed": seed}
                line = experiment.run(
                    run, chosen[name], clients_of_seed, facts=facts, rounds=preset["rounds"], test=test,
                    server_data={"proxy": proxy},
                )  # fmt: skip
                own = own_accuracy(experiment.rows[run][-1])
                lines.append({**line, "accuracy_own": own})
                rows = merged(sorted(lines, key=lambda x: list(chosen).index(x["method"])), command)
                write_atomically(out / "methods.json", json.dumps(rows, indent=1) + "\n")
                write_atomically(out / "table.md", f"{table(rows)}\n\n{behind(rows)}\n")
                print(
                    f"seed {seed}, {name}: {100 * line['accuracy_last']:.1f} %, own tests {100 * own:.1f} %", flush=True
                )
    print(f"\n{table(rows)}\n\n{behind(rows)}\n\nWritten to {out} in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
