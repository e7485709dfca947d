"""Share of records that are visible in the messages of the quickstart's FedDM."""

from __future__ import annotations

from typing import Any

import torch

import quickstart
from attacks import clopper_pearson, roc
from attacks.reporting.copies import closest_images
from attacks.reporting.similarity import PSNR_LEVELS, random_baseline
from membership.federated import run_and_observe


def demo(preset: str, seed: int) -> dict[str, Any]:
    """Measure how many records are visible in the messages of the quickstart's FedDM (ten clients, Dirichlet(0.01)).

    Returns:
        A mapping. "above" holds, for each PSNR in decibels, the share of records that are at least this close to some
        sent image: for training records, for held-out records, and for training records if random records had been sent
        instead of the images. "auc", and "tpr" and "fpr" at a false-positive rate of 1 %, are results of an attack by
        distance. "images" is the number of sent images.
    """
    name = "smoke" if preset == "smoke" else "look"
    task = quickstart.task(quickstart.SKEWED_MORE, quickstart.PRESETS[name]["rounds"])
    split, candidate = task.load(), quickstart.candidates(name)["FedDM"]
    clients = [split.train[rows] for rows in task.assign(split, seed).owners]
    method: Any = candidate.build(task, split, {**candidate.settings, **quickstart.CHOSEN["FedDM"]})
    _, sets = run_and_observe(method, clients, task.rounds, seed)
    decode = split.train.normalization.decode
    rounds, members, others = [decode(one).clamp(0, 1) for one in sets], split.train.pixels(), split.test.pixels()
    decibels = {
        "training": closest_images(torch.cat(rounds), members)[0],
        "held-out": closest_images(torch.cat(rounds), others)[0],
        "random": closest_images(torch.cat(random_baseline(rounds, members)), members)[0],
    }
    above: dict[str, Any] = {}
    for level in PSNR_LEVELS:
        counts = {who: (int((found >= level).sum()), len(found)) for who, found in decibels.items()}
        above[str(level)] = {who: [k / n, *clopper_pearson(k, n)] for who, (k, n) in counts.items()}
    scores, truth = torch.cat(list(decibels.values())[:2]), torch.arange(len(members) + len(others)) < len(members)
    curve = roc(scores.double(), truth)
    point = curve.at(0.01)
    return {
        "attack": "distance", "above": above, "auc": curve.auc, "images": sum(map(len, rounds)), "few": point.few,
        "tpr": [point.tpr.value, point.tpr.low, point.tpr.high],
        "fpr": [point.fpr.value, point.fpr.low, point.fpr.high],
    }  # fmt: skip
