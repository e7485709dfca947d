"""Data of the nodes (a part of the digits, or a folder of images) and test set of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distillkit import LabeledImages, Normalization
from distillkit.data import load, load_folder
from fl import ClientData

HALF = 0.5
"""Mean and standard deviation for the normalization of a folder's images. They are public, and equal on all nodes."""


def load_client(partition: int, node: Mapping[str, Any], config: Mapping[str, Any]) -> ClientData:
    """Return the images of one node: four fifths for training and one for evaluation.

    Args:
        partition: index of the node's partition.
        node: the node config; `images` is a folder `class/image.png`, if the node has its own images.
        config: the run config.
    """
    if "images" in node:
        train, test = folder(node["images"], config, 0.2)
        return ClientData(train, test if len(test) else None)
    whole, count = load("digits"), int(node["num-partitions"])
    return ClientData(whole.train[torch.arange(len(whole.train))[partition::count]])


def test_set(config: Mapping[str, Any]) -> LabeledImages | None:
    """Return the server's test set, if any."""
    if not config["test"]:
        return None
    return load("digits").test if config["test"] == "digits" else folder(config["test"], config, 0.0)[0]


def folder(path: str, config: Mapping[str, Any], test_fraction: float) -> tuple[LabeledImages, LabeledImages]:
    """Return a folder's training and test images. A label is the index of the class among all nodes' classes."""
    channels, names = config["channels"], [name.strip() for name in config["classes"].split(",")]
    public = Normalization((HALF,) * channels, (HALF,) * channels)
    found = load_folder(  # classes and hold-out as private methods require them: no image changes them for others
        path, size=config["size"], channels=channels, normalization=public, classes=names, hold_out="content",
        test_fraction=test_fraction, progress=False,
    )  # fmt: skip
    return found.train, found.test
