"""Differentially private condensed sets beside sets without privacy, random images and all the data.

    python examples/private_sets.py --preset smoke
    python examples/private_sets.py --dataset digits --epsilons 8 4 1 --workers 2
    python examples/private_sets.py --dataset mnist --methods class_means --set ipc=50 --data ~/data

For every seed and method a set is made from the training images, and networks trained from scratch on it are tested
(last iterate, mean of several). The noise comes from the operating system, so the stated epsilon holds for each set,
and a run repeats up to its noise. Epsilon is what the run's own ledger says; it covers one set, not the whole table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _options import command_line, parsed
from distillkit import LabeledImages
from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.condense import distribution_matching, random_subset
from distillkit.data import load
from distillkit.evaluate import evaluate
from distillkit.files import write_atomically
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.normalization import Normalization
from distillkit.owner import owned
from distillkit.privacy import Ledger, condense_private, image_sgd, plan
from distillkit.rng import derive
from distillkit.study import git_commit, mean_std, processes, show
from distillkit.training import Protocol

METHODS = ("class_means", "image_sgd", "class_means_clean", "dm", "random", "all")
TITLES = {
    "class_means": "class means",
    "image_sgd": "image SGD",
    "class_means_clean": "class means without noise",
    "dm": "distribution matching from real images",
    "random": "random real images",
    "all": "all real images",
}

DIGITS_AT_16: dict[str, Any] = {
    "size": 16,
    "records": None,  # take only so many training images
    "normalization": (0.1307, 0.3081),
    "delta": 1e-5,
    "ipc": 10,
    "width": 32,
    "depth": 2,
    "class_means": {"draws": 20, "steps": 200, "lr": 200.0, "first_steps": 100},
    "image_sgd": {"rate": 0.05, "steps": 300, "lr": 0.1, "epsilons": [8.0]},
    "dm": {"steps": 300, "lr": 1.0, "batch_real": 64},
    "test": {"nets": 3, "epochs": 75, "batch": 25, "lr": 0.03, "augment": DIGITS, "epochs_all": 20, "images": None},
}
"""Images of 16x16, a small ConvNet, and a normalization that is a public constant, no statistic of private images."""

FULL: dict[str, Any] = {
    **DIGITS_AT_16,
    "size": 28,
    "normalization": (0.0, 0.35),
    "width": 64,
    "depth": 3,
    "bfloat16": True,
    "class_means": {
        "draws": 4, "steps": 300, "lr": 200.0, "first_draws": 3, "first_steps": 150, "passes": 3, "augment": True,
        "train": {"epochs": 60, "batch": 25},
    },
    "test": {**DIGITS_AT_16["test"], "width": 128, "nets": 2, "epochs": 250, "lr": 0.01},
}  # fmt: skip
"""Images of 28x28, 60,000 of them, where noise is small: networks of a later pass learn from the set before it."""

DATASETS: dict[str, dict[str, Any]] = {
    "digits": DIGITS_AT_16,
    "mnist28": {**FULL, "name": "mnist"},
    "fashionmnist28": {**FULL, "name": "fashionmnist", "test": {**FULL["test"], "augment": NATURAL}},
    "mnist": DIGITS_AT_16,
    "usps": DIGITS_AT_16,
    "fashionmnist": {**DIGITS_AT_16, "test": {**DIGITS_AT_16["test"], "augment": NATURAL}},
}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "seeds": [0],
        "epsilons": [8.0],
        "set": {
            "width": 8, "ipc": 2, "class_means.draws": 2, "class_means.steps": 3, "class_means.first_steps": 2,
            "image_sgd.steps": 2, "image_sgd.rate": 0.02, "dm.steps": 2,
            "test.nets": 1, "test.epochs": 2, "test.epochs_all": 1,
        },
    },
    "cpu": {"seeds": [0, 1, 2], "epsilons": [8.0, 4.0, 1.0], "set": {}},
    "paper": {"seeds": list(range(10)), "epsilons": [8.0, 4.0, 1.0], "set": {"test.nets": 5}},
}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/private-sets")
    add = parser.add_argument
    add("--dataset", choices=tuple(DATASETS), default="digits")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--epsilons", type=float, nargs="+", help="of class means; default: the preset's")
    add(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the dataset, as in class_means.steps=100"
    )
    parser.set_defaults(workers=1)
    options = parsed(parser, argv)
    preset = PRESETS[options.preset]
    options.seeds = options.seeds or preset["seeds"]
    options.epsilons = options.epsilons or preset["epsilons"]
    own = {key: json.loads(value) for key, value in (text.split("=", 1) for text in options.set)}
    options.settings = changed(DATASETS[options.dataset], {**preset["set"], **own})
    options.command = " ".join(["python", "examples/private_sets.py", *(sys.argv[1:] if argv is None else argv)])
    return options


def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings with `{"dm.lr": 2.0}` put in place; only keys that are there already."""
    settings = json.loads(json.dumps(settings))
    for key, value in changes.items():
        inner, *rest = reversed(key.split("."))
        place = settings
        for name in reversed(rest):
            place = place[name]
        if inner not in place:
            raise SystemExit(f"--set {key}: there is only {', '.join(place)}")
        place[inner] = value
    return settings


