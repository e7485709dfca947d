"""Condense a named dataset, a folder of pictures or an .npz, and compare with random images.

    python examples/condense.py --preset smoke
    python examples/condense.py --dataset path/to/pictures --size 32 --methods random herding dsa

Each method makes a set of `ipc` images per class. Networks are trained from scratch only on this set, and tested after
the last step. The preset `smoke` takes seconds. `cpu` takes hours, with a search over the learning rate of the pixels;
herding and k-center search over comparing pixels or embeddings. `paper` takes days on a GPU, with published settings
and no search. The folder of each run contains set.safetensors and grid.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distillkit import LabeledImages, condense, data, plot
from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.condense import distribution_matching, gradient_matching, herding, k_center, loops_for, random_subset
from distillkit.fingerprint import set_fingerprint
from distillkit.networks import RandomNetworks, build
from distillkit.study import Condense, Study, Task, grid, summary_table
from distillkit.training import Protocol, train
from shared.data import named_or_own
from shared.options import command_line, number, parse_arguments, refuse_unused
from shared.study import run_study
from shared.teacher import kept

SEARCH: dict[str, list[dict[str, Any]]] = {
    "herding": grid(epochs=[0, 4]), "k-center": grid(epochs=[0, 4]),
    "dm": grid(lr=[1.0, 3.0]), "dc": grid(lr=[0.1, 1.0]), "dsa": grid(lr=[0.1, 1.0]),
}  # fmt: skip
"""Search of the preset `cpu`. `lr`: step size on the pixels; `epochs`: training of the network that embeds images."""
PUBLISHED = {"dm": {"lr": 1.0}, "dc": {"lr": 0.1}, "dsa": {"lr": 0.1}}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"dataset": "digits", "ipc": 1, "steps": 2, "iterations": 1, "loops": (2, 1), "batch_real": 8, "epochs": 2,
        "nets": 2, "embedding_images": 100, "embedding_epochs": 1, "width": 8, "depth": 2},
    "cpu": {"dataset": "fashionmnist", "ipc": 10, "steps": 400, "iterations": 3, "loops": (10, 2), "batch_real": 64,
        "init": "real", "epochs": 75, "batch": 25, "nets": 3, "seeds": [0], "embedding_images": 5000,
        "embedding_epochs": 4},
    "paper": {"dataset": "fashionmnist", "ipc": 10, "steps": 20_000, "iterations": 1000, "batch_real": 256,
        "epochs": 1000, "nets": 20, "seeds": [*range(5)], "embedding_images": None, "embedding_epochs": 20},
}  # fmt: skip
WHOLE = {
    "ipc": "images per class", "steps": "DM: optimization steps", "iterations": "DC and DSA: networks drawn",
    "batch-real": "real images per class and step", "nets": "networks tested per set", "epochs": "their epochs",
    "batch": "their batch size", "width": "width of a ConvNet", "depth": "depth of a ConvNet", "size": "image size",
}  # fmt: skip


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, with the preset's values as defaults."""
    parser = command_line(__doc__, out="runs/condense", presets=PRESETS)
    add = parser.add_argument
    add("--dataset", help=f"one of {', '.join(data.NAMES)}; or a folder of pictures (class/picture.png), or an .npz")
    add("--methods", nargs="+", choices=["random", *SEARCH], default=["random", *SEARCH])
    add("--network", default="convnet", help="network to train on the set, and to draw in DM, DC and DSA")
    add("--longer", type=number(1), nargs=2, action="append", default=[], metavar=("EPOCHS", "BATCH"),
        help="make further sets with the same settings, each tested with one network trained in this way")  # fmt: skip
    add("--no-augment", action="store_true", help="train the tested networks without augmentation")
    for name, text in WHOLE.items():
        add(f"--{name}", type=number(1), help=text)
    parser.set_defaults(init="noise", batch=256, width=128, depth=3, loops=None)
    found = parse_arguments(parser, words)
    found.name, found.read = named_or_own(found.dataset, found.data, size=found.size)
    own = Path(found.dataset).expanduser().exists()
    unused = partial(refuse_unused, parser, words)
    unused(f"with --dataset {found.dataset}", "--data", unless=found.dataset != "digits" and not own)
    unused("with a --network that is no convnet", "--width", "--depth", unless=found.network == "convnet")
    unused("without dm in --methods", "--steps", unless="dm" in found.methods)
    unused("without dc or dsa in --methods", "--iterations", unless={"dc", "dsa"} & {*found.methods})
    unused("without dm, dc or dsa in --methods", "--batch-real", unless={"dm", "dc", "dsa"} & {*found.methods})
    try:
        found.read()
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"--dataset {found.dataset}: {error}")
    found.loops = found.loops or loops_for(found.ipc)
    return found


