"""Virtual federated transfer learning, in which the server pretrains the model on noise before round 1."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from distillkit._utils.options import AtLeastTwo, Decay, LearningRate, NonNegativeInt, Options, PositiveInt
from distillkit.sets import LabeledImages
from fl.addons._server_training import train_on_set
from fl.addons._virtual import require_source, virtual_set
from fl.averaging import AddOn, AveragingServer, FedAvg
from fl.message import Tensors
from fl.networks import copied


@dataclass(frozen=True)
class VFTL(AddOn):
    """VFTL (Tang et al., ICML 2022, section 5.3): pretraining on noise images, then plain FedAvg.

    It is a baseline of the paper's method `VHL`. Both use the same virtual set, which consists of noise images with
    labels.

    Neither the paper nor its code specifies the pretraining. Here, before round 1, the server trains the initial
    weights by SGD with momentum on the cross-entropy of the virtual images, with output k for virtual class k. The
    rounds start from all pretrained weights, including the classifier's. The messages are those of FedAvg.

    Args:
        epochs: number of passes over the virtual set; 0 disables the add-on.
        lr, momentum, batch: options of SGD on the server; `batch` is the number of images per step.
        source, classes, per_class, options: options that determine the virtual set, as in `VHL`. The set cannot have
            more classes than the task.
    """

    disabled_at_zero = ("epochs",)
    epochs: NonNegativeInt = 10
    lr: LearningRate = 0.01
    momentum: Decay = 0.9
    batch: PositiveInt = 128
    source: str | LabeledImages = "stylegan"
    classes: AtLeastTwo = 10
    per_class: PositiveInt = 200
    options: Options = field(default_factory=dict)
    data_access = "none"
    single_label = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_source(self.source, self.options)

    def start(self, server: AveragingServer) -> None:
        """Make the virtual set of noise images, and pretrain the initial weights of every architecture on it."""
        if self.classes > server.task.num_classes:
            raise ValueError(
                f"VFTL: {self.classes} virtual classes, but outputs for {server.task.num_classes} only: give "
                f"classes={server.task.num_classes} or fewer"
            )
        noise = virtual_set(server, self, self.source, self.classes, self.per_class, self.options)
        server.state[FedAvg.model] = server.settings.networks.for_each(partial(self._pretrained, server, noise))

    def _pretrained(self, server: AveragingServer, noise: LabeledImages, architecture: str) -> Tensors:
        net = server.network(architecture).train()
        train_on_set(
            net, noise, torch.optim.SGD(net.parameters(), lr=self.lr, momentum=self.momentum), epochs=self.epochs,
            batch=self.batch, order=server.generator(f"{self.key} order {architecture}"),
            dropout=server.generator(f"{self.key} dropout {architecture}"), check_running=server.check_running,
        )  # fmt: skip
        return copied(net)
