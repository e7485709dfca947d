"""Virtual federated transfer learning: the server's model is trained on noise before the first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.networks._dropout import seed_dropout
from distillkit.sets import LabeledImages
from fl.addons._virtual import require_source, virtual_set
from fl.averaging import AddOn, AveragingServer, FedAvg
from fl.batches import batch_at, shuffled_indices
from fl.message import Tensors

__all__ = ["VFTL"]


@dataclass(frozen=True)
class VFTL(AddOn):
    """VFTL, a control of VHL (Tang et al., ICML 2022, section 5.3): pretrain on the virtual set, then plain rounds.

    Neither the paper nor its release says how the model is pretrained: here by momentum SGD on the cross-entropy with
    virtual class k as output k, on the server, before round 1. All weights go on, the classifier's too. Nothing
    else is sent than without it.

    Args:
        epochs: passes over the virtual set; with 0 it is not installed.
        lr, momentum, batch: of SGD on the server; `batch` in images a step.
        source, classes, per_class, options: of the virtual set, as in `VHL`; no more classes than the task has.
    """

    key = "VFTL"
    epochs: int = 10
    lr: float = 0.01
    momentum: float = 0.9
    batch: int = 128
    source: str | LabeledImages = "stylegan"
    classes: int = 10
    per_class: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)
    data_access = "none"
    single_label = True

    def __post_init__(self) -> None:
        check.positive_int(self.epochs, "epochs", least=0)
        check.real_number(self.lr, "lr", above=0.0)
        check.real_number(self.momentum, "momentum", least=0.0, below=1.0)
        check.positive_int(self.batch, "batch")
        check.positive_int(self.classes, "classes", least=2)
        check.positive_int(self.per_class, "per_class")
        require_source(self.source)
        check.mapping(self.options, "options")

    @property
    def disabled(self) -> bool:
        """Whether there are no epochs: then nothing is pretrained, and it is not installed."""
        return self.epochs == 0

    def start(self, server: AveragingServer) -> None:
        """Make the virtual set, and train the first weights of every architecture on it."""
        if self.classes > server.task.num_classes:
            raise ValueError(
                f"VFTL: {self.classes} virtual classes, but outputs for {server.task.num_classes} only: give "
                f"classes={server.task.num_classes} or fewer"
            )
        noise = virtual_set(server, self, self.source, self.classes, self.per_class, self.options)
        networks, trained = server.settings.networks, dict[str, Tensor]()
        for architecture in networks.names:
            trained |= networks.prefixed(self._pretrained(server, architecture, noise), architecture)
        server.state[FedAvg.model] = trained

    def _pretrained(self, server: AveragingServer, architecture: str, noise: LabeledImages) -> Tensors:
        net = server.network(architecture).train()
        seed_dropout(net, server.generator(f"{self.key} dropout {architecture}"))
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr, momentum=self.momentum)
        order = server.generator(f"{self.key} order {architecture}")
        for index in shuffled_indices(len(noise), self.batch, order, self.epochs, None):
            server.check_running()
            batch = batch_at(noise, index)
            loss = F.cross_entropy(net(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return server.copied(net)