Choose = Callable[..., Any]


def embedded(real: LabeledImages, *, choose: Choose, factory: Any, ipc: int, images: int | None, epochs: int) -> Any:
    """Select images in the embedding space of a network trained on the task; if `epochs` is 0, in pixel space."""
    if not epochs:
        return choose(real, ipc=ipc)

    def fresh() -> Any:
        part = real if images is None else random_subset(real, ipc=-(-min(images, len(real)) // real.num_classes))
        return train(build(factory, 0), part, Protocol(epochs=epochs, batch=64), generator=0)

    return choose(real, ipc=ipc, network=kept((set_fingerprint(real.to("cpu")), images, epochs), fresh))


def candidates(o: argparse.Namespace) -> dict[str, Condense]:
    """Return the methods given on the command line, with their searches."""
    augment = DSA(DIGITS if Path(o.dataset).stem.lower() in ("mnist", "usps", "svhn", "digits") else NATURAL)
    ours = {"ipc": o.ipc, "batch_real": o.batch_real}
    gradient = {**ours, "iterations": o.iterations, "inner": condense.InnerTraining(loops=o.loops), "init": o.init}

    def chosen(choose: Choose) -> Choose:
        return lambda **given: partial(embedded, choose=choose, ipc=o.ipc, images=o.embedding_images, **given)

    def matched(condense: Choose, **options: Any) -> Choose:
        return lambda factory, **tried: partial(condense, networks=RandomNetworks(factory), **options, **tried)

    makes: dict[str, Choose] = {
        "random": lambda factory, **tried: partial(random_subset, ipc=o.ipc),
        "herding": chosen(herding), "k-center": chosen(k_center),
        "dm": matched(distribution_matching, augment=augment, steps=o.steps, **ours),
        "dc": matched(gradient_matching, **gradient), "dsa": matched(gradient_matching, augment=augment, **gradient),
    }  # fmt: skip
    search = SEARCH if o.preset == "cpu" else {n: [PUBLISHED.get(n, {"epochs": o.embedding_epochs})] for n in SEARCH}
    tuned = {name: search[name] for name in o.methods if name in search}
    like = {"random": next((name for name in ("dm", *tuned) if name in tuned), None)}  # there is nothing to try
    found = dict[str, Condense]()
    for name in o.methods:
        for count, batch, draws in [(o.epochs, o.batch, o.nets), *((*longer, 1) for longer in o.longer)]:
            title, source = f"{name}, {count} x {batch}" if found.get(name) else name, like.get(name)
            settings = {"like": source or name} if source or title != name else {"search": tuned.get(name, [{}])}
            protocol = Protocol(epochs=count, batch=batch, augment=None if o.no_augment else augment)
            found[title] = Condense(makes[name], **settings, num_networks=draws, protocol=protocol)
    return found


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    o = arguments(words)
    options = {"width": o.width, "depth": o.depth} if o.network == "convnet" else {}
    task = Task(o.name, o.read, factory=o.network, factory_options=options)
    study = Study(o.out, task, candidates(o), seeds=o.seeds)
    note = "Mean over the networks that were trained on each set; accuracy std is over these networks."
    columns = ["accuracy_std", "images", "cpu_seconds_condense", "cpu_seconds_test"]
    records = run_study(study, o, lambda found: [summary_table(found, columns=columns), note], by=(), sets=10)
    for folder in (r.folder for r in records if r.folder is not None):
        plot.grid(LabeledImages.load(folder / "set.safetensors")).savefig(folder / "grid.png")


if __name__ == "__main__":
    main()
