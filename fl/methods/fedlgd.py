"""FedLGD: clients train on locally condensed data, and on anchor images that the server distills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from distillkit._utils import check
from distillkit.augment import DSA, Augmentation
from fl.addons.anchors import Anchors
from fl.addons.condensed import SELECTED, Condensed
from fl.averaging import AddOn, FedAvg
from fl.networks import Factory

_DSA = DSA()


class FedLGD(FedAvg):
    """FedLGD (Huang et al., TMLR 2024, Algorithm 1): `FedAvg(Condensed(...), Anchors(...), weights="uniform")`.

    The paper is "Federated learning on virtual heterogeneous data with local-global dataset distillation". Clients
    train on small sets that were condensed from their data, and on anchors, which are images that the server distills
    for all clients.

    The defaults are the paper's (section 5.1): SGD with learning rate .01, batch size 32 and one local epoch; the paper
    trains for 100 rounds. See `Condensed` and `Anchors` for the two parts and their deviations from the authors' code.
    The published numbers were obtained with `init="statistics-whole-set", anchors_init="statistics-whole-set",
    joined="always"` and a `ConvNet` from `condense_factory`. In the authors' code, clients start from the global
    weights of the round in which they last took part. This mistake changes the results with partial participation.
    Here, all clients start from the current weights.

    Args:
        addons: additional add-ons (`SCAFFOLD()`, `FedProx(...)`, ...).
        factory: function that takes the number of outputs and returns a network, see `FedAvg`.
        ipc: number of condensed images per class on each client; the paper uses 10 and 50.
        anchors: number of anchor images per class.
        weight: lambda, the weight of the contrastive term; the paper uses 10 on DIGITS and 1 on CIFAR10C.
        regulariser: term that aligns the features of a client's images and the anchors: "contrastive", or "mmd" as in
            Fig. 3a (where lambda varies from 0 to 20).
        selected: tau, indices of the rounds, from 1, in which clients refine their sets and the server refines the
            anchors. With the empty tuple `()`, sets and anchors are never refined.
        condense_steps, refine_steps: number of distribution-matching steps in the first condensation, and in each
            refinement.
        match_steps: number of gradient-matching steps on the anchors in a selected round.
        anchors_lr: learning rate of the gradient matching on the anchors' pixels. With a rate of 1, the anchors hardly
            change.
        joined: rounds in which clients train on the anchors, as in `Anchors`.
        init: source of the initial condensed images, as in `Condensed`.
        anchors_init: source of the initial anchors, as `init` in `Anchors`.
        condense_factory: function without arguments that returns a network for the first condensation. Default:
            networks of the client's own architecture, as in the paper.
        batch_real: number of real images per class in each step of the distribution matching.
        augment: augmentation in the distribution matching.
        weights: weight of a client in the mean: 1 ("uniform", Algorithm 1, line 26), or its number of condensed images
            ("samples").
        lr: learning rate of the clients. None: the default of `FedAvg` for the optimizer.
        options: other options of `FedAvg`, except `augment`: clients train without augmentation.

    Raises:
        TypeError, ValueError: an option of `FedAvg` or of one of the two add-ons is not valid.
    """

    key = "FedAvg"

    def __init__(
        self,
        *addons: AddOn,
        factory: Factory | Mapping[str, Factory],
        ipc: int = 50,
        anchors: int = 10,
        weight: float = 1.0,
        regulariser: Literal["contrastive", "mmd"] = "contrastive",
        selected: tuple[int, ...] = SELECTED,
        condense_steps: int = 10_000,
        refine_steps: int = 100,
        match_steps: int = 500,
        anchors_lr: float = 1.0,
        init: Literal["statistics", "statistics-whole-set", "noise", "real"] = "statistics",
        joined: Literal["unselected", "always"] = "unselected",
        anchors_init: Literal["noise", "statistics", "statistics-whole-set"] = "noise",
        condense_factory: Callable[[], nn.Module] | None = None,
        batch_real: int = 256,
        augment: Augmentation | None = _DSA,
        weights: Literal["samples", "uniform"] = "uniform",
        lr: float | None = 0.01,
        **options: Any,
    ) -> None:
        for name, value in {"condense_steps": condense_steps, "anchors": anchors, "match_steps": match_steps}.items():
            check.positive_int(value, name, least=0)
        check.real_number(anchors_lr, "anchors_lr", above=0.0)
        check.one_of(anchors_init, "anchors_init", ("noise", "statistics", "statistics-whole-set"))
        condensed = Condensed(
            ipc=ipc, steps=condense_steps, refine_steps=refine_steps, selected=selected, init=init,
            factory=condense_factory, batch_real=batch_real, augment=augment,
        )  # fmt: skip
        matched = Anchors(
            ipc=anchors, weight=weight, selected=selected, joined=joined, init=anchors_init, steps=match_steps,
            lr=anchors_lr, regulariser=regulariser,
        )  # fmt: skip
        super().__init__(condensed, matched, *addons, factory=factory, weights=weights, lr=lr, **options)
