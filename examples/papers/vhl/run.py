"""VHL: clients with skewed classes also train on shared noise images; comparison with the methods that it extends.

    python examples/papers/vhl/run.py --preset smoke
    python examples/papers/vhl/run.py --data ROOT                    # FashionMNIST and CIFAR-10, small: hours
    python examples/papers/vhl/run.py --preset paper --data ROOT     # Tables 1, 2 and 6 of the paper, on a GPU: days
    python examples/papers/vhl/run.py --data pictures                # your own: one folder to split, or one per client

Tang et al., "Virtual homogeneity learning: defending against data heterogeneity in federated learning", ICML 2022.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of all examples

from distillkit.networks import NETWORK_NAMES
from distillkit.study import Records, Study, Task, paired_differences, read_records, summary_table
from fl.addons import VHL
from fl.study import to_target
from papers.vhl.candidates import BASES, PAPER, SEARCH, SOURCE, candidates, split_of
from shared.data import own_task
from shared.datasets import load_part
from shared.options import command_line, number, parse_arguments, refuse_unused, split_type
from shared.paper import sets_sent, with_paper
from shared.study import run_study

CLAIM = """\
Claim: under Dirichlet 0.1, FedAvg with VHL is better than FedAvg after the last round, on FashionMNIST and on CIFAR-10.
(The paper's best rounds are 92.05 and 86.81 %, and 87.82 and 79.98 %.) Both candidates have three seeds, and search
four configurations on held-out images, except with the preset `paper`. The other methods and the ablations have one
seed. They use FedAvg's settings, or those of FedAvg + VHL if they contain VHL or a part of it. The preset `cpu` differs
from the paper: 10,000 training images of 16x16 pixels, 2,000 test images, a ConvNet of two blocks of width 32, batches
of 64, and 60 rounds instead of 1,000."""

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"dataset": ["digits"], "pixels": 16, "channels": None, "train": 400, "test": 300, "rounds": 8,
        "lr": 0.03, "batch": 32, "network": "convnet", "shape": {"width": 16, "depth": 2}, "layers": ["body.3"],
        "mu": 0.1, "noise": {"per_class": 10, "options": {"width": 8}}},
    "cpu": {"dataset": ["fashionmnist", "cifar10"], "pixels": 16, "channels": None, "train": 10_000, "test": 2000,
        "rounds": 60, "lr": None, "batch": 64, "network": "convnet", "shape": {"width": 32, "depth": 2},
        "layers": ["body.3"], "mu": 0.1, "noise": {"per_class": 100, "options": {"width": 16}}},
    "paper": {"dataset": ["fashionmnist", "cifar10"], "pixels": 32, "channels": 3, "train": None, "test": None,
        "rounds": 1000, "lr": 0.01, "batch": 128, "network": "resnet18", "shape": {"norm": "batch"},
        "layers": ["body.4", "body.6", "body.8"], "mu": 1.0, "noise": {}},
}  # fmt: skip


def tasks(o: argparse.Namespace) -> list[Task]:
    """Return tasks of ten clients, one per dataset, or a task of the user's own pictures."""
    options: dict[str, Any] = {"rounds": o.rounds, "factory": o.network, "factory_options": o.shape}
    options |= {"partition": split_of(o.split), "participation": o.participation}
    if o.pictures:
        return [own_task(o, **options)]
    sizes = (o.data, o.pixels, o.channels, o.train, o.test)
    ending = "" if o.split == "0.1" else f"-{o.split}"
    return [Task(name + ending, partial(load_part, name, *sizes), **options) for name in o.dataset]


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/vhl", presets=PRESETS, pictures=True)
    add = parser.add_argument
    known = ("digits", "mnist", "fashionmnist", "svhn", "cifar10")
    add("--dataset", nargs="+", choices=known, help="ablations run on the last one; default: the preset's")
    add("--rounds", type=number(1), help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), help="steps of a client per round, instead of an epoch")
    add("--no-ablations", action="store_true", help="only the methods, without and with VHL")
    add("--pair", action="store_true", help="only FedAvg, without and with VHL")
    add("--settings-of", type=Path, metavar="FOLDER", help="use the settings that this study selected, no search")
    add("--participation", type=float, default=0.5, help="share of the clients in each round")
    splits = split_type("two-classes", "clusters")
    add("--split", type=splits, default="0.1", help="Dirichlet alpha, two-classes, or clusters of two classes")
    add("--norm", choices=("group", "batch", "instance", "none"), help="normalization layers; default: the network's")
    add("--lr", type=float, help="learning rate of all candidates, without a search; default: the preset's")
    add("--network", choices=NETWORK_NAMES, help="network to train; default: the preset's")
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "with pictures of your own in --data", "--dataset", unless=not o.pictures)
    refuse_unused(parser, words, "with a client a folder in --data", "--split", unless=len(o.pictures) < 2)
    refuse_unused(parser, words, "with --pair", "--no-ablations", unless=not o.pair)
    if o.network != PRESETS[o.preset]["network"]:
        o.shape, o.layers = {"norm": "group"}, []
    o.shape = {**o.shape, "norm": o.norm} if o.norm else o.shape
    o.settled = {}
    if o.settings_of:
        if len(o.dataset) != 1:
            parser.error("--settings-of is for one --dataset, for which settings were chosen there")
        there = read_records(o.settings_of)
        o.settled = {r.method: [r.last("settings")] for r in there if r.task == o.dataset[0] and r.method in SEARCH}
        if len(o.settled) < len(SEARCH):
            parser.error(f"--settings-of: no run of {' and '.join(SEARCH)} on {o.dataset[0]} in {o.settings_of}")
    asked = tasks(o)
    if o.pictures:
        o.noise = {**o.noise, "classes": max(2, asked[0].load().train.num_classes)}
    study = Study(o.out, asked, candidates(o, asked[-1].name), seeds=o.seeds)

    def tables(records: Records) -> list[object]:
        table = summary_table(records, columns=["bytes_up", "bytes_down", "client_seconds"])
        found: list[object] = [
            with_paper(table, PAPER, SOURCE),
            paired_differences([r for r in records if r.method in SEARCH]),
        ]
        table_1 = [r for r in records if r.method in (*SEARCH, *BASES) or r.method.endswith("+ VHL")]
        for task in asked:
            own = [r for r in table_1 if r.task == task.name]
            best = [r.line["accuracy_best"] for r in own if r.method == "FedAvg" and not r.failed]
            if best:
                found += [f"{task.name}, until FedAvg's best is reached (a round that was chosen on the test set):"]
                found += [to_target(own, accuracy=statistics.mean(best))]
        return found

    records = run_study(study, o, tables, by=("round", "bytes", "client_seconds"), main=SEARCH, claim=CLAIM)
    kinds = ("FedAvg + VHL", "VHL, upsampled noise", "VHL, noise of a CNN")
    sets_sent([r for r in records if r.method in kinds], VHL.noise, study.out / "noise.png", per_class=5)


if __name__ == "__main__":
    main()
