"""Digits of several domains, the table of accuracies by domain, and the pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distillkit import LabeledImages, Normalization, plot
from distillkit.data import Split, as_domains, load, mnist_m_like, partition, synth_digits_like
from distillkit.networks import split
from distillkit.plot.figure import subplots
from distillkit.study import Record, Records, Table, Task, mean_std
from fl.addons import Anchors, Condensed
from fl.engine.store import Store, read_message
from fl.study import load as load_run
from shared.files import write_file

__all__ = ["AVERAGES", "DOMAINS", "digits", "domain_table", "draw"]

DOMAINS = ("mnist", "svhn", "usps", "synthdigits", "mnistm")
TABLE_1 = {
    "FedAvg": ((94.0, 65.9, 91.0, 55.5, 73.2, 75.9), (96.1, 71.7, 92.9, 69.1, 83.3, 82.6)),
    "FedProx": ((93.9, 66.0, 90.9, 55.4, 73.7, 76.0), (96.1, 71.5, 92.9, 69.0, 83.3, 82.5)),
    "FedNova": ((94.2, 65.5, 90.6, 56.2, 74.6, 76.2), (96.2, 73.1, 93.0, 69.1, 83.7, 83.0)),
    "SCAFFOLD": ((94.1, 64.9, 90.6, 56.0, 74.6, 76.0), (96.3, 73.3, 93.4, 70.1, 84.7, 83.6)),
    "MOON": ((85.0, 49.2, 83.4, 31.5, 56.9, 61.2), (95.5, 70.5, 92.0, 67.2, 82.3, 81.5)),
    "VHL": ((95.0, 68.6, 92.2, 60.7, 76.1, 78.5), (96.9, 75.2, 94.4, 72.3, 83.7, 84.5)),
    "FedLGD": ((95.8, 68.2, 92.4, 67.4, 79.4, 80.6), (97.1, 77.3, 94.6, 78.5, 86.1, 86.7)),
}
AVERAGES = [{"domains": {name: f"{row[k][-1]:.1f}" for name, row in TABLE_1.items()}} for k in range(2)]
"""Averages in the ConvNet rows of Table 1, in per cent, for 10 and for 50 images per class."""


def digits(names: tuple[str, ...], root: str | None, size: int, train: int | None, test: int | None) -> Split:
    """Return equally many digits of several sources, in three channels with mean and std 0.5 as in the authors' code.

    Args:
        names: names for `data.load`; or `digits-m-like`, scikit-learn's digits over photographs; or `synthdigits-like`.
        root: folder of the datasets.
        size: height and width.
        train, test: maximum number of images per source; None: the number that the smallest source has.
    """
    read = dict[str, Split]()
    for name in names:
        if name == "digits-m-like":
            read[name] = mnist_m_like(load("digits", size=size))
        elif name == "synthdigits-like":
            read[name] = synth_digits_like(train=train or 10_000, test=test or 2_000, size=size)
        else:
            read[name] = load(name, root=root, size=size, channels=3)
    joined = as_domains(read, size=size, channels=3, normalization=Normalization([0.5] * 3, [0.5] * 3))
    return replace(joined, train=_balance(joined.train, train), test=_balance(joined.test, test))


def _balance(data: LabeledImages, most: int | None) -> LabeledImages:
    group = partition.by_domain(data.columns["domain"])
    size = min(most or len(data), *map(len, group))
    return data[torch.cat(partition.cap_size(data.labels, group, size))]


def domain_table(records: Records, images: Split, ipc: int) -> list[Table]:
    """Return a table of each candidate's accuracy by domain after the last round, with the paper's in brackets.

    Args:
        records: records of the study; the accuracies are cached in each run's folder (`domains.json`).
        images: images of the study's task. If they have no domains, the result is an empty list.
        ipc: condensed images per class, which select the columns of Table 1.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for record in (r for r in records if images.domains and r.rows):
        found.setdefault(record.method, []).append(_by_domain(record, images))
    if not found:
        return []
    cells, rows = [], []
    for method, runs in found.items():
        said = [mean_std([run[name] for run in runs], 100.0) for name in images.domains]
        known = TABLE_1[method][ipc == 50] if method in TABLE_1 and ipc in (10, 50) else ()
        paper = dict(zip(DOMAINS, known))
        cells.append((method, *(f"{s} ({paper[n]:.1f})" if n in paper else s for n, s in zip(images.domains, said))))
        rows.append({"method": method, **{n: sum(run[n] for run in runs) / len(runs) for n in images.domains}})
    note = "Accuracy on the tests of each domain; in brackets that of Table 1, which has five. ± is over seeds."
    return [Table(("method", *(f"{name} %" for name in images.domains)), tuple(cells), rows, (note,), left=1)]


