"""Ship the sets of a leaderboard run: write their files with cards.

    python examples/leaderboard.py --datasets digits --seeds 0 --out runs/leaderboard
    python docs/scripts/ship_set.py runs/leaderboard/digits

Every FOLDER is the study of one dataset. The set of each method's first seed becomes a file in
`distillkit/data/shipped/`, or, with `--large`, in `sets/`, which is not in the wheel. A set of whole real images is not
copied: its file contains rows of the dataset. Sets are left out, with a message, if they contain parts of real images,
or if no licence of the dataset allows derived images.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attacks import leaks
from distillkit import LabeledImages
from distillkit._utils.files import write_tensors
from distillkit.data import load, set_files
from distillkit.study import Record, read_records

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from leaderboard import arguments, candidates  # noqa: E402

LICENCES = {
    "digits": "CC BY 4.0: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, doi 10.24432/C50P49",
    "mnist": "CC BY-SA 3.0: Y. LeCun and C. Cortes, MNIST",
    "fashionmnist": "MIT: Zalando SE, Fashion-MNIST",
}
"""Licences of datasets that allow derived images. USPS and CIFAR-10 state none."""
METHODS = {
    "dm": "distribution matching (Zhao and Bilen, 2023)", "dc": "gradient matching (Zhao et al., 2021)",
    "dsa": "gradient matching with DSA (Zhao and Bilen, 2021)",
    "dm-tiles": "distribution matching with four images in each stored image",
    "deepinversion": "inversion of a trained network (DeepInversion, Yin et al., 2020)",
    "class-means-8": "private class means with epsilon 8", "class-means-1": "private class means with epsilon 1",
    "random": "random real images", "herding": "herding", "k-center": "k-center",
}  # fmt: skip
SELECTED = ("random", "herding", "k-center")
"""Methods whose sets consist of whole real images."""
OPTIONS = {"digits": {"size": 16}, "usps": {"size": 16}}


def card(record: Record, leaked: dict[str, Any]) -> dict[str, Any]:
    """Return the card of a set as JSON values. Its accuracies are those of one network for each kind of labels."""
    method, _, ipc = record.method.rpartition("-")
    line = record.line
    protocol = candidates(arguments([]), record.task, int(ipc))[record.method].protocol
    where = f"--datasets {record.task} --methods {method} --ipc {ipc} --seeds {record.seed}"
    return {
        "dataset": record.task, "options": OPTIONS.get(record.task, {}),
        "method": f"{METHODS[method]}, {ipc} per class",
        "licence": LICENCES.get(record.task, "the file contains no images of the dataset"),
        "command": f"python examples/leaderboard.py {where}", "commit": line["commit"], "settings": line["settings"],
        "protocol": protocol.record(), "architecture": "ConvNet of width 32 with instance normalization",
        "accuracy": {"hard": line["accuracy_last"], "row": line["labels"]["row"], "view": line["labels"]["view"]},
        "teacher": line["labels"]["teacher"], "leak": leaked, "epsilon": line["epsilon"],
    }  # fmt: skip


def rows_of(small: LabeledImages, train: LabeledImages) -> Tensor:
    """Return the row of each image of a selected set in the training set, int64 [N]."""
    rows = {image.numpy().tobytes(): row for row, image in enumerate(train.images)}
    return torch.tensor([rows[image.numpy().tobytes()] for image in small.images])


def write_rows(path: Path, rows: Tensor, chosen: LabeledImages, info: dict[str, Any]) -> None:
    """Write a file that names rows of a dataset's training set."""
    entry = info["card"]
    facts = {key: entry[key] for key in ("dataset", "options")}
    facts |= {"checksum": set_files._checksum(chosen), "info": info}
    tensors = {"indices": rows, "labels": chosen.labels}
    write_tensors(path, tensors, {"format": "distillkit.ImageIndex/1", "set": json.dumps(facts)})


def ship(record: Record, folder: Path, data: Path | None) -> str:
    """Write the file of one set, and return a line that says so, or why it is left out."""
    method = record.method.rpartition("-")[0]
    name = f"{record.task}-{record.method}"
    if method not in METHODS:
        return f"{name} is left out: its images contain parts of real images"
    if method not in SELECTED and record.task not in LICENCES:
        return f"{name} is left out: {record.task} has no licence that allows derived images"
    small = LabeledImages.load(Path(str(record.folder)) / "set.safetensors")
    split = load(record.task, root=data, **OPTIONS.get(record.task, {}))
    found = leaks(small, split.train, split.test).record()
    info = {**small.info, "card": card(record, {key: found[key] for key in ("copies", "within_25_db")})}
    path = folder / f"{name}.safetensors"
    if method in SELECTED:
        write_rows(path, rows_of(small, split.train), small, info)
    else:
        small.replace(info=info, class_names=split.classes).save(path)
    return f"wrote {path.relative_to(ROOT)}"


def main() -> None:
    """Ship the sets of the first seed of every study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="studies of examples/leaderboard.py")
    parser.add_argument("--data", type=Path, default=None, help="root of the datasets by name")
    parser.add_argument("--large", action="store_true", help="write to sets/, which is not in the wheel")
    given = parser.parse_args()
    folder = ROOT / "sets" if given.large else ROOT / "distillkit" / "data" / "shipped"
    folder.mkdir(parents=True, exist_ok=True)
    for study in given.folders:
        records = read_records(study)
        for record in records:
            if record.seed == min(other.seed for other in records):
                print(ship(record, folder, given.data), flush=True)


if __name__ == "__main__":
    main()
