"""Digits of several domains, the table of accuracies by domain, and the pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distillkit import LabeledImages, Normalization, plot
from distillkit.data import Split, as_domains, load, mnist_m_like, partition, synth_digits_like
from distillkit.plot.figure import subplots
from distillkit.study import Records, Table, Task
from fl.addons import Anchors, Condensed
from fl.engine.store import Store, read_message
from fl.study import load as load_run
from shared.measurement import measure_runs, share_table

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


def digits(names: tuple[str, ...], root: Path | None, size: int, train: int | None, test: int | None) -> Split:
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
        records: records of the study; the accuracies are stored in each run's folder (`domains.json`).
        images: images of the study's task. If they have no domains, the result is an empty list.
        ipc: condensed images per class, which select the columns of Table 1.
    """
    if not images.domains:
        return []
    groups = images.test.columns["domain"]
    tests = {name: images.test[groups == number] for number, name in enumerate(images.domains)}

    @torch.no_grad()
    def by_domain(folder: Path) -> dict[str, float]:
        [network] = load_run(folder).models.values()
        found = dict[str, float]()
        for name, own in tests.items():
            said = torch.cat([network(part)[:, : own.num_classes].argmax(1) for part in own.images.split(500)])
            found[name] = float((said == own.labels).double().mean())
        return found

    averages = TABLE_1 if ipc in (10, 50) else {}
    paper = {method: dict(zip(DOMAINS, map(str, row[ipc == 50]))) for method, row in averages.items()}
    note = "Accuracy on the tests of each domain; in brackets that of Table 1, which has five. ± is over seeds."
    columns = {name: f"{name} %" for name in images.domains}
    return [share_table(measure_runs(records, "domains.json", by_domain), columns, note, paper)]


def draw(records: Records, task: Task, images: Split, path: Path) -> None:
    """Draw the clients' real and condensed images, and the server's anchors, of FedLGD's first run.

    Args:
        records: records of the study.
        task, images: task of the study, and its images.
        path: path of the picture.
    """
    record = next(record for record in records if record.method == "FedLGD" and record.rows)
    folder, clients = Path(str(record.folder)), task.assign(images, record.seed).clients
    names = images.domains or [f"client {number}" for number in range(len(clients))]
    own = {number: name for number, name in enumerate(names) if len(clients[number])}
    sets = {f"{name}, real": clients[number] for number, name in own.items()}
    sets |= {f"{name}, condensed": _condensed(folder, number) for number, name in own.items()}
    anchors = load_run(folder).sets.get(Anchors.anchors.key)
    sets |= {"anchors": anchors} if anchors else {}
    figure, axes = subplots(None, len(sets), 2.2, 4.6, columns=len(own))
    for ax, (name, one) in zip(axes, sets.items()):
        plot.grid(one, per_class=3, ax=ax)
        ax.set_title(name, fontsize=8)
    figure.savefig(path, dpi=150)


def _condensed(folder: Path, client: int) -> LabeledImages:
    """Return the set on which a client trained in its last round, from the state that the client keeps."""
    path = max((Store(folder).memories / str(client)).glob("*.safetensors"), key=lambda p: int(p.stem.split("-")[0]))
    return read_message(path)[0][Condensed.own]
