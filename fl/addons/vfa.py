"""Virtual feature alignment: a loss term that aligns the features of all clients with the same random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils.options import NonNegative, PositiveInt, Temperature
from distillkit.losses import supervised_contrastive
from fl.averaging import AddOn, AveragingServer, Local, Step
from fl.message import Entry, Message, Tensors
from fl.networks import embedding_size


@dataclass(frozen=True)
class VFA(AddOn):
    """Virtual feature alignment, the control experiment for VHL in its paper (Tang et al., ICML 2022, section 5.3).

    VFA aligns the embeddings of all clients with random features, where VHL uses the embeddings of noise images.

    The server draws a mean mu_k ~ U[0, 1)^d for each of the K classes, where d is the length of the embeddings. Each
    client downloads the means once. In a step with B images, a client draws B // K + 1 random features from N(mu_k,
    std^2) for each class. Its loss gets an additional term: `weight` times the supervised contrastive loss (SupCon) of
    the batch's embeddings together with the random features. The paper gives no constants. The defaults are those of
    its code (wizard1203/VHL), which computes the loss in `align_feature_loss` of loss_fn/losses.py and the means in
    trainers/normal_trainer.py.

    Args:
        weight: weight of the contrastive term, at least 0; 0 disables the add-on.
        std: standard deviation of the random features around their means, at least 0.
        per_class: number of random features per class in each step; default: B // K + 1.
        temperature: temperature of the contrastive loss.
        empty: treatment of images without a positive partner in the contrastive loss: "drop", or "zero" as in the
            authors' code (see `distillkit.losses.supervised_contrastive`).
    """

    disabled_at_zero = ("weight",)
    weight: NonNegative = 1.0
    std: NonNegative = 0.05
    per_class: PositiveInt | None = None
    temperature: Temperature = 0.07
    empty: Literal["drop", "zero"] = "drop"
    single_label = True
    means = Entry[Tensors]("first", cached=True)

    def start(self, server: AveragingServer) -> None:
        """Draw the class means around which clients later draw random features, separately for each architecture.

        The means of an architecture are a tensor [K, d], where K is the number of classes and d the length of the
        embeddings.
        """
        networks = server.settings.networks
        blank = torch.zeros(1, *server.shape, device=server.device, dtype=server.dtype)

        def draw(architecture: str) -> Tensors:
            width = embedding_size(server.network(architecture), blank)
            generator = server.generator(f"{self.key} {architecture}")
            return {"mean": torch.rand(server.task.num_classes, width, generator=generator)}

        server.state[self.means] = networks.for_each(draw)

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the client the class means around which it draws random features.

        `start` drew one mean per class for the client's architecture. The means never change, so they are sent only
        once to each client.
        """
        networks = server.settings.networks
        architecture = networks.architecture(client)
        message[self.means] = networks.prefixed(server.weights(architecture, of=server.state[self.means]), architecture)

    def before_training(self, local: Local) -> None:
        """Load the received class means, and make the generator that draws random features around these means."""
        means = local.unprefixed(local.message[self.means])["mean"]
        local.scratch(self).update(means=means, generator=local.generator(self))

    def loss(self, step: Step) -> Tensor:
        """Return `weight` times the supervised contrastive loss over the features of the batch and random features.

        The random features of a class are drawn from a normal distribution around the class's mean, which the server
        has sent.
        """
        real, labels = step.output().embedding, step.batch.labels
        means, generator = (step.local.scratch(self)[key] for key in ("means", "generator"))
        each = self.per_class or len(labels) // len(means) + 1
        noise = torch.randn(each * len(means), means.shape[1], generator=generator).to(means, non_blocking=True)
        drawn = means.repeat(each, 1) + self.std * noise
        contrast = supervised_contrastive(
            real, labels, drawn.to(real), torch.arange(len(means), device=labels.device).repeat(each),
            temperature=self.temperature, empty=self.empty,
        )  # fmt: skip
        return self.weight * contrast
