"""Differentially private condensed sets compared with sets without privacy, random images and all the data.

    python examples/private_sets.py --preset smoke
    python examples/private_sets.py --dataset mnist28 --methods class_means larger random --epsilons 1 10 --seeds 0

The results are accuracies of networks that are trained from scratch on each set. Epsilon is computed from the ledger
and holds for one set; the noise differs between runs. At 16x16 every method searches four configurations on public
images; at 28x28 every method has one configuration (docs/results/privacy.md).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distillkit import LabeledImages, Normalization
from distillkit.augment import DIGITS, DSA, NATURAL
from distillkit.condense import distribution_matching, random_subset
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.privacy import EmbeddingNetworks, Passes, condense_private, image_sgd
from distillkit.study import Condense, Study, Task, grid, summary_table
from distillkit.training import Protocol
from shared.datasets import load_private
from shared.options import command_line, parse_arguments, refuse_unused
from shared.study import run_study

RECORDS = {"digits": 1438, "usps": 7291, "public": 1438}  # public numbers of private records; 60,000 of the others

SEARCH: dict[str, list[dict[str, Any]]] = {
    "class_means": grid(num_networks=[5, 20], steps=[100, 200]), "quick": grid(num_networks=[5, 20], lr=[100.0, 200.0]),
    "image_sgd": grid(lr=[0.03, 0.1, 0.3, 1.0]), "dm": grid(lr=[0.3, 1.0, 3.0, 10.0]),
}  # fmt: skip
"""Search at 16x16. Class means take two passes; "quick" makes 30 updates of the images in total."""
FULL = {
    "class_means": [{"num_networks": 4, "steps": 300, "first_num_networks": 3, "first_steps": 150}],
    "larger": [{"num_networks": 10, "steps": 600, "first_num_networks": 10, "first_steps": 300}],
}
"""Settings at 28x28. Class means take three passes; the networks of later passes learn from the previous set."""

METHODS = ("class_means", "larger", "quick", "image_sgd", "dm", "clean", "random", "all")
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"ipc": 2, "nets": 1, "epochs": 2, "records": 200, "small": {"steps": 2}, "epsilons": [8.0]},
    "cpu": {}, "paper": {"seeds": list(range(10)), "nets": 5},
}  # fmt: skip


class Bfloat16(ConvNet):
    """A ConvNet that computes in bfloat16 and returns float32, for the networks that test a set."""

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `images`."""
        # No cache: it would keep the rounded weights across training steps.
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            return super().features(images).float()


def whole(real: LabeledImages) -> LabeledImages:
    """Return the whole dataset as the condensed set."""
    return real


def candidates(o: argparse.Namespace) -> dict[str, Condense]:
    """Return the candidates, one per row. Controls use the settings of class means at the first epsilon."""
    full, augment = o.dataset.endswith("28"), DSA(NATURAL if o.dataset.startswith("fashion") else DIGITS)

    def matched(condense: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
        def make(factory: Any, task: Task, **tried: Any) -> Any:
            own, networks = {"ipc": o.ipc, **fixed, **tried, **o.small}, RandomNetworks(factory)
            if condense is image_sgd:
                own["size"] = o.records or RECORDS.get(task.name, 60_000)
            if condense is condense_private:
                own["passes"] = Passes(**{k: own.pop(k) for k in [*own] if k in Passes.__dataclass_fields__})
                embedding = EmbeddingNetworks(networks, augment=own.pop("augment", None))
                return partial(condense, networks=embedding, **own)
            return partial(condense, networks=networks, **own)

        return make

    def candidate(make: Callable[..., Any], epochs: int = 250 if full else 75, **options: Any) -> Condense:
        protocol = Protocol(epochs=o.epochs or epochs, batch=25, lr=0.01 if full else 0.03, augment=augment)
        options |= {"tested": partial(Bfloat16, (1, 28, 28), width=128, depth=3)} if full else {}
        return Condense(make, num_networks=o.nets or (2 if full else 3), protocol=protocol, **options)

    search = FULL if full else {key: own[-1:] for key, own in SEARCH.items()} if o.preset == "smoke" else SEARCH
    learned = {"count": 3, "augment": augment, "train": Protocol(epochs=60, batch=25, augment=augment)}
    means = partial(matched, condense_private, **(learned if full else {"first_steps": o.small.get("steps", 100)}))
    rows = [("class_means", f"class means, epsilon {e:g}", means(epsilon=e)) for e in o.epsilons]
    like: dict[str, Any] = {} if full else {"like": rows[0][1]}
    if full:
        rows += [("larger", f"more {title}", make) for _, title, make in rows]
    else:
        real = matched(distribution_matching, steps=300, batch_real=64, init="real")
        rows += [("quick", "class means in 30 updates, epsilon 8", means(epsilon=8.0, steps=20, first_steps=10))]
        rows += [("image_sgd", "image SGD, epsilon 8", matched(image_sgd, epsilon=8.0, rate=0.05, steps=300))]
        rows += [("dm", "distribution matching from real images", real)]
    found = {(key, title): candidate(make, search=search[key]) for key, title, make in rows}
    clean = means(epsilon=math.inf, ledger=None)
    found["clean", "class means without noise"] = candidate(clean, **(like or {"search": search["class_means"]}))
    found["random", "random real images"] = candidate(lambda factory, **_: partial(random_subset, ipc=o.ipc), **like)
    found["all", "all real images"] = candidate(lambda factory, **_: whole, epochs=20, **like)
    return {title: candidate for (key, title), candidate in found.items() if key in o.methods}


def main(words: list[str] | None = None) -> None:
    """Run the example."""
    parser = command_line(__doc__, out="runs/private-sets", presets=PRESETS)
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist", "usps", "fashionmnist", "mnist28", "fashionmnist28"), default="digits")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="at 16x16, always include class_means")
    add("--epsilons", type=float, nargs="+", default=[8.0, 4.0, 1.0], help="epsilons of class means")
    parser.set_defaults(ipc=10, nets=None, epochs=None, records=None, small={})
    o = parse_arguments(parser, words)
    refuse_unused(parser, words, "without class_means", "--epsilons", unless={"class_means", "larger"} & {*o.methods})
    absent = {"quick", "image_sgd", "dm"} if o.dataset.endswith("28") else {"larger"}
    if o.methods is not METHODS and absent & {*o.methods}:
        parser.error(f"--methods {' and '.join(sorted(absent & {*o.methods}))} are not for --dataset {o.dataset}")
    network: Any = partial(ConvNet, (1, 16, 16), width=32, depth=2)
    size, space = 16, (0.1307, 0.3081)
    if o.dataset.endswith("28"):
        size, space, network = 28, (0.0, 0.35), partial(ConvNet, (1, 28, 28), width=64, depth=3)
    fixed: Any = {"size": size, "normalization": Normalization([space[0]], [space[1]]), "draw": "part"}
    read = partial(load_private, o.dataset.removesuffix("28"), o.data, o.records, **fixed)
    public = partial(load_private, "mnist" if o.dataset == "usps" else "usps", o.data, RECORDS["public"], **fixed)
    tune_on = Task("public", public, factory=network) if size == 16 and o.preset != "smoke" else None
    study = Study(o.out, Task(o.dataset, read, factory=network), candidates(o), seeds=o.seeds, tune_on=tune_on)
    columns = ["noise", "sigma", "cpu_seconds_condense", "cpu_seconds_test"]
    run_study(study, o, lambda found: [summary_table(found, columns=columns)], by=(), sets=10)


if __name__ == "__main__":
    main()
