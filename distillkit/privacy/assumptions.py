"""Inputs that each private entry point assumes to be public. Epsilon covers only the records, not these inputs.

An entry point is a function such as `condense_private` that charges a ledger. The ledger records the assumptions of
every entry point that charged it. `Guarantee.assumptions` lists them, so that readers of epsilon can check them.
"""

from __future__ import annotations

__all__ = ["ASSUMPTIONS", "PUBLIC_INPUTS"]

PUBLIC_INPUTS = {
    "classes": "the number of classes K, and which classes they are",
    "space": "shape, normalisation and number type of the images",
    "size": "the number of records used in denominators and compared with delta",
    "budget": "epsilon or sigma, delta, sample rates, numbers of steps and rounds",
    "clip": "the clipping norms of contributions",
    "model": "the network: architecture and initial weights",
    "networks": "the networks that embed the images, and their weights",
    "start": "the initial images of the fit",
    "augment": "the augmentation",
    "seed": "all randomness except noise, Poisson draws and what hides them: networks, initial images, participation",
    "options": "every other option, chosen without looking at the private data",
    "clients": "the number of clients",
    "taking part": "which clients take part in which round",
    "disjoint": "that no two clients hold the same record",
    "schedule": "sigma and rate of all releases: they follow a plan, however early it stops",
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
    "Ledger": ("disjoint", "schedule"),
    "ClientDP": ("classes", "space", "budget", "clip", "model", "seed", "options", "clients"),
}
"""Entry point -> the names (in `PUBLIC_INPUTS`) of the inputs that it assumes to be public."""
