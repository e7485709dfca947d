"""Every federated method with its searched settings. All other settings are the papers'.

Each method searches four configurations of learning rates and loss weights. Numbers that do not fit ten short rounds on
digits, such as distillation steps and noise images, are smaller than in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_sample_image

from distillkit.study import grid
from fl import AddOn, FedAvg, FedDM, Method, Real, addons
from fl.methods import FedLGD, FedProto, FedRep, SingleImage
from fl.study import Federated

RATE, TWO, RATES = 0.2, [0.1, 0.3], grid(lr=[0.03, 0.1, 0.2, 0.3])
"""Learning rates of the clients: fixed, searched together with another setting, and searched alone."""

NOISE: Any = {"per_class": 50, "options": {"width": 16}}
VHL = addons.VHL(**NOISE)

OWN = "FedAvg, chosen by own tests"
PERSONAL = ("Ditto", "Fine-tuned FedAvg", "FedRep", "FedProto", OWN)
"""Prefixes of the names of candidates that are evaluated on the clients' own test images."""


def averaging(*parts: AddOn | Callable[..., AddOn], search: Any = RATES, **options: Any) -> Federated:
    """Return FedAvg with `options` and add-ons. An add-on may be given as a function of the configuration."""

    def make(factory: Any, lr: float = RATE, assign: Any = None, **settings: Any) -> Method:
        given = [part if isinstance(part, AddOn) else part(**settings) for part in parts]
        return FedAvg(*given, factory=factory, assign=assign, lr=lr, **{"batch": 32, "epochs": 1, **options})

    return Federated(make, search)


def single(share: float, steps: int, *also: AddOn) -> Federated:
    """Return `SingleImage` on crops of one photograph (from scikit-learn).

    Args:
        share: share of the rounds in which weights are sent.
        steps: steps of distillation.
        also: additional add-ons.
    """
    image = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1).float().mean(0, keepdim=True) / 255

    def make(factory: Any, server_lr: float, lr: float, assign: Any = None) -> Method:
        crops = {"keep": 400, "count": 4000, "steps": steps, "lr": server_lr, "rate": share}
        options: Any = {"factory": factory, "assign": assign, "lr": lr, "epochs": 3, "batch": 32}
        return SingleImage(image, *also, shared=crops, **options)

    return Federated(make, search=grid(server_lr=[0.0005, 0.005], lr=[0.003, 0.01]))


def two(candidate: Federated) -> Federated:
    """Return the candidate with two architectures, in which every second client has the wider network."""

    def make(factory: Any, **settings: Any) -> Any:
        networks = {"narrow": partial(factory, width=16), "wide": factory}
        assign = {client: ("narrow", "wide")[client % 2] for client in range(10)}
        return candidate.make(factory=networks, assign=assign, **settings) if candidate.make else None

    return replace(candidate, make=make)


def ensemble(server_lr: float, steps: int = 60) -> AddOn:
    """Return FedDF with a number of distillation steps."""
    return addons.FedDF(steps=steps, batch=32, lr=server_lr)


def adaptive(kind: Callable[..., AddOn]) -> Federated:
    """Return FedAvg with an optimizer of the server."""
    return averaging(lambda server_lr: kind(lr=server_lr), search=grid(server_lr=[0.003, 0.01, 0.03, 0.1]))


