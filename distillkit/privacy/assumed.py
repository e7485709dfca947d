"""What each private entry point takes to be public: epsilon covers the records, never these."""

from __future__ import annotations

__all__ = ["ASSUMED", "FACTS"]

FACTS = {
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
"""The facts by name, and what each means."""

_SET = ("classes", "space", "size", "budget", "clip", "networks", "start", "augment", "seed", "options")
_RUN = ("clients", "taking part", "disjoint")

ASSUMED: dict[str, tuple[str, ...]] = {
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
"""Entry point -> the names of what it assumes."""
