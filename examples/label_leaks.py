"""Measure which training records the labels of a teacher reveal: a canary attack on each kind of labels.

    python examples/label_leaks.py --preset smoke
    python examples/label_leaks.py --datasets digits usps fashionmnist --data DATA

Two teachers are trained on disjoint halves of some records. Each half has its own canaries: records with wrong labels.
A student then sees other images, with labels from one teacher. The attack counts how often the student repeats the
wrong label of a canary that its teacher saw, and how often that of a canary that its teacher did not see.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attacks.membership import canary_attack
from distillkit import LabeledImages, data
from distillkit.augment import CropFlip
from distillkit.condense import random_subset
from distillkit.fingerprint import set_fingerprint
from distillkit.labels import CutMix, Relabel, soft_labels
from distillkit.networks import build
from distillkit.rng import derive
from distillkit.study import Condense, Job, Study, summary_table
from distillkit.training import Protocol, accuracy, train
from shared.data import convnet_task
from shared.label_regimes import per_view
from shared.options import command_line, parse_arguments
from shared.study import run_study
from shared.teacher import kept, untrained_teacher

REGIMES = ("teacher", "true labels", "decisions", "one row", "one row, T=4", "per view, T=4", "per view, T=20")
"""Labels of the student's images; "teacher" is an attack on the teacher itself."""
COLUMNS = ["taught", "control", "canaries", "accuracy_observed"]
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"datasets": ["digits"], "ipc": 2, "canaries": 10, "records": 60, "epochs": 1, "updates": 4,
        "width": 8, "size": None},
    "cpu": {"datasets": ["digits", "usps"], "ipc": 50, "canaries": 100, "records": 900,
        "epochs": 60, "updates": 600, "width": 32, "size": None},
}  # fmt: skip


def train_teacher(records: LabeledImages, seed: int, epochs: int) -> nn.Module:
    """Train a teacher without augmentation, so that it memorizes."""

    def fresh() -> nn.Module:
        network = build(partial(untrained_teacher, records), derive(seed, "network"))
        protocol = Protocol(epochs, lr=0.02, batch=64, schedule="cosine")
        return train(network, records, protocol, generator=derive(seed, "order"), progress=False)

    return kept((set_fingerprint(records), seed, epochs), fresh)


def train_student(
    teacher: nn.Module, seed: int, *, images: LabeledImages, regime: str, protocol: Protocol, network: Any
) -> Any:
    """Train a student on other images, with labels from a teacher."""
    if regime == "teacher":
        return teacher
    if regime.startswith("per view"):
        protocol = per_view(protocol, teacher)
        if regime.endswith("T=4"):
            protocol = replace(protocol, relabel=Relabel(teacher, temperature=4.0, mix=CutMix()))
    elif regime != "true labels":
        images = soft_labels(images, teacher, temperature=4.0 if regime.endswith("T=4") else 1.0)
        if regime == "decisions":
            images = images.replace(labels=images.labels.argmax(1))
    fresh = build(network, derive(seed, "network"))
    return train(fresh, images, protocol, generator=derive(seed, "order"), progress=False)


def label_leak(
    images: LabeledImages, job: Job, *, regime: str, protocol: Protocol, records: int, canaries: int, epochs: int
) -> dict[str, Any]:
    """Attack a kind of labels. Return the counts of repeated labels and the accuracy of the student.

    Args:
        images: the images that the student sees; they are no records of the teachers.
        job: the run.
        regime: one of `REGIMES`.
        protocol: protocol of the student with hard labels.
        records, canaries: number of records of both teachers together, and of canaries of each.
        epochs: epochs of the teachers.
    """
    real, test = job.task.pooled(job.split, keep=job.keep)
    seen = {image.numpy().tobytes() for image in images.images}
    other = torch.tensor([image.numpy().tobytes() not in seen for image in real.images]).nonzero().flatten()
    chosen = other[torch.randperm(len(other), generator=derive(job.seed, "records"))[:records]]
    network = partial(job.task.network(job.split), images.num_classes)
    accuracies = []

    def publish(teacher: nn.Module, seed: int) -> nn.Module:
        found = train_student(teacher, seed, images=images, regime=regime, protocol=protocol, network=network)
        accuracies.append(accuracy(found, test))
        return found

    found = canary_attack(
        real[chosen], partial(train_teacher, epochs=epochs), publish, canaries=canaries,
        generator=derive(job.seed, "canaries"),
    )  # fmt: skip
    return {
        "canaries": found.taught.trials, "taught": found.taught.hits, "control": found.control.hits,
        "p_value": found.p_value, "accuracy_observed": sum(accuracies) / len(accuracies),
    }  # fmt: skip


def main(words: list[str] | None = None) -> None:
    """Run the example: one study for each dataset."""
    parser = command_line(__doc__, out="runs/label-leaks", presets=PRESETS)
    parser.add_argument("--datasets", nargs="+", help=f"names of datasets: {', '.join(data.NAMES)}")
    o = parse_arguments(parser, words)
    for name in o.datasets:
        task = convnet_task(o, name)
        own = task.load()
        epochs = max(1, o.updates // -(-o.ipc * own.train.num_classes // 25))
        protocol = Protocol(epochs, batch=25, augment=CropFlip(own.train.normalization, pad=2, flip=0.0))
        attack = {"protocol": protocol, "records": o.records, "canaries": o.canaries, "epochs": o.epochs}
        found = {
            regime: Condense(
                lambda factory: partial(random_subset, ipc=o.ipc), num_networks=1, protocol=protocol,
                measure=partial(label_leak, regime=regime, **attack),
            )
            for regime in REGIMES
        }  # fmt: skip
        study = Study(o.out / name, task, found, seeds=o.seeds)
        run_study(study, o, lambda records: [summary_table(records, columns=COLUMNS)], by=(), ends=False)


if __name__ == "__main__":
    main()
