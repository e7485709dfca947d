"""FedCOG compared with the methods that it extends, on ten clients with skewed classes.

    python examples/papers/fedcog/run.py --preset smoke
    python examples/papers/fedcog/run.py --data DATA
    python examples/papers/fedcog/run.py --data north south west
    python examples/papers/fedcog/run.py --preset paper --data DATA --rounds 1 --steps 10 --out runs/fedcog-one-round

FedCOG starts after some rounds. Until then, it gives the same bits as the method that it extends. Each client then also
generates images from the global model, for the classes that the client lacks, and distils the model on them.
`candidates.py` has the candidates and the paper's numbers. The generated images never leave a client: `generated.png`
shows images that anybody can generate from the last global model.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of all examples

from distillkit import LabeledImages, plot
from distillkit.data import partition
from distillkit.generate import invert
from distillkit.study import Record, Records, Study, Table, Task
from fl.study import load as load_run
from papers.fedcog.candidates import PAPER, SOURCE, SPACES, ablations, pair
from shared.data import own_task
from shared.datasets import load_subset
from shared.options import command_line, number, parse_arguments, refuse_unused
from shared.paper import late_tables
from shared.study import run_study

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "records": None, "rounds": 6, "start": 5, "steps": 10, "generation": 10, "images": 32, "batch": 32,
        "lr": [0.05],
    },
    "cpu": {
        "records": 10_000, "rounds": 30, "start": 25, "steps": 40, "generation": 50, "images": 64, "batch": 32,
        "lr": [0.003, 0.01, 0.03, 0.1],
    },
    "paper": {
        "records": None, "rounds": 70, "start": 51, "steps": 400, "generation": 100, "images": 256, "batch": 64,
        "lr": [0.01],
    },
}  # fmt: skip
"""`records`: number of training images; `start`: FedCOG's first round; `steps`: training steps of a client per round;
`generation`: steps of Adam that generate the `images`, whose number is given."""
SIZE = {"digits": 16}
LEFT_OUT = {"smoke": ["digits-two-classes"], "cpu": ["cifar10-two-classes"], "paper": []}
COLUMNS = ("accuracy_late", "accuracy_locals.mean", "accuracy_own", "bytes_up", "client_seconds")
CLAIM = """\
Claim, written before any run: from FedCOG's first round on, the global model is better with FedCOG than without it.
"Accuracy late" is the mean over these rounds; before them, both models are the same under the same seed. With the
preset cpu, FedAvg's learning rate is the best of four on validation images; otherwise it is given. FedCOG uses the same
rate, without a search of its own. The claim holds on a task if the whole interval of the paired difference is above 0.
All other candidates have one seed and FedAvg's rate, and are not tuned."""


def tasks(o: Any) -> list[Task]:
    """Return the partitions NIID-1 and NIID-2 of each dataset.

    A tenth of the training images is for the clients' own tests, and another tenth for the server.
    """
    options: Any = {"factory": "simple_cnn", "rounds": o.rounds, "own_tests": 0.1, "server_share": 0.1}
    assigns = {
        "dirichlet": partial(partition.dirichlet, clients=10, alpha=0.1),
        "two-classes": partial(partition.class_clusters, clients=10, k=2),
    }
    if o.pictures:
        return [own_task(o, partition=assigns["dirichlet"], **options)]
    names = ["digits"] if o.preset == "smoke" else o.datasets
    every = [(name, kind) for name in names for kind in o.division or assigns]
    return [
        Task(f"{name}-{kind}", partial(load_subset, name, o.data, o.records, SIZE.get(name), SPACES.get(name)),
             assigns[kind], **options)
        for name, kind in every if o.division or f"{name}-{kind}" not in LEFT_OUT[o.preset]
    ]  # fmt: skip


def generated(record: Record, train: LabeledImages, path: Any) -> None:
    """Draw eight real images of each class next to eight that the last global model generates for it."""
    run = load_run(str(record.folder))
    targets = torch.arange(train.num_classes).repeat_interleave(8)
    made = invert(run.models[""], targets, shape=train.shape, normalization=train.normalization, progress=False)
    plot.real_and_synthetic(train, made, per_class=8).savefig(path, dpi=150)


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/fedcog", presets=PRESETS, pictures=True)
    add = parser.add_argument
    add("--datasets", nargs="+", choices=[*SPACES], default=[*SPACES], help="datasets of the paper")
    add("--division", nargs="+", choices=("dirichlet", "two-classes"), help="NIID-1, NIID-2; default: the preset's")
    add("--headline", action="store_true", help="only FedAvg and FedCOG, without other bases and ablations")
    add("--rounds", type=number(1), help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), dest="limit", help="steps of each phase; default: the preset's")
    o = parse_arguments(parser, words)
    refuse_unused(
        parser, words, "with pictures of your own in --data", "--datasets", "--division", unless=not o.pictures
    )
    o.start, o.augment = min(o.start, o.rounds), o.preset == "paper"
    o.steps, o.generation = o.limit or o.steps, o.limit or o.generation
    compared, p = tasks(o), vars(o)
    candidates = pair(p)
    headline = list(candidates)
    if not o.headline:
        named = [task.name for task in compared]
        candidates |= ablations(p, [n for n in named if n.endswith("dirichlet")] or named, o.seeds[:1])
    study = Study(o.out, compared, candidates, seeds=o.seeds)

    def tables(records: Records) -> list[Table]:
        found = records.late(o.rounds - o.start + 1)
        return late_tables(found, headline, "FedAvg", ("accuracy_late", "accuracy_last"), COLUMNS, PAPER, SOURCE)

    records = run_study(study, o, tables, by=("round", "bytes_up", "client_seconds"), main=headline, claim=CLAIM)
    last = [record for record in records if record.method == "FedCOG"][-1]
    generated(last, study.design.tasks[last.task].load().train, study.out / "generated.png")


if __name__ == "__main__":
    main()
