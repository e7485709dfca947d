"""What a node holds: a share of the digits, or a folder of its owner's own images; and what the server tests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distillkit import LabeledImages, Normalization
from distillkit.data import load, load_folder
from fl import ClientData

HALF = 0.5
"""Mean and standard deviation of every channel of a folder: public, and the same on all nodes."""


def load_client(partition: int, here: Mapping[str, Any], config: Mapping[str, Any]) -> ClientData:
    """The images of one node, four fifths to train on and one to test on.

    Args:
        partition: the node's number.
        here: its node config; `images` names the folder, `class/picture.png`, if it has its own.
        config: the run config.
    """
    if "images" in here:
        train, test = folder(here["images"], config, 0.2)
        return ClientData(train, test if len(test) else None)
    whole, count = load("digits"), int(here["num-partitions"])
    return ClientData(whole.train[torch.arange(len(whole.train))[partition::count]])


def test_set(config: Mapping[str, Any]) -> LabeledImages | None:
    """What the server tests on, if it has anything."""
    if not config["test"]:
        return None
    return load("digits").test if config["test"] == "digits" else folder(config["test"], config, 0.0)[0]


def folder(path: str, config: Mapping[str, Any], test_fraction: float) -> tuple[LabeledImages, LabeledImages]:
    """A folder's images for training and for tests, labelled by the place of their class among all nodes' classes."""
    channels, names = config["channels"], [name.strip() for name in config["classes"].split(",")]
    public = Normalization((HALF,) * channels, (HALF,) * channels)
    found = load_folder(
        path, size=config["size"], channels=channels, normalization=public, test_fraction=test_fraction, progress=False
    )
    unknown = sorted(set(found.classes) - set(names))
    if unknown:
        raise ValueError(f"{path} holds classes that the run's `classes` does not name: {', '.join(unknown)}")
    places = torch.tensor([names.index(name) for name in found.classes])
    train, test = (part.replace(labels=places[part.labels], num_classes=len(names)) for part in found)
    return train, test