@torch.no_grad()
def _by_domain(record: Record, images: Split) -> dict[str, float]:
    path = Path(str(record.folder)) / "domains.json"
    if not path.exists():
        [network], found = load_run(path.parent).models.values(), dict[str, float]()
        for number, name in enumerate(images.domains):
            own = images.test[(images.test.columns["domain"] == number).nonzero().flatten()]
            said = torch.cat([network(part)[:, : own.num_classes].argmax(1) for part in own.images.split(500)])
            found[name] = float((said == own.labels).double().mean())
        write_file(path, json.dumps(found) + "\n")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def draw(records: Records, task: Task, images: Split, out: Path) -> None:
    """Draw the clients' real and condensed images, the server's anchors, and the distances between clients.

    Args:
        records: records of the study; the first runs of FedAvg and FedLGD are shown.
        task, images: task of the study, and its images.
        out: folder of the pictures.
    """
    folders = {r.method: Path(str(r.folder)) for r in reversed(records) if r.rows}
    seed = next(r.seed for r in records if r.method == "FedLGD")
    clients = task.assign(images, seed).clients
    names = images.domains or [f"client {number}" for number in range(len(clients))]
    own = {name: client for name, client in zip(names, clients) if len(client)}
    condensed = {name: _condensed(folders["FedLGD"], number) for number, name in enumerate(names) if name in own}
    anchors = load_run(folders["FedLGD"]).sets.get(Anchors.anchors.key)
    sets = {f"{n}, {kind}": o for kind, group in (("real", own), ("condensed", condensed)) for n, o in group.items()}
    _grids({**sets, "anchors": anchors} if anchors else sets, len(own), out / "sets.png")
    some = {name: client[torch.arange(0, len(client), -(-len(client) // 60))] for name, client in own.items()}
    methods = [name for name in ("FedAvg", "FedLGD, weight 0", "FedLGD") if name in folders]
    figure, axes = subplots(None, len(methods), 5.6, 4.2)
    for ax, name in zip(axes, methods):
        plot.tsne(_embedded(folders[name], some), {n: c.labels for n, c in some.items()}, classes=images.classes, ax=ax)
        ax.set_title(f"{name}: embeddings of the clients' images", fontsize=9)
    figure.savefig(out / "tsne.png", dpi=150, bbox_inches="tight")
    if len(own) > 1:
        first = {name: _condensed(folders["FedAvg"], number) for number, name in enumerate(names) if name in own}
        before, after = (_embedded(folders["FedAvg"], one) for one in (some, first))
        plot.mmd_table(before, after).savefig(out / "mmd.png", dpi=150)


def _grids(sets: Mapping[str, LabeledImages], across: int, path: Path) -> None:
    figure, axes = subplots(None, len(sets), 2.2, 4.6, columns=across)
    for ax, (name, one) in zip(axes, sets.items()):
        plot.grid(one, per_class=3, ax=ax)
        ax.set_title(name, fontsize=8)
    figure.savefig(path, dpi=150)


def _condensed(folder: Path, client: int) -> LabeledImages:
    """Return the set on which a client trained in its last round, from the state that the client keeps."""
    path = max((Store(folder).memories / str(client)).glob("*.safetensors"), key=lambda p: int(p.stem.split("-")[0]))
    return read_message(path)[0][Condensed.own]


@torch.no_grad()
def _embedded(folder: Path, sets: Mapping[str, LabeledImages]) -> dict[str, Any]:
    [network] = load_run(folder).models.values()
    return {name: split(network).features(one.images) for name, one in sets.items()}
