"""FedLGD: one client for each kind of digits, all trained on condensed data, with anchors that the server distils.

    python examples/fedlgd.py --preset smoke               # 8x8 digits, also over photos, and digits of fonts
    python examples/fedlgd.py --data ROOT                  # MNIST, USPS, MNIST-M, digits of fonts: hours
    python examples/fedlgd.py --preset paper --data ROOT   # Table 1 of the paper, on a GPU
    python examples/fedlgd.py --data north south west      # your own pictures, one folder per client

Huang et al., "Federated learning on virtual heterogeneous data with local-global dataset distillation", TMLR 2024. As
in Table 1, candidates train on sets condensed from each client's images, unless their names say otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from _data import own_task, refuse_unused
from _fedlgd import AVERAGES, DOMAINS, digits, domain_table, draw
from _options import command_line, number, parse_arguments
from _paper import with_paper
from _run_study import run_study
from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.data import partition
from distillkit.study import Records, Study, Task, curves, grid, paired_differences, summary_table
from fl import AddOn, FedAvg
from fl.addons import MOON, SCAFFOLD, VHL, Condensed, FedNova, FedProx
from fl.methods import FedLGD
from fl.study import Federated

CLAIM = """\
Claim: after the last round, FedLGD is better than FedAvg and VHL on condensed data of clients with different kinds of
digits. (Paper, Table 1, 10 images per class: 80.6, 75.9 and 78.5 %.) All domains have equally many test images, so
accuracy is the mean over domains. Each method searches four configurations on held-out images, except with `paper`. The
ablations have one seed, and the settings of FedLGD or FedAvg except for the change that their name states. The preset
`cpu` differs from the paper: other digits, 2,000 images per client, 16x16 pixels, a ConvNet of two blocks of width 32,
60 rounds (paper: 100), 100 steps of the first condensation (10,000), and later 10 and 100 steps (100 and 500)."""

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"domains": ["digits", "digits-m-like", "synthdigits-like"], "train": 200, "test": 60, "pixels": 16,
        "rounds": 8, "width": 16, "depth": 2, "seeds": [0], "ipc": 2, "anchors": 2, "condense": 10, "refine": 3,
        "match": 5, "batch_real": 8, "noise": {"per_class": 10, "options": {"width": 8}}, "other_ipc": [4]},
    "cpu": {"domains": ["mnist", "usps", "mnistm", "synthdigits-like"], "train": 2000, "test": 500, "pixels": 16,
        "rounds": 60, "width": 32, "depth": 2, "seeds": [0, 1, 2], "ipc": 10, "anchors": 10, "condense": 100,
        "refine": 10, "match": 100, "batch_real": 32, "noise": {"per_class": 50, "options": {"width": 16}},
        "other_ipc": [5, 20]},
    "paper": {"domains": list(DOMAINS), "train": None, "test": None, "pixels": 28, "rounds": 100, "width": 128,
        "depth": 3, "seeds": [0, 1, 2], "ipc": 50, "anchors": 10, "condense": 10_000, "refine": 100, "match": 500,
        "batch_real": 256, "noise": {}, "other_ipc": [10]},
}  # fmt: skip
RATES, TWO = [0.03, 0.1, 0.3, 1.0], [0.1, 0.3]
SEARCH: dict[str, list[dict[str, Any]]] = {
    "FedAvg": grid(lr=RATES), "FedProx": grid(lr=TWO, mu=[0.01, 0.1]), "FedNova": grid(lr=RATES),
    "SCAFFOLD": grid(lr=RATES), "VHL": grid(lr=TWO, calibration=[0.1, 1.0]), "FedLGD": grid(lr=TWO, weight=[1.0, 10.0]),
}  # fmt: skip
PUBLISHED: dict[str, Any] = {"FedProx": {"mu": 0.01}, "VHL": {"calibration": 1.0}, "FedLGD": {"weight": 10.0}}
"""Settings of the preset `paper` besides the rate 0.01: from sections 5.1 and 5.5; FedProx's from the authors' code."""


def candidates(o: argparse.Namespace) -> dict[str, Federated]:
    """Return the methods of Table 1 with their search, and one-seed ablations with one change each."""
    augment = DSA(NATURAL if o.pictures else DIGITS)
    sizes = {"steps": o.condense, "batch_real": o.batch_real, "augment": augment, "refine_steps": 0}

    def averaging(*parts: Callable[..., AddOn], condensed: bool = True) -> Callable[..., FedAvg]:
        def make(factory: Any, lr: float, ipc: int = o.ipc, first: Any = None, **tried: Any) -> FedAvg:
            learnt = [Condensed(ipc=ipc, **{**sizes, **(first or {})})] if condensed else []
            added = [part(**tried) for part in parts]
            return FedAvg(*learnt, *added, factory=factory, lr=lr, weights="uniform", batch=32, epochs=1)

        return make

    makes: dict[str, Callable[..., FedAvg]] = {
        "FedAvg": averaging(), "FedProx": averaging(FedProx), "FedNova": averaging(FedNova),
        "SCAFFOLD": averaging(SCAFFOLD), "VHL": averaging(partial(VHL, **o.noise)), "FedLGD": FedLGD,
    }  # fmt: skip
    own: dict[str, Any] = {"ipc": o.ipc, "anchors": o.anchors, "batch": 32, "batch_real": o.batch_real}
    own |= {"condense_steps": o.condense, "refine_steps": o.refine, "match_steps": o.match, "augment": augment}
    search = {n: t if o.preset == "cpu" else [{"lr": 0.01 if o.preset == "paper" else 0.1, **PUBLISHED.get(n, {})}]
             for n, t in SEARCH.items()}  # fmt: skip
    found = {n: Federated(m, search[n], own if n == "FedLGD" else {}) for n, m in makes.items()}

    def fedlgd(**settings: Any) -> Federated:
        return Federated(FedLGD, settings={**own, **settings}, like="FedLGD", seeds=o.seeds[:1])

    def fedavg(make: Callable[..., FedAvg] = makes["FedAvg"], **settings: Any) -> Federated:
        return Federated(make, settings=settings, like="FedAvg", seeds=o.seeds[:1])

    whole, later = "statistics-whole-set", sum(number <= o.rounds for number in Condensed.selected[1:])
    further = {
        "FedAvg on random images": fedavg(first={"steps": 0, "init": "real"}),
        "FedAvg, FedLGD's number of steps": fedavg(first={"steps": o.condense + later * o.refine}),
        "FedAvg on all images": fedavg(averaging(condensed=False)),
        "MOON": fedavg(averaging(partial(MOON, 1.0))),
        **{f"FedLGD, weight {w:g}": fedlgd(weight=w) for w in (0.0, 0.03, 0.1, 0.3, 1.0, 10.0, 20.0)},
        **{f"FedLGD, MMD, weight {w:g}": fedlgd(weight=w, regulariser="mmd") for w in (1.0, 10.0, 20.0)},
        "FedLGD, nothing distilled later": fedlgd(selected=()),
        "FedLGD, no anchors": fedlgd(anchors=0),
        "FedLGD, from noise": fedlgd(init="noise"),
        "FedLGD, from real images": fedlgd(init="real"),
        "FedLGD, anchors as released": fedlgd(anchors_init=whole, joined="always"),
        "FedLGD, anchors' rate 30": fedlgd(anchors_lr=30.0),
        "FedLGD, as released": fedlgd(init=whole, anchors_init=whole, joined="always"),
        **{f"FedAvg, {ipc} a class": fedavg(ipc=ipc) for ipc in o.other_ipc},
        **{f"FedLGD, {ipc} a class": fedlgd(ipc=ipc) for ipc in o.other_ipc},
    }
    return found if o.no_ablations else {**found, **further}


def task(o: argparse.Namespace) -> Task:
    """Return the digits of several sources, one client each, or the user's own pictures."""
    options: dict[str, Any] = {"rounds": o.rounds, "factory_options": {"width": o.width, "depth": o.depth}}
    if o.pictures:
        return own_task(o, partition=partial(partition.dirichlet, clients=4, alpha=1.0), **options)
    root = None if o.data is None else str(o.data.expanduser().resolve())
    return Task("domains", partial(digits, tuple(o.domains), root, o.pixels, o.train, o.test), **options)


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/fedlgd", pictures=True)
    add = parser.add_argument
    add("--domains", nargs="+", metavar="NAME", help="sources of digits, one per client; default: the preset's")
    add("--ipc", type=number(1), help="condensed images per class; default: the preset's")
    add("--rounds", type=number(1), help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), help="limit on the steps of each condensation, refinement and matching")
    add("--no-ablations", action="store_true", help="only the methods of Table 1")
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "with pictures of your own in --data", "--domains", unless=not o.pictures)
    for name, value in PRESETS[o.preset].items():
        most = o.steps if name in ("condense", "refine", "match") else None
        setattr(o, name, getattr(o, name, None) or (min(value, most) if most else value))
    study = Study(o.out, asked := task(o), candidates(o), seeds=o.seeds)
    images = cache(asked.load)
    source = "Table 1, ConvNet, average of five domains with 10 images a class (50 where ours are 50)."

    def tables(records: Records) -> list[object]:
        table = summary_table(records, columns=["bytes_up", "bytes_down", "client_seconds"])
        against = [paired_differences([r for r in records if r.method in SEARCH], base) for base in ("FedAvg", "VHL")]
        return [with_paper(table, AVERAGES[o.ipc == 50], source), *against, *domain_table(records, images(), o.ipc)]

    records = run_study(study, o, tables, by=(), claim=CLAIM)
    for by in ("round", "bytes_down", "client_seconds"):
        curves([r for r in records if r.method in SEARCH], by=by).savefig(study.out / f"accuracy_by_{by}.png", dpi=150)
    draw(records, asked, images(), study.out)


if __name__ == "__main__":
    main()
