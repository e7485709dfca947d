"""Condense a dataset by name, a folder of pictures or an .npz, and see whether it beats random images.

    python examples/condense.py --preset smoke
    python examples/condense.py --preset cpu --dataset fashionmnist --methods random dm --data ~/data
    python examples/condense.py --preset cpu --dataset path/to/pictures --size 32 --methods random herding dsa

Each method gives a set of `ipc` images per class; networks trained from scratch on it, and on nothing else, are tested
(last iterate). The preset `smoke` takes seconds, `cpu` an hour, `paper` days on a GPU. `--out` gets one folder a run
with the set (set.safetensors), its picture (grid.png) and all arguments (config.json), and for all runs summary.json
and table.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _options import command_line, number, parsed, positive
from distillkit import LabeledImages, data, plot
from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.condense import (
    Progress,
    distribution_matching,
    gradient_matching,
    herding,
    k_center,
    loops_for,
    random_subset,
    save_state,
)
from distillkit.evaluate import evaluate
from distillkit.files import write_atomically
from distillkit.networks import build, named_network
from distillkit.networks.samplers import RandomNetworks
from distillkit.owner import owned
from distillkit.rng import derive
from distillkit.study import git_commit
from distillkit.training import Protocol, train

METHODS = ("random", "herding", "k-center", "dm", "dc", "dsa")
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "dataset": "digits", "ipc": 1, "steps": 2, "iterations": 1, "loops": (2, 1), "batch_real": 8, "epochs": 2,
        "nets": 2, "embedding_images": 100, "embedding_epochs": 1, "width": 8, "depth": 2,
    },
    "cpu": {
        "dataset": "fashionmnist", "ipc": 10, "steps": 400, "iterations": 3, "loops": (10, 2), "batch_real": 64,
        "init": "real", "lr_dc": 1.0, "epochs": 75, "batch": 25, "nets": 3, "embedding_epochs": 0,
    },
    "paper": {
        "dataset": "fashionmnist", "ipc": 10, "steps": 20_000, "iterations": 1000, "batch_real": 256, "epochs": 1000,
        "nets": 20, "seeds": [0, 1, 2, 3, 4], "embedding_images": None, "embedding_epochs": 20,
    },
}  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, out="runs/condense", workers="threads of PyTorch; default: its choice")
    add = parser.add_argument
    add("--dataset", help=f"one of {', '.join(data.NAMES)}; or a folder of pictures (class/picture.png), or an .npz")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--network", default="convnet", help="what is trained on the set, and what DM and DC draw")
    add("--ipc", type=number(1), help="images per class")
    add("--steps", type=number(0), help="DM: optimisation steps")
    add("--iterations", type=number(0), help="DC and DSA: networks drawn")
    add(
        "--loops",
        type=number(0),
        nargs=2,
        metavar=("OUTER", "INNER"),
        help="DC and DSA; default as published for the ipc",
    )
    add("--batch-real", type=number(1), help="real images per class and step")
    add("--init", choices=("real", "noise"), default="noise", help="where DC and DSA start; DM starts from real images")
    add("--lr-dc", type=positive, default=0.1, help="step size on the pixels of DC and DSA (DM: 1)")
    add("--epochs", type=number(1), help="of the networks that are tested")
    add("--batch", type=number(1), default=256, help="images per step of the networks that are tested")
    add("--nets", type=number(1), help="networks tested for each set")
    add("--no-augment", action="store_true", help="train the networks that are tested without augmentation")
    add(
        "--embedding-images",
        type=number(1),
        default=5000,
        help="images that herding's and k-center's network is trained on",
    )
    add("--embedding-epochs", type=number(0), default=4, help="0: they compare pixels")
    add("--width", type=number(1), default=128, help="of the ConvNet")
    add("--depth", type=number(1), default=3, help="of the ConvNet")
    add("--size", type=number(1), help="resize to this height and width")
    add("--channels", type=int, choices=(1, 3))
    preset = parser.parse_known_args(argv)[0].preset
    parser.set_defaults(**{"seeds": [0], "workers": None, **PRESETS[preset]})
    options = parsed(parser, argv)
    if options.data and options.dataset == "digits":
        parser.error(
            f"--data {options.data} would not be read: digits come with scikit-learn. For your own pictures say "
            f"--dataset {options.data}; --data is the root of datasets by name"
        )
    path = Path(options.dataset).expanduser()
    if not path.exists() and options.dataset.lower().replace("-", "").replace("_", "") not in data.NAMES:
        parser.error(
            f"--dataset {options.dataset}: there is no such folder or .npz, and no dataset of that name "
            f"({', '.join(data.NAMES)})"
        )
    options.loops = tuple(options.loops) if options.loops else loops_for(options.ipc)
    return options


def load(options: argparse.Namespace) -> data.Split:
    """The dataset of the command line; what is wrong with it ends the program with one line."""
    try:
        return _load(options)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"condense.py: --dataset {options.dataset}: {error}") from error


def _load(options: argparse.Namespace) -> data.Split:
    path = Path(options.dataset).expanduser()
    shape = {"size": options.size, "channels": options.channels}
    if path.is_dir():
        return data.load_folder(path, **shape)
    if path.suffix == ".npz" or path.is_file():
        return data.load_npz(path, **shape)
    return data.load(options.dataset, root=options.data, **shape)


class Condenser:
    """The six methods on one dataset, with the options of the command line."""

    def __init__(self, options: argparse.Namespace, real: LabeledImages) -> None:
        self.options, self.real = options, real
        digits = str(options.dataset).lower() in ("mnist", "usps", "svhn", "digits")
        self.augment = DSA(DIGITS if digits else NATURAL)
        self._embedding: torch.nn.Module | None = None

    def factory(self) -> torch.nn.Module:
        """An untrained network, where the images are."""
        o = self.options
        size = {"width": o.width, "depth": o.depth} if o.network == "convnet" else {}
        return named_network(o.network, self.real.shape, self.real.num_classes, **size).to(self.real.images)

    def embedding(self) -> torch.nn.Module | None:
        """What herding and k-center measure in: a network trained on real images, once for all seeds."""
        o = self.options
        if self._embedding is None and o.embedding_epochs:
            per_class = -(-(o.embedding_images or len(self.real)) // self.real.num_classes)
            part = self.real if o.embedding_images is None else random_subset(self.real, ipc=per_class)
            protocol = Protocol(epochs=o.embedding_epochs, batch=64)
            self._embedding = train(build(self.factory, 0), part, protocol, generator=0)
        return self._embedding

    def make(self, method: str, seed: int, state: Path) -> LabeledImages:
        """The condensed set; `state` is where an interrupted condensation is found."""
        o, generator = self.options, derive(seed, method)
        if method == "random":
            return random_subset(self.real, ipc=o.ipc, generator=generator)
        if method in ("herding", "k-center"):
            choose = herding if method == "herding" else k_center
            return choose(self.real, ipc=o.ipc, network=self.embedding())
        shared: dict[str, Any] = {
            "networks": RandomNetworks(self.factory),
            "ipc": o.ipc,
            "batch_real": o.batch_real,
            "generator": generator,
            "resume": state if o.resume and state.exists() else None,
            "callback": keep(state),
        }
        if method == "dm":
            return distribution_matching(self.real, steps=o.steps, augment=self.augment, **shared)
        augment = self.augment if method == "dsa" else None
        return gradient_matching(
            self.real, iterations=o.iterations, loops=o.loops, lr=o.lr_dc, init=o.init, augment=augment, **shared
        )

    def budget(self, method: str) -> dict[str, Any]:
        """What a reader must know beside the accuracy; `steps` counts updates of the images."""
        o = self.options
        if method == "dm":
            return {"steps": o.steps, "batch_real": o.batch_real, "init": "real", "lr": 1.0}
        if method in ("herding", "k-center"):
            return {"steps": 0, "embedding": "trained" if o.embedding_epochs else "pixels"}
        if method in ("dc", "dsa"):
            told = {"iterations": o.iterations, "loops": list(o.loops), "batch_real": o.batch_real}
            return {"steps": o.iterations * o.loops[0], **told, "init": o.init, "lr": o.lr_dc}
        return {"steps": 0}


def keep(state: Path, every: float = 60.0) -> Callable[[Progress], None]:
    """A callback that saves the condenser's state once a minute."""
    saved = time.monotonic()

    def callback(progress: Progress) -> None:
        nonlocal saved
        if time.monotonic() - saved >= every:
            save_state(state, progress.state())
            saved = time.monotonic()

    return callback


