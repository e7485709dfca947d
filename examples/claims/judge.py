"""Judge of FedLGD's synthetic anchors: a network trained on real images, and the share that it classifies correctly."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import nn

from distillkit.data import Split
from distillkit.networks import ConvNet, initialize
from distillkit.rng import derive
from distillkit.study import Records, Table
from distillkit.training import Protocol, accuracy, train
from fl.addons import Anchors
from fl.study import load as load_run
from shared.measurement import measure_runs, share_table


def judge_anchors(records: Records, images: Split) -> Table:
    """Return a table of the share of anchors that the judge classifies correctly after the last round.

    Args:
        records: records of the study. Runs without anchors are left out; results are in `judge.json` of each run.
        images: images of the study's task. The judge trains on all training images, of all clients.
    """

    @cache
    def judge() -> nn.Module:
        network = ConvNet(images.train.shape, images.train.num_classes, width=32, depth=2)
        initialize(network, derive(0, "judge"))
        protocol = Protocol(epochs=10, batch=64)
        return train(network, images.train, protocol, generator=derive(0, "judge's order"), progress=False)

    def shares(folder: Path) -> dict[str, float] | None:
        anchors = load_run(folder).sets.get(Anchors.anchors.key)
        if anchors is None:
            return None
        return {"anchors": accuracy(judge(), anchors), "test": accuracy(judge(), images.test)}

    note = "Share of the anchors, and of the test images, that a network trained on all real images names correctly."
    columns = {"anchors": "anchors named %", "test": "test named %"}
    return share_table(measure_runs(records, "judge.json", shares), columns, note)