def data(dataset: str, settings: dict[str, Any], root: Path | None, device: str) -> tuple[LabeledImages, LabeledImages]:
    """Training and test images in a normalisation that owes nothing to them."""
    mean, std = settings["normalization"]
    public, name = Normalization([mean], [std]), settings.get("name", dataset)
    parts = load(name, root=root, size=settings["size"], normalization=public)
    limits = (settings["records"], settings["test"]["images"])
    train, test = (
        part if limit is None else part[torch.randperm(len(part), generator=derive(0, "part"))[:limit]]
        for part, limit in zip(parts, limits, strict=True)
    )
    return train.to(device), test.to(device)


class Bfloat16(torch.nn.Module):
    """A network that computes in bfloat16 and gives float32: on recent CPUs in half the time.

    A private map normalises what it gets from here, in float32, so what one record can change stays bounded by 1.
    """

    def __init__(self, network: ConvNet) -> None:
        super().__init__()
        self.network, self.classifier = network, network.classifier

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Embeddings."""
        # Without the cache: it would keep the rounded weights across the steps of a training.
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            return self.network.features(images).float()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.classifier(self.features(images))


class Maker:
    """Makes the set of every row from the same images, with the settings of the dataset."""

    def __init__(self, settings: dict[str, Any], real: LabeledImages) -> None:
        self.settings, self.real, self.ipc = settings, real, settings["ipc"]

    def network(self, width: int | None = None) -> torch.nn.Module:
        """An untrained network, where the images are."""
        s, real = self.settings, self.real
        network = ConvNet(real.shape, real.num_classes, width=width or s["width"], depth=s["depth"]).to(real.images)
        return Bfloat16(network) if s.get("bfloat16") else network

    def make(self, method: str, epsilon: float | None, seed: int, ledger: Ledger) -> LabeledImages:
        """The images that the tested networks train on; the private ones are charged to `ledger`."""
        own, real = dict(self.settings.get(method.removesuffix("_clean"), {})), self.real
        own.pop("epsilons", None)
        augment = DSA(self.settings["test"]["augment"])
        if own.get("augment"):
            own["augment"] = augment
        if own.get("train"):
            own["train"] = Protocol(**own["train"], augment=augment)
        private: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": ledger.delta,
            "ledger": ledger,
            "networks": RandomNetworks(self.network),
        }
        if method == "class_means_clean":
            private |= {"epsilon": math.inf, "ledger": None}
        if method.startswith("class_means"):
            return condense_private(real, ipc=self.ipc, generator=seed, **private, **own)
        if method == "image_sgd":
            return image_sgd(real, size=len(real), ipc=self.ipc, generator=seed, **private, **own)
        if method == "dm":
            networks = RandomNetworks(self.network)
            return distribution_matching(real, networks=networks, ipc=self.ipc, init="real", generator=seed, **own)
        return random_subset(real, ipc=self.ipc, generator=seed) if method == "random" else real


def one(options: argparse.Namespace, task: tuple[str, float | None, int]) -> dict[str, Any]:
    """Make a set, save it, test it: one record. A finished run is only read."""
    torch.set_num_threads(1)
    method, epsilon, seed = task
    settings, test_settings = options.settings, options.settings["test"]
    name = "-".join([options.dataset, method, *([] if epsilon is None else [f"eps{epsilon:g}"]), f"seed{seed}"])
    folder = options.out / name
    if (folder / "record.json").exists():
        record = json.loads((folder / "record.json").read_text())
        if record["settings"] != settings:
            raise SystemExit(f"{folder} was made with other settings; give another --out")
        return record
    folder.mkdir(parents=True, exist_ok=True)
    real, test = data(options.dataset, settings, options.data, options.device)
    maker = Maker(settings, real)
    saved = folder / "set.safetensors"
    ledger = Ledger(folder / "ledger.jsonl" if epsilon else None, delta=settings["delta"])
    if options.resume and saved.exists():
        made = LabeledImages.load(saved).to(options.device)
    else:
        if method == "image_sgd":  # so that the accountant's seconds, which it remembers, are not the set's
            own = settings["image_sgd"]
            plan(float(epsilon or 0), ledger.delta, count=own["steps"], rate=own["rate"])
        begun = time.process_time()
        made = maker.make(method, epsilon, seed, ledger)
        made = made.replace(info={**made.info, "seconds_make": time.process_time() - begun})
        if method != "all":
            made.save(saved)
    begun = time.process_time()
    protocol = Protocol(
        epochs=test_settings["epochs_all" if method == "all" else "epochs"],
        batch=test_settings["batch"],
        lr=test_settings["lr"],
        augment=DSA(test_settings["augment"]) if test_settings["augment"] else None,
    )
    network = partial(maker.network, test_settings.get("width"))
    found = evaluate(made, test, network, draws=test_settings["nets"], protocol=protocol, generator=seed)
    guarantee = ledger.guarantee()
    record = {
        "run": name,
        "dataset": options.dataset,
        "method": method,
        "epsilon_wanted": epsilon,
        "epsilon": guarantee.epsilon if epsilon else None,
        "delta": guarantee.delta if epsilon else None,
        "sigma": made.info.get("sigma") if epsilon else None,
        "relation": guarantee.relation if epsilon else None,
        "noise": "operating system" if epsilon else None,
        "seed": seed,
        "records": len(real),
        "ipc": None if method == "all" else settings["ipc"],
        "accuracy": found.accuracy,
        "accuracies": list(found.rows[0].accuracies),
        "seconds_make": made.info["seconds_make"],
        "seconds_test": time.process_time() - begun,
        "settings": settings,
        "command": options.command,
        "commit": options.commit,
    }
    write_atomically(folder / "record.json", json.dumps(record, indent=1) + "\n")
    return record


def updates(record: dict[str, Any]) -> int:
    """How often the images were updated."""
    own = record["settings"].get(record["method"].removesuffix("_clean"), {})
    return own.get("steps", 0) * (own.get("passes", 2) - 1) + own.get("first_steps", 0)


def table(records: list[dict[str, Any]]) -> str:
    """One row a dataset, method, epsilon and number of updates: mean and standard deviation over seeds."""
    rows = []
    kinds = [(r["dataset"], r["method"], r["epsilon_wanted"], updates(r)) for r in records]
    for key in dict.fromkeys(kinds):
        own = [r for r, kind in zip(records, kinds, strict=True) if kind == key]
        private = own[0]["epsilon_wanted"] is not None
        rows.append(
            [
                f"{key[0]}, {TITLES[key[1]]}",
                str(key[3] or "–"),
                f"{max(r['epsilon'] for r in own):.4g}" if private else "–",
                f"{own[0]['sigma']:.4g}" if private else "–",
                mean_std([100 * r["accuracy"] for r in own]),
                str(len(own)),
                mean_std([r["seconds_make"] for r in own]),
                mean_std([r["seconds_test"] for r in own]),
            ]
        )
    header = ["set", "updates", "epsilon", "sigma", "accuracy %", "seeds", "CPU s to make", "CPU s to test"]
    return show(header, rows)


def tasks(options: argparse.Namespace) -> list[tuple[str, float | None, int]]:
    """(method, epsilon, seed) of every run."""
    epsilons: dict[str, list[Any]] = {
        "class_means": options.epsilons,
        "image_sgd": options.settings["image_sgd"]["epsilons"],
    }
    return [(m, e, seed) for seed in options.seeds for m in options.methods for e in epsilons.get(m, [None])]


def finished(out: Path) -> list[dict[str, Any]]:
    """The records of all finished runs in a folder, in the order of the table."""
    records = [json.loads(path.read_text()) for path in out.glob("*/record.json")]
    order = {method: i for i, method in enumerate(METHODS)}
    return sorted(records, key=lambda r: (r["dataset"], order[r["method"]], -(r["epsilon_wanted"] or 0), r["seed"]))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    options = arguments(argv)
    options.commit = git_commit()

    def tell(record: dict[str, Any]) -> None:
        print(f"{record['run']}: {100 * record['accuracy']:.1f} %", flush=True)
        write_atomically(options.out / "summary.json", json.dumps(finished(options.out), indent=1) + "\n")

    with owned(options.out / ".owner.lock", f"the experiment in {options.out}"):
        if options.workers > 1:
            with processes(options.workers) as pool:
                for record in pool.map(partial(one, options), tasks(options)):
                    tell(record)
        else:
            for task in tasks(options):
                tell(one(options, task))
    records = finished(options.out)
    text = table(records)
    write_atomically(options.out / "table.md", text + "\n")
    print(f"\n{text}\n\nWritten to {options.out}.")
    return records


if __name__ == "__main__":
    main()
