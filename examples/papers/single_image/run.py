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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of all examples

from distillkit import plot
from distillkit.data import partition
from distillkit.generate import Patches
from distillkit.study import Record, Records, Study, Table, Task
from fl.addons import SharedImage
from fl.study import load as load_run
from papers.single_image.candidates import CHOSEN, NOTHING, PAPER, SOURCE, SPACES, ablations, headline, photograph
from shared.data import own_task
from shared.datasets import load_subset
from shared.options import command_line, number, parse_arguments, refuse_unused
from shared.paper import late_tables
from shared.study import run_study

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "records": None, "pixels": 16, "clients": 5, "rounds": 6, "epochs": 2, "batch": 32, "count": 400, "keep": 80,
        "steps": 20, "clusters": 20, "network": "simple_cnn", "networks": ["simple_cnn", "lenet"], "share": 0.1,
        "lr": [0.003], "server_lr": [0.003],
    },
    "cpu": {
        "records": 10_000, "pixels": 16, "clients": 10, "rounds": 15, "epochs": 5, "batch": 64, "count": 5000,
        "keep": 500, "steps": 60, "clusters": 100, "network": "resnet8", "networks": ["resnet8", "simple_cnn"],
        "share": 0.05, "lr": [0.003, 0.01], "server_lr": [0.001, 0.005],
    },
    "paper": {
        "records": None, "pixels": None, "clients": 20, "rounds": 30, "epochs": 40, "batch": 512, "count": 50_000,
        "keep": 5000, "steps": 500, "clusters": 1000, "network": "resnet8",
        "networks": ["resnet8", "resnet20", "wrn16_4"], "share": 0.01, "lr": [0.01], "server_lr": [0.005],
    },
}  # fmt: skip
"""`count`: number of crops; `keep`: number of selected crops per round; `steps`: steps of distillation; `share`: share
of the images that the server keeps, for FedDF."""
LATE = 5
COLUMNS = ("accuracy_late", "bytes_up", "bytes_down", "client_seconds")
CLAIM = f"""\
Claim, written before any run: distilling on crops that the global model selects anew in each round makes a better model
than distilling on equally many fixed crops. The selected crops are the tenth of each predicted class on which the model
is least certain. "Accuracy late" is the mean over the last {LATE} rounds. With the preset cpu, both candidates search
four configurations on validation images; otherwise the rates are given. The claim holds if the whole interval of the
paired difference is above 0. If it does not also hold against crops drawn at random in each round, the benefit may come
from the variety of the crops and not from the selection. All other candidates have one seed and are not tuned."""


def task(o: Any) -> Task:
    """Return clients with equally many images each, and class priors of their own; 40 % of them join a round."""
    options: Any = {
        "partition": partial(partition.dirichlet_prior, clients=o.clients, alpha=o.alpha),
        "factory": o.network, "rounds": o.rounds, "participation": 0.4, "server_share": o.share,
        "validation": 0.1,
    }  # fmt: skip
    if o.pictures:
        return own_task(o, **options | ({"participation": 1.0} if len(o.pictures) > 1 else {}))
    name = "digits" if o.preset == "smoke" else "cifar10"
    data = partial(load_subset, name, o.data, o.records, o.pixels, SPACES.get(name))
    ending = "" if o.alpha == 1 else f"-alpha{o.alpha:g}"
    return Task(name + ending, data, **options)


def crops(record: Record, image: Any, count: int, size: int, path: Path) -> None:
    """Draw crops that the last model of a run selects, and crops that it does not select."""
    kept = load_run(str(record.folder)).state[SharedImage.index].long()
    some = Patches(image, size=size, count=count).batch(range(min(count, 400)), progress=False)
    plot.selection(some, kept[kept < len(some)], rows=6, columns=8).savefig(path, dpi=150)


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/single-image", presets=PRESETS, pictures=True)
    add = parser.add_argument
    add("--image", type=Path, default=None, help="the shared picture; default: scikit-learn's china.jpg")
    add("--alpha", type=float, default=1.0, help="Dirichlet alpha of the clients' class priors; 1 and 0.1 in the paper")
    add("--headline", action="store_true", help="only the selections, without baselines and ablations")
    add("--rounds", type=number(1), help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), dest="limit", help="steps of distillation, with one epoch; default: the preset's")
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "with a client a folder in --data", "--alpha", unless=len(o.pictures) < 2)
    o.augment = o.preset == "paper"
    o.steps, o.epochs = o.limit or o.steps, 1 if o.limit else o.epochs
    image = photograph(o.image, 1 if o.preset == "smoke" and not o.pictures else 3)
    candidates = headline(vars(o), image)
    more = {} if o.headline else ablations(vars(o), image, o.seeds[:1])
    study = Study(o.out, task(o), candidates | more, seeds=o.seeds)

    def tables(records: Records) -> list[Table]:
        compared = ("accuracy_late", "accuracy_best")
        return late_tables(records.late(LATE), candidates, NOTHING, compared, COLUMNS, PAPER, SOURCE)

    records = run_study(study, o, tables, by=("round", "bytes_up", "client_seconds"), main=candidates, claim=CLAIM)
    chosen = next(record for record in records if record.method == CHOSEN)
    size = next(iter(study.design.tasks.values())).load().train.shape[1]
    crops(chosen, image, o.count, size, study.out / "crops.png")


if __name__ == "__main__":
    main()