def run(
    options: argparse.Namespace, condenser: Condenser, test: LabeledImages, method: str, seed: int
) -> dict[str, Any]:
    """Condense, save, test: one row of the summary."""
    name = Path(options.dataset).stem.lower()
    folder = options.out / f"{name}-{method}-ipc{options.ipc}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    started, started_cpu = time.perf_counter(), time.process_time()
    saved = folder / "set.safetensors"
    if options.resume and saved.exists():
        made = LabeledImages.load(saved).to(options.device)
    else:
        made = condenser.make(method, seed, folder / "state.safetensors")
    condensed = time.perf_counter() - started
    made.save(saved)
    plot.grid(made).savefig(folder / "grid.png")
    augment = None if options.no_augment else condenser.augment
    protocol = Protocol(epochs=options.epochs, batch=options.batch, augment=augment)
    found = evaluate(made, test, condenser.factory, draws=options.nets, protocol=protocol, generator=seed)
    row = {
        "run": folder.name,
        "dataset": name,
        "method": method,
        "ipc": options.ipc,
        **condenser.budget(method),
        "seed": seed,
        "network": options.network,
        "nets": options.nets,
        "epochs": options.epochs,
        "batch": options.batch,
        "evaluation_augment": None if augment is None else augment.strategy,
        "accuracy_mean": found.rows[0].mean,
        "accuracy_std": found.rows[0].std,
        "accuracies": list(found.rows[0].accuracies),
        "seconds": time.perf_counter() - started,
        "seconds_condense": condensed,
        "seconds_cpu": time.process_time() - started_cpu,
        "command": " ".join(["python", "examples/condense.py", *sys.argv[1:]]),
        "commit": git_commit(),
    }
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    config = {**told, "set": made.info, "evaluation": found.record(), "torch": torch.__version__}
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| dataset | method | ipc | steps | nets | accuracy % | seconds |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        accuracy = f"{100 * r['accuracy_mean']:.1f} ± {100 * r['accuracy_std']:.1f}"
        cells = (r["dataset"], r["method"], r["ipc"], r["steps"], r["nets"], accuracy, f"{r['seconds']:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    options = arguments(argv)
    if options.workers:
        torch.set_num_threads(options.workers)
    split = load(options)
    train_set, test = (part.to(options.device) for part in split)
    condenser = Condenser(options, train_set)
    with owned(options.out / ".owner.lock", f"the experiment in {options.out}"):
        summary = options.out / "summary.json"
        rows: list[dict[str, Any]] = json.loads(summary.read_text()) if summary.exists() else []
        name = Path(options.dataset).stem.lower()
        for seed in options.seeds:
            for method in options.methods:
                if any(r["run"] == f"{name}-{method}-ipc{options.ipc}-seed{seed}" for r in rows):
                    print(f"{method}, seed {seed}: found in {summary}, not run again")
                    continue
                rows.append(run(options, condenser, test, method, seed))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                write_atomically(summary, json.dumps(rows, indent=2) + "\n")
        write_atomically(options.out / "table.md", table(rows) + "\n")
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