def candidates(late: int, divisor: int) -> dict[str, Federated]:
    """Return every method by its name: the papers' methods first, then their variants.

    Args:
        late: first round in which FedCOG generates images. Earlier, the global model is not accurate enough.
        divisor: number by which the numbers of distillation steps are divided.
    """
    cut: Callable[[int], int] = lambda steps: max(1, steps // divisor)  # noqa: E731
    scaffold, nova, prox = addons.SCAFFOLD(), addons.FedNova(), addons.FedProx(0.1)
    cog = partial(addons.FedCOG, start_round=late, images=64, steps=cut(50))
    learnt = addons.Condensed(ipc=10, steps=cut(50), refine_steps=0, batch_real=32)
    lgd = {"ipc": 10, "condense_steps": cut(50), "refine_steps": cut(10), "match_steps": cut(50), "epochs": 1}
    sizes = {"ipc": 10, "batch_real": 32, "steps": cut(10), "server_batch": 32, "server_epochs": cut(20)}
    rep: Any = {"head_epochs": 5, "momentum": 0.0, "batch": 32}
    fusion: Any = {"search": grid(lr=TWO, server_lr=[0.001, 0.005])}

    found = {
        "FedAvg": averaging(),
        OWN: averaging(),
        "FedProx": averaging(addons.FedProx, search=grid(lr=TWO, mu=[0.01, 0.1])),
        "SCAFFOLD": averaging(scaffold, weights="uniform"),
        "FedNova": averaging(nova),
        "FedAvgM": averaging(addons.FedAvgM, search=grid(lr=TWO, momentum=[0.6, 0.9])),
        **{kind.__name__: adaptive(kind) for kind in (addons.FedAdam, addons.FedYogi, addons.FedAdagrad)},
        "FedExP": averaging(addons.FedExP, search=grid(lr=TWO, epsilon=[0.001, 0.1])),
        "MOON": averaging(addons.MOON, search=grid(lr=TWO, mu=[1.0, 5.0])),
        "FedSAM": averaging(addons.FedSAM, search=grid(lr=TWO, rho=[0.01, 0.05])),
        "FedDecorr": averaging(addons.FedDecorr, search=grid(lr=TWO, beta=[0.05, 0.1])),
        "FedReg": averaging(addons.FedReg, search=grid(lr=TWO, eta=[0.1, 0.2]), weights="uniform"),
        "FedGen": averaging(addons.FedGen, search=grid(alpha=[0.1, 1.0], beta=[0.1, 1.0])),
        "FedDF": averaging(partial(ensemble, steps=cut(60)), **fusion),
        "Ditto": averaging(addons.Ditto, search=grid(lr=TWO, lam=[0.1, 1.0])),
        "Fine-tuned FedAvg": averaging(addons.FineTune, search=grid(lr=TWO, epochs=[1, 5])),
        "FedRep": Federated(FedRep, RATES, rep),
        "FedProto": Federated(FedProto, RATES),
        "FedProto, distance as released": Federated(FedProto, RATES, {"lam": 1 / 512}),
        "VHL": averaging(VHL),
        "FedCOG": averaging(cog, search=grid(lr=TWO, disagreement=[0.1, 1.0])),
        "FedLGD": Federated(FedLGD, grid(lr=TWO, weight=[0.1, 1.0]), lgd),
        "FedDM": Federated(FedDM, grid(server_lr=[0.01, 0.03], rho=[5.0, 20.0]), sizes),
        "Real": Federated(Real, settings=sizes, like="FedDM"),
        "Single image, rate 1": single(1.0, cut(60)),
        "Naive VHL": averaging(addons.NaiveVHL(**NOISE)),
        "VFA": averaging(addons.VFA, search=grid(lr=TWO, weight=[0.1, 1.0])),
        "VFTL": averaging(addons.VFTL(**NOISE)),
        "FedAvg on condensed data": averaging(learnt),
        "SCAFFOLD on condensed data": averaging(learnt, scaffold, weights="uniform"),
        "FedNova on condensed data": averaging(learnt, nova),
        "VHL, upsampled noise": averaging(addons.VHL(source="gaussian", per_class=50)),
        "VHL, noise of a CNN": averaging(addons.VHL(source="cnn", per_class=50)),
        "VHL with FedProx": averaging(VHL, prox),
        "VHL with SCAFFOLD": averaging(VHL, scaffold, weights="uniform"),
        "VHL with FedNova": averaging(VHL, nova),
        "FedCOG with FedAvgM": averaging(cog(), addons.FedAvgM(0.9)),
        "FedCOG with FedProx": averaging(cog(), prox),
        "FedCOG with SCAFFOLD": averaging(cog(), scaffold, weights="uniform"),
        "FedCOG with MOON": averaging(cog(), addons.MOON(1.0)),
        "Single image, rate 0.2": single(0.2, cut(60)),
        "Single image with FedProx, rate 1": single(1.0, cut(60), prox),
        "Single image, two architectures, rate 1": two(single(1.0, cut(60))),
        "FedDF, two architectures": two(averaging(partial(ensemble, steps=cut(60)), **fusion)),
    }
    return {
        name: replace(candidate, rule="own") if name.startswith(PERSONAL) else candidate
        for name, candidate in found.items()
    }
