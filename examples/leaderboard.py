"""Compare condensers under three kinds of labels, and measure what their sets leak.

    python examples/leaderboard.py --preset smoke
    python examples/leaderboard.py --datasets digits usps mnist fashionmnist cifar10 --data DATA
    python examples/leaderboard.py --datasets path/to/pictures --size 32 --methods random dm

Each run makes one set. Networks are trained from scratch on it three times: with hard labels, with one row of a
teacher's probabilities for each image, and with the teacher's labels of every augmented, mixed view. The teacher is a
ConvNet with batch normalization that is trained once for each dataset. All methods search two configurations on a fifth
of the training images, with hard labels. The preset `cpu` takes hours; an interrupted call continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import condense
from attacks import leaks
from distillkit import LabeledImages, data
from distillkit.condense import distribution_matching, random_subset
from distillkit.networks import RandomNetworks
from distillkit.privacy import EmbeddingNetworks, Passes, condense_private
from distillkit.sets import Tiles
from distillkit.study import Condense, Records, Study, Task, grid, summary_table
from shared.data import convnet_task
from shared.label_regimes import TRANSFER, label_regimes
from shared.measurement import measure_runs, share_table
from shared.options import command_line, number, parse_arguments
from shared.study import run_study
from shared.teacher import inverted, stitched

OURS: dict[str, list[dict[str, Any]]] = {
    "deepinversion": grid(lr=[0.05, 0.2]),
    "class-means-8": grid(num_networks=[5, 20]), "class-means-1": grid(num_networks=[5, 20]),
    "dm-tiles": grid(lr=[1.0, 3.0]), "stitch": grid(crops=[1, 5]),
}  # fmt: skip
"""Searches of the methods that `condense.py` does not have. The number of class means is their epsilon."""
METHODS = ("random", "random-tiles", *condense.SEARCH, *OURS)
TILES = Tiles(2)
LEAKS = {
    "copies": "copies %", "within_25_db": "within 25 dB %", "within_25_db_of_held_out": "of held-out records %"
}  # fmt: skip
NOTE = "Share of a set's images that equal a training record, or are close to one (PSNR of at least 25 dB)."
COLUMNS = ("labels.row", "labels.view", "cpu_seconds_condense", "epsilon")
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"datasets": ["digits"], "ipc": [1], "steps": 2, "iterations": 1, "batch_real": 8,
        "updates": 4, "width": 8, "embedding_images": 100, "embedding_epochs": 1, "inversion_steps": 2,
        "means_steps": 2, "teacher_images": 1500},
    "cpu": {"datasets": ["digits", "usps"], "ipc": [1, 10], "steps": 300, "iterations": 100,
        "batch_real": 64, "updates": 300, "width": 32, "embedding_images": 5000, "embedding_epochs": 4,
        "inversion_steps": 300, "means_steps": 200, "teacher_images": 240_000},
}  # fmt: skip


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, with the preset's values as defaults."""
    parser = command_line(__doc__, out="runs/leaderboard", presets=PRESETS)
    add = parser.add_argument
    add("--datasets", nargs="+", help=f"names ({', '.join(data.NAMES)}), folders of pictures, or .npz files")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--ipc", type=number(1), nargs="+", help="numbers of images per class")
    add("--width", type=number(1), help="width of the ConvNets that are tested and drawn")
    add("--steps", type=number(1), help="steps of distribution matching")
    add("--size", type=number(8), help="image size; default: 16 for digits and USPS, otherwise that of the data")
    add("--transfer", nargs="*", choices=sorted(TRANSFER), default=[], help="further networks, tested with hard labels")
    return parse_arguments(parser, words)


def candidates(o: argparse.Namespace, dataset: str, ipc: int) -> dict[str, Condense]:
    """Return the candidates for a dataset and a number of images per class."""
    loops = (1, 1) if ipc == 1 else (10, 2)
    iterations = max(1, o.iterations // loops[0])
    shared = {
        "ipc": ipc, "batch_real": o.batch_real, "steps": o.steps, "iterations": iterations, "loops": loops,
        "init": "real", "epochs": 1, "batch": min(25, 10 * ipc), "nets": 1, "longer": [], "no_augment": False,
        "embedding_images": o.embedding_images, "embedding_epochs": o.embedding_epochs, "preset": o.preset,
        "dataset": dataset, "methods": ["random", *condense.SEARCH],
    }  # fmt: skip
    found = condense.candidates(argparse.Namespace(**shared))
    own = found["dm"].protocol
    searched = [name for name in ("dm", "dm-tiles", *METHODS) if name in o.methods and "random" not in name]
    found["random"] = replace(found["random"], like=next(iter(searched), None))

    def private(factory: Any, epsilon: float, num_networks: int) -> Callable[..., Any]:
        return partial(
            condense_private, epsilon=epsilon, ipc=ipc, networks=EmbeddingNetworks(RandomNetworks(factory)),
            num_networks=num_networks, steps=o.means_steps, passes=Passes(first_steps=o.means_steps // 2),
        )  # fmt: skip

    makes: dict[str, Callable[..., Any]] = {
        "deepinversion": lambda factory, lr: partial(
            inverted, ipc=ipc, steps=o.inversion_steps, lr=lr, images=o.teacher_images
        ),
        **{f"class-means-{e}": partial(private, epsilon=e) for e in (8, 1)},
        "dm-tiles": lambda factory, lr: partial(
            distribution_matching, networks=RandomNetworks(factory), ipc=ipc, parametrize=TILES, steps=o.steps,
            batch_real=o.batch_real, augment=own.augment, lr=lr,
        ),
        "stitch": lambda factory, crops: partial(stitched, ipc=ipc, crops=crops, images=o.teacher_images),
    }  # fmt: skip
    search = OURS if o.preset == "cpu" else {name: some[:1] for name, some in OURS.items()}
    found |= {name: Condense(make, search=search[name]) for name, make in makes.items()}
    tiled = partial(random_subset, ipc=ipc, parametrize=TILES)
    found["random-tiles"] = Condense(lambda factory, **tried: tiled, like=found["random"].like)

    def tested(name: str) -> Condense:
        """Return the method, tested by networks that are trained with about `o.updates` updates."""
        images = 10 * ipc * (TILES.count if name.endswith("tiles") else 1)
        protocol = replace(own, epochs=max(1, o.updates // -(-images // own.batch)))
        measure = partial(label_regimes, protocol=protocol, teacher_images=o.teacher_images, transfer=tuple(o.transfer))
        return replace(found[name], protocol=protocol, num_networks=1, measure=measure)

    named = {name: tested(name) for name in METHODS if name in o.methods}
    return {
        f"{name}-{ipc}": replace(one, like=None if one.like is None else f"{one.like}-{ipc}")
        for name, one in named.items()
    }


def main(words: list[str] | None = None) -> None:
    """Run the example: one study for each dataset."""
    o = arguments(words)
    for said in o.datasets:
        own = convnet_task(o, said)
        found = {name: one for ipc in o.ipc for name, one in candidates(o, said, ipc).items()}
        study = Study(o.out / own.name, own, found, seeds=o.seeds)

        def tables(records: Records, own: Task = own) -> list[object]:
            made = Records(r for r in records if r.task == own.name)
            images = own.load()

            def leaked(folder: Path) -> dict[str, float]:
                return leaks(LabeledImages.load(folder / "set.safetensors"), images.train, images.test).record()

            found = measure_runs(made, "leaks.json", leaked)
            return [summary_table(made, columns=COLUMNS), share_table(found, LEAKS, NOTE)]

        run_study(study, o, tables, by=(), ends=False)


if __name__ == "__main__":
    main()
