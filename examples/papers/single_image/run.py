"""Federated learning with a single shared image: selection of its crops, compared with FedAvg, FedProx and FedDF.

    python examples/papers/single_image/run.py --preset smoke
    python examples/papers/single_image/run.py --data DATA --image street.jpg
    python examples/papers/single_image/run.py --data north south west
    python examples/papers/single_image/run.py --preset paper --data DATA --rounds 1 --steps 10 --out runs/tried

Server and clients cut the same crops from one photograph (scikit-learn's "china.jpg", or `--image`). The server's model
learns from the clients' predictions on some of the crops, and weights are sent in a fifth of the rounds.
`candidates.py` has the candidates and the paper's numbers. `crops.png` shows the crops that the last model selects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of all examples

from distillkit import plot
from distillkit.data import partition
from distillkit.generate import Patches
from distillkit.study import Record, Records, Study, Table, Task, curves, paired_differences, summary_table
from fl.addons import SharedImage
from fl.study import load as load_run
from papers.single_image.candidates import CHOSEN, NOTHING, PAPER, SOURCE, SPACES, ablations, headline, photograph
from shared.data import own_task, refuse_unused
from shared.datasets import load_subset
from shared.options import command_line, number, parse_arguments
from shared.paper import ablation_curves, with_paper
from shared.study import run_study

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "records": None, "size": 16, "clients": 5, "rounds": 6, "epochs": 2, "batch": 32, "count": 400, "keep": 80,
        "steps": 20, "clusters": 20, "network": "simple_cnn", "networks": ["simple_cnn", "lenet"], "share": 0.1,
        "lr": [0.003], "server_lr": [0.003],
    },
    "cpu": {
        "records": 10_000, "size": 16, "clients": 10, "rounds": 15, "epochs": 5, "batch": 64, "count": 5000,
        "keep": 500, "steps": 60, "clusters": 100, "network": "resnet8", "networks": ["resnet8", "simple_cnn"],
        "share": 0.05, "lr": [0.003, 0.01], "server_lr": [0.001, 0.005],
    },
    "paper": {
        "records": None, "size": None, "clients": 20, "rounds": 30, "epochs": 40, "batch": 512, "count": 50_000,
        "keep": 5000, "steps": 500, "clusters": 1000, "network": "resnet8",
        "networks": ["resnet8", "resnet20", "wrn16_4"], "share": 0.01, "lr": [0.01], "server_lr": [0.005],
    },
}  # fmt: skip
"""`count`: number of crops; `keep`: number of selected crops per round; `steps`: steps of distillation; `share`: share
of the images that the server keeps, for FedDF."""
LATE = 5
CLAIM = f"""\
Claim, written before any run: distilling on crops that the global model selects anew in each round makes a better model
than distilling on equally many fixed crops. The selected crops are the tenth of each predicted class on which the model
is least certain. "Accuracy late" is the mean over the last {LATE} rounds. With the preset cpu, both candidates search
four configurations on validation images; otherwise the rates are given. The claim holds if the whole interval of the
paired difference is above 0. If it does not also hold against crops drawn at random in each round, the benefit may come
from the variety of the crops and not from the selection. All other candidates have one seed and are not tuned."""


def task(o: Any, p: dict[str, Any]) -> Task:
    """Return clients with equally many images each, and class priors of their own; 40 % of them join a round."""
    options: Any = {
        "partition": partial(partition.dirichlet_prior, clients=p["clients"], alpha=p["alpha"]),
        "factory": p["network"], "rounds": p["rounds"], "participation": 0.4, "server_share": p["share"],
        "validation": 0.1,
    }  # fmt: skip
    if o.pictures:
        return own_task(o, **options | ({"participation": 1.0} if len(o.pictures) > 1 else {}))
    name = "digits" if o.preset == "smoke" else "cifar10"
    data = partial(load_subset, name, o.data, p["records"], p["size"], SPACES.get(name))
    ending = ("" if p["alpha"] == 1 else f"-alpha{p['alpha']:g}") + ("" if o.rate is None else f"-rate{o.rate:g}")
    return Task(name + ending, data, **options)


def tables(records: Records, main: Sequence[str]) -> list[Table]:
    """Return the selections with the paper's numbers, the paired differences, and the one-seed ablations."""
    found, columns = records.late(LATE), ["accuracy_late", "bytes_up", "bytes_down", "client_seconds"]
    own = [record for record in found if record.method in main]
    rest = [record for record in found if record.seed == found[0].seed]
    parts = [with_paper(summary_table(own, columns=columns), PAPER, SOURCE)]
    parts += [paired_differences(own, NOTHING, column=column) for column in ("accuracy_late", "accuracy_best")]
    return parts + ([with_paper(summary_table(rest, columns=columns), PAPER, SOURCE)] if len(found) > len(own) else [])


def crops(record: Record, image: Any, p: dict[str, Any], size: int, path: Path) -> None:
    """Draw crops that the last model of a run selects, and crops that it does not select."""
    kept = load_run(str(record.folder)).state[SharedImage.index].long()
    some = Patches(image, size=size, count=p["count"]).batch(range(min(p["count"], 400)), progress=False)
    plot.selection(some, kept[kept < len(some)], rows=6, columns=8).savefig(path, dpi=150)


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/single-image", pictures=True)
    add = parser.add_argument
    add("--image", type=Path, default=None, help="the shared picture; default: scikit-learn's china.jpg")
    add("--alpha", type=float, default=1.0, help="Dirichlet alpha of the clients' class priors; 1 and 0.1 in the paper")
    add("--rate", type=float, help="share of the rounds in which weights are sent; default: 0.2")
    add("--headline", action="store_true", help="only the selections, without baselines and ablations")
    add("--rounds", type=number(1), default=None, help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), default=None, help="steps of distillation, with one epoch; default: the preset's")
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "with a client a folder in --data", "--alpha", unless=len(o.pictures) < 2)
    p = PRESETS[o.preset] | {"alpha": o.alpha, "augment": o.preset == "paper"}
    p |= ({"rounds": o.rounds} if o.rounds else {}) | ({"steps": o.steps, "epochs": 1} if o.steps else {})
    image = photograph(o.image, 1 if o.preset == "smoke" and not o.pictures else 3)
    seeds = o.seeds or ([0] if o.preset == "smoke" else [0, 1, 2])
    candidates = headline(p, image, **({} if o.rate is None else {"rate": o.rate}))
    names = list(candidates)
    study = Study(
        o.out, task(o, p), candidates if o.headline else candidates | ablations(p, image, seeds[:1]), seeds=seeds
    )
    records = run_study(study, o, lambda found: tables(found, names), by=(), claim=CLAIM)
    own = [record for record in records if record.method in names]
    for by in ("round", "bytes_up", "client_seconds"):
        curves(own, by=by).savefig(study.out / f"accuracy_by_{by}.png", dpi=150)
    crop = [name for name in study.design.candidates if name.startswith(("K-means", "Surest", "Crops"))]
    others = [name for name in study.design.candidates if name not in (*names, *crop)]
    ablation_curves(records, names, crop, study.out / "crops_by_round.png")
    ablation_curves(records, names[:2], others, study.out / "others_by_round.png")
    chosen = next(record for record in own if record.method == CHOSEN)
    size = next(iter(study.design.tasks.values())).load().train.shape[1]
    crops(chosen, image, p, size, study.out / "crops.png")


if __name__ == "__main__":
    main()
