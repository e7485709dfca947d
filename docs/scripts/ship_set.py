"""Make a set that the package ships, with its card, or all of them.

    python docs/scripts/ship_set.py digits-dm-10

`SETS` states how each set is made. Learned images become a set in `distillkit/data/shipped/`, or, with `--large`, in
`sets/`, which is not in the wheel. Real images are not copied: their file names rows of the dataset.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attacks import leaks
from distillkit import LabeledImages
from distillkit._utils.files import write_tensors
from distillkit.augment import DIGITS, DSA
from distillkit.condense import distribution_matching, random_subset
from distillkit.data import Split, load, set_files
from distillkit.evaluate import Evaluation, evaluate
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.rng import derive
from distillkit.study import git_commit
from distillkit.training import Protocol

ROOT = Path(__file__).parents[2]
DIGITS_LICENCE = (
    "CC BY 4.0: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, doi 10.24432/C50P49"
)
PROTOCOL = Protocol(epochs=150, augment=DSA(DIGITS))


def convnet(split: Split) -> Any:
    """Return a factory of the networks that match and that are tested."""
    return partial(ConvNet, split.train.shape, split.train.num_classes, width=32, depth=2)


def match(split: Split) -> LabeledImages:
    """Condense the digits by distribution matching."""
    networks = RandomNetworks(convnet(split))
    return distribution_matching(split.train, networks=networks, ipc=10, steps=200, augment=DSA(DIGITS), generator=0)


SETS: dict[str, dict[str, Any]] = {
    "digits-dm-10": {
        "dataset": "digits", "options": {"size": 16}, "licence": DIGITS_LICENCE, "make": match,
        "method": "distribution matching (Zhao and Bilen, 2023), 10 images per class",
    },
    "digits-random-10": {
        "dataset": "digits", "options": {"size": 16}, "licence": DIGITS_LICENCE, "make": None, "ipc": 10,
        "method": "random real images, 10 per class",
    },
}  # fmt: skip


def card(name: str, entry: dict[str, Any], result: Evaluation, leaked: dict[str, Any]) -> dict[str, Any]:
    """Return the card of a set as JSON values."""
    rows = {row.data: {"mean": row.mean, "std": row.std, "networks": len(row.accuracies)} for row in result.rows}
    return {
        **{key: entry[key] for key in ("dataset", "options", "licence", "method")},
        "command": f"python docs/scripts/ship_set.py {name}", "commit": git_commit(),
        "protocol": result.record()["protocol"],
        "architecture": result.rows[0].architecture, "accuracy": rows["set"], "random_real": rows.get("random real"),
        "leak": leaked, "epsilon": None,
    }  # fmt: skip


def write_rows(path: Path, rows: Tensor, chosen: LabeledImages, entry: dict[str, Any], info: dict[str, Any]) -> None:
    """Write a file that names rows of a dataset's training set."""
    facts = {
        "dataset": entry["dataset"],
        "options": entry["options"],
        "checksum": set_files._checksum(chosen),
        "info": info,
    }
    tensors = {"indices": rows, "labels": chosen.labels}
    write_tensors(path, tensors, {"format": "distillkit.ImageIndex/1", "set": json.dumps(facts)})


def ship(name: str, folder: Path) -> Path:
    """Make and evaluate one set, and write its file."""
    entry = SETS[name]
    split = load(entry["dataset"], **entry["options"])
    numbered = split.train.replace(columns={"row": torch.arange(len(split.train))})
    small = entry["make"](split) if entry["make"] else random_subset(numbered, ipc=entry["ipc"], generator=derive(0))
    result = evaluate(small, split.test, convnet(split), protocol=PROTOCOL, real=split.train)
    print(result)
    info = {**small.info, "card": card(name, entry, result, leaks(small, *split).record())}
    path = folder / f"{name}.safetensors"
    if entry["make"]:
        return small.replace(info=info).save(path)
    write_rows(path, small.columns["row"], small, entry, info)
    return path


def main() -> None:
    """Make the named sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SETS), help="names of SETS; default: all")
    parser.add_argument("--large", action="store_true", help="write to sets/, which is not in the wheel")
    given = parser.parse_args()
    folder = ROOT / "sets" if given.large else ROOT / "distillkit" / "data" / "shipped"
    folder.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        print(f"wrote {ship(name, folder).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
