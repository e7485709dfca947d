"""Judge of FedLGD's synthetic anchors: a network trained on real images, and the share that it classifies correctly."""

from __future__ import annotations

import json
from pathlib import Path

from distillkit.data import Split
from distillkit.networks import ConvNet, initialize
from distillkit.rng import derive
from distillkit.study import Records, Table, mean_std
from distillkit.training import Protocol, accuracy, train
from fl.addons import Anchors
from fl.study import load as load_run
from shared.files import write_file

__all__ = ["judge_anchors"]


def judge_anchors(records: Records, images: Split, *, width: int = 32, epochs: int = 10) -> Table:
    """Return a table of the share of anchors that the judge classifies correctly after the last round.

    Args:
        records: records of the study. Runs without anchors are skipped; the results are cached in each run's folder
            (`judge.json`).
        images: images of the study's task. The judge trains on all training images, of all clients.
        width: number of channels of the judge, a ConvNet of two blocks.
        epochs: number of epochs of its training.
    """
    judge, found = None, dict[str, list[dict[str, float]]]()
    for record in (r for r in records if r.rows and r.folder is not None):
        path = Path(str(record.folder)) / "judge.json"
        anchors = load_run(path.parent).sets.get(Anchors.anchors.key)
        if anchors is None:
            continue
        if not path.exists():
            if judge is None:
                network = ConvNet(images.train.shape, images.train.num_classes, width=width, depth=2)
                initialize(network, derive(0, "judge"))
                protocol = Protocol(epochs=epochs, batch=64)
                judge = train(network, images.train, protocol, generator=derive(0, "judge's order"), progress=False)
            shares = {"anchors": accuracy(judge, anchors), "test": accuracy(judge, images.test)}
            write_file(path, json.dumps(shares) + "\n")
        found.setdefault(record.method, []).append(json.loads(path.read_text(encoding="utf-8")))
    rows = [{"method": name, **{k: sum(s[k] for s in own) / len(own) for k in own[0]}} for name, own in found.items()]
    cells = [
        (name, *(mean_std([shares[key] for shares in own], 100.0) for key in ("anchors", "test")))
        for name, own in found.items()
    ]
    note = "Share of the anchors, and of the test images, that a network trained on all real images names correctly."
    return Table(("method", "anchors named %", "test named %"), tuple(cells), rows, (note,), left=1)
