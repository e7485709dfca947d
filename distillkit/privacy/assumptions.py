"""Inputs that each private entry point assumes to be public. Epsilon covers only the records, not these inputs.

An entry point is a function such as `condense_private` that charges a privacy ledger. The ledger records the
assumptions of every entry point that charged it. `Guarantee.assumptions` lists them, so that readers of epsilon can
check them.
"""

from __future__ import annotations

__all__ = ["ASSUMPTIONS", "PUBLIC_INPUTS"]

PUBLIC_INPUTS = {
    "classes": "the number of classes K, and which classes they are",
    "space": "shape, normalization and number type of the images",
    "size": "the number of records, which is used in denominators and compared with delta",
    "budget": "epsilon or sigma, delta, sample rates, numbers of steps and rounds",
    "clip": "the clipping norms of contributions",
    "model": "the network: architecture and initial weights",
    "networks": "the networks that embed the images, and their weights",
    "start": "the initial images of the fit",
    "augment": "the augmentation",
    "seed": "draws of networks, initial images, participation; not noise, Poisson samples or DP-SGD's augmentation",
    "options": "every other option, which must be chosen without looking at the private data",
    "clients": "the number of clients",
    "taking part": "which clients take part in which round",
    "disjoint": "the statement that no two clients have the same record",
    "schedule": "sigma and rate of all releases, which follow a plan, whenever the plan is stopped",
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
