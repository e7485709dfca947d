"""The three methods, built from the run config on the server and on every node."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from distillkit.networks import ConvNet
from distillkit.privacy import plan_noise
from fl import FedAvg, FedDM, Method
from fl.addons import VHL
from fl.methods import PrivateFedDM

DELTA, NUM_NETWORKS, SIGMA_SIZES = 1e-5, 10, 6.0
"""Constants of a private run: delta, random networks per round, and noise of the histogram of class sizes."""


def method_of(config: Mapping[str, Any]) -> Method:
    """Return the method that the run `config` names."""
    side = config["size"]
    factory = partial(ConvNet, (config["channels"], side, side), width=config["width"], depth=config["depth"])
    sets = {"ipc": config["ipc"], "steps": config["steps"], "server_epochs": config["server-epochs"]}
    if config["method"] == "feddm":
        return FedDM(factory=factory, batch_real=64, server_batch=32, **sets)
    if config["method"] == "vhl":
        return FedAvg(VHL(per_class=config["per-class"]), factory=factory, lr=0.05, epochs=1, batch=32)
    if config["method"] == "private":
        noise = plan_noise(
            config["epsilon"], DELTA, count=NUM_NETWORKS * config["rounds"], spent=[(SIGMA_SIZES, 1.0, 1)]
        )
        noises: dict[str, Any] = {"sigma": noise.sigma, "sigma_sizes": SIGMA_SIZES, "num_networks": NUM_NETWORKS}
        return PrivateFedDM(factory=factory, server_batch=32, **noises, **sets)
    raise ValueError(f'method must be "feddm", "vhl" or "private"; got {config["method"]!r}')
