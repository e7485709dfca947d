"""Assumptions of each private entry point: the inputs that must be public, because epsilon covers only the records.

A ledger records the assumptions of the entry points that charged it (`Guarantee.assumptions`), so that whoever reads
epsilon can check them.
"""

from __future__ import annotations

__all__ = ["ASSUMPTIONS", "PUBLIC_INPUTS"]

PUBLIC_INPUTS = {
    "classes": "the class count K, and that these are the classes",
    "space": "shape, normalisation and number type of the images",
    "size": "the number of records that denominators are made of and delta is compared with",
    "budget": "epsilon or sigma, delta, rates, numbers of steps and of rounds",
    "clip": "the norms that contributions are clipped to",
    "model": "the network: architecture and the weights that it starts from",
    "networks": "the networks that embed the images, and their weights",
    "start": "the images that the fit starts from",
    "augment": "the augmentation",
    "seed": "all randomness but noise, Poisson draws and what hides them: networks, initial images, who takes part",
    "options": "every other option: chosen without a look at the private data",
    "clients": "how many clients there are",
    "taking part": "which clients take part in which round",
    "disjoint": "that no record lies with two clients",
}
"""Inputs that an entry point may assume to be public: name -> description."""

_SET = ("classes", "space", "size", "budget", "clip", "networks", "start", "augment", "seed", "options")
_RUN = ("clients", "taking part", "disjoint")

ASSUMPTIONS: dict[str, tuple[str, ...]] = {
    "condense_private": _SET,
    "image_sgd": _SET,
    "train_private": ("space", "size", "budget", "clip", "model", "options"),
    "release": ("classes", "space", "budget", "clip", "networks", "augment", "seed"),
    "private_histogram": ("classes", "budget"),
    "DPSGD": ("classes", "space", "size", "budget", "clip", "model", "seed", "options", *_RUN),
    "PrivateFedDM": (*_SET, "model", *_RUN),
    "SummedFedDM": (*_SET, "model", *_RUN),
    "ClientDP": ("classes", "space", "budget", "clip", "model", "seed", "options", "clients"),
}
"""Entry point -> the names (in `PUBLIC_INPUTS`) of the inputs that it assumes to be public."""
