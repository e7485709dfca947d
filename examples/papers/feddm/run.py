"""FedDM compared with weight averaging after equally many rounds, on clients with few classes each.

    python examples/papers/feddm/run.py --preset smoke
    python examples/papers/feddm/run.py                                      # both tables on MNIST and CIFAR-10, small
    python examples/papers/feddm/run.py --preset paper --only claim --tries 1  # the paper's settings, for a GPU
    python examples/papers/feddm/run.py --data north south west              # folders of pictures, one per client
    python examples/papers/feddm/run.py --dp class_means sums shares --epsilon 8 2 --split iid --dataset digits

Each dataset has two studies. The first tests the main claim, with an equal search for both methods. The second compares
other methods, splits and options on one seed, with the settings of the first. --dp runs private clients instead.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of all examples

from distillkit.data import load, partition
from distillkit.study import Records, Study, Task, paired_differences, summary_table
from fl import FedDM
from papers.feddm.candidates import COSTS, PAPER, PRESETS, SOURCE, ablations, headline
from papers.feddm.private import CLIENTS, CLOSING, DATASETS, PRIVATE, PRIVATE_COSTS, TITLES, private_study
from shared.data import own_task, require_data
from shared.datasets import load_part
from shared.options import command_line, given_options, number, parse_arguments, refuse_unused, split_type
from shared.paper import sets_sent, settings_of, with_paper
from shared.study import run_study

CLAIM = """\
Claim: if clients have few classes (Dirichlet 0.01), FedDM is more accurate than FedAvg after equally many rounds. It
holds if the whole interval of the paired difference over seeds (last round, test images) is above 0. Both search
equally many configurations on a fifth of the training images, with a seed that is in no table. Real sends as many raw
images, the private data themselves, with FedDM's settings. FedDM's gain over Real is the benefit of distillation."""
MORE = """\
One seed: a difference of a point or two may be chance. All weight averaging has FedAvg's settings, with mu 0.01 for
FedProx. FedDM's variants differ from it only as their names say. Settings were chosen only on Dirichlet(0.01)."""


def arguments(words: list[str] | None) -> Any:
    """Return the options of the command line, with the preset's values as defaults."""
    presets = PRIVATE if "--dp" in given_options(words) else PRESETS
    parser = command_line(__doc__, out="runs/feddm", presets=presets, pictures=True)
    add = parser.add_argument
    add("--dataset", nargs="+", choices=["digits", "mnist", "fashionmnist", "cifar10"], help="default: the preset's")
    splits = split_type("iid", "dirichlet")
    add("--split", type=splits, nargs="+", help="iid, or a Dirichlet alpha; the claim uses the first")
    add("--only", choices=["claim"], help="run only the first study of each dataset")
    add("--tries", type=number(1), help="most configurations per candidate; default: the preset's")
    add("--rounds", type=number(1), help="rounds of a run; default: the preset's")
    add("--steps", type=number(1), dest="few", help="limit on the steps of each phase and on the server's epochs")
    add("--dp", nargs="+", choices=["none", *TITLES], help="run the private study with these methods")
    add("--epsilon", type=float, nargs="+", default=[8.0], help="with --dp: epsilon of the whole run")
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "without --dp", "--epsilon", unless=o.dp)
    if o.dp:
        refuse_unused(parser, words, "with --dp", "--only", "--tries", "--rounds", "--steps")
        [name, *more], [how, *others] = o.dataset, o.split
        if o.pictures or more or others or name not in DATASETS or how not in ("dirichlet", "iid"):
            got = f"{' and '.join([name, *more])} by {' and '.join([how, *others])}"
            parser.error(f"--dp is for {', '.join(DATASETS)} by dirichlet or iid, one of each, got {got}")
        o.dataset, o.split = name, how
        return o
    refuse_unused(parser, words, "with these pictures in --data", *["--dataset", "--split"][: len(o.pictures)])
    return o


def tasks_of(o: Any, dataset: str) -> list[Task]:
    """Return a dataset with each of the splits, or the user's own folders as clients."""
    made = []
    for how in o.split[: 1 if len(o.pictures) > 1 else None]:
        title, assign = "iid", partial(partition.iid, clients=CLIENTS)
        if how != "iid":
            alpha = 0.1 if how == "dirichlet" else float(how)
            title, assign = f"dirichlet{alpha:g}", partial(partition.dirichlet, clients=CLIENTS, alpha=alpha)
        options = {"partition": assign, "rounds": o.rounds, "factory_options": o.network}
        if o.pictures:
            task = own_task(o, **options)
            made.append(task if len(o.pictures) > 1 else replace(task, name=f"{task.name}-{title}"))
        else:
            size = 16 if dataset == "digits" else None
            whole = partial(load, dataset, root=o.data, size=size)
            some = partial(load_part, dataset, o.data, size, None, o.train, 2000)
            made.append(Task(f"{dataset}-{title}", some if o.train else whole, **options))
    return made


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    o = arguments(words)
    if o.dp:
        run_study(private_study(o), o, lambda found: [summary_table(found, columns=PRIVATE_COSTS), CLOSING])
        return
    candidates, drawn = headline(o), dict[str, Any]({"by": ("round", "bytes", "client_seconds"), "ends": False})
    every = {name: tasks_of(o, name) for name in (["own"] if o.pictures else o.dataset)}
    require_data(task for tasks in every.values() for task in tasks)
    for name, tasks in every.items():
        study = Study(o.out / name, tasks[0], candidates, seeds=o.seeds)
        found = run_study(
            study, o, lambda ours: [table(ours), paired_differences(ours), paired_differences(ours, "Real")],
            claim=CLAIM, **drawn,
        )  # fmt: skip
        sets_sent(found, FedDM.images, study.out / "images_sent.png")
        if o.only == "claim":
            continue
        averaged, matched = (settings_of(found, candidates, method, tasks[0].name) for method in ("FedAvg", "FedDM"))
        more = ablations(o, [task.name for task in tasks], averaged, matched)
        study = Study(o.out / f"{name}-more", tasks, more, seeds=o.seeds[:1])
        first = [record for record in found if record.seed == o.seeds[0]]
        found = run_study(study, o, lambda all_of_it: [table(all_of_it)], also=first, claim=MORE, **drawn)
        sets_sent(found, FedDM.images, study.out / "images_sent.png")


def table(records: Records) -> Any:
    """Return the accuracy and cost of each candidate, with the paper's numbers."""
    return with_paper(summary_table(records, columns=COSTS), PAPER, SOURCE)


if __name__ == "__main__":
    main()
