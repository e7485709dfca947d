"""Inputs that each private entry point assumes to be public. Epsilon covers only the records, not these inputs.

An entry point is a function such as `condense_private` that charges a privacy ledger. The ledger records the
assumptions of every entry point that charged it. `Guarantee.assumptions` lists them, so that readers of epsilon can
check them. Every epsilon assumes, besides, that no code replaces functions, kernels or private attributes of Python,
PyTorch or this package: such code could change the clip or the noise itself.
"""

from __future__ import annotations

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
    "disjoint": "the statement that no two clients have the same record, in all runs that are charged to one ledger: a "
    "person is always the same client, with the same number",
    "schedule": "sigma and rate of all releases, which follow a plan, whenever the plan is stopped",
    "records": "the statement that each record is valid and computed from its own raw data alone: no mean image "
    "subtracted, no label smoothed with other records, no second copy, not selected by looking at other records (also "
    "not as the rest of a split that a function of your own made; a client's part of a partition counts as given)",
    "accuracies": "the statement that accuracies and losses on the private records, as in tuning, are not published",
    "optimizer": "the statement that the optimizer sees noised gradients only, never records or their losses",
    "server data": "images and models that the server has before round 1 (`server_data`, `init`)",
    "partition": "the division of the records among clients, which counts as given, as in a real federation",
    "separate": "the statement that training one client changes nothing that the code of another one reads: no global "
    "or shared state in networks, objectives, augmentations",
}
"""Inputs and statements that an entry point may take as public and true: name -> description."""

RECORDS = ("records", "accuracies")
"""Statements that stand beside every epsilon for single records."""

_SET = ("classes", "space", "size", "budget", "clip", "networks", "start", "augment", "seed", "options", *RECORDS)
_RUN = ("clients", "taking part", "disjoint", "server data", "partition")

ASSUMPTIONS: dict[str, tuple[str, ...]] = {
    "condense_private": _SET,
    "image_sgd": _SET,
    "train_private": ("space", "size", "budget", "clip", "model", "options", "optimizer", *RECORDS),
    "release": ("classes", "space", "budget", "clip", "networks", "augment", "seed", *RECORDS),
    "private_histogram": ("classes", "budget", *RECORDS),
    "DPSGD": ("classes", "space", "size", "budget", "clip", "model", "seed", "options", *RECORDS, *_RUN),
    "PrivateFedDM": (*_SET, "model", *_RUN),
    "SummedFedDM": (*_SET, "model", *_RUN),
    "Ledger": ("disjoint", "schedule", *RECORDS),
    "ClientDP": (
        "classes", "space", "budget", "clip", "model", "seed", "options", "clients", "accuracies", "server data",
        "separate",
    ),
}  # fmt: skip
"""Entry point -> the names (in `PUBLIC_INPUTS`) of the inputs and statements that it takes as public and true."""
