"""MOON: a contrastive loss term between the embeddings of the local, the global and the previous local model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils.options import NonNegative, Temperature
from distillkit.losses import model_contrastive
from distillkit.networks import split
from fl.averaging import AddOn, Step


@dataclass(frozen=True)
class MOON(AddOn):
    """Model-contrastive federated learning (Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021).

    A client's embeddings are kept near those of the global model, and away from those of its own previous model. MOON
    adds mu * l_con to the local objective (Algorithm 1), with the contrastive loss l_con of Eq. 3. It compares three
    embeddings of each image: z from the model in training, z_glob from the received model, and z_prev from the previous
    model, that is, this client's model after the last round in which it took part. The received and the previous model
    are frozen and in eval mode.

    The embedding is the input of the last linear layer. The paper puts a two-layer projection head before this layer.
    If you want this head, use a network that has one. In a client's first round, the contrastive term is left out,
    because there is no previous model; the authors' code uses a randomly initialized model instead.

    Args:
        mu: weight of the contrastive term, at least 0; 0 disables the add-on. The paper tunes it over {0.1, 1, 5, 10}.
            FedCOG's authors use 0.01 for MOON.
        temperature: temperature in Eq. 3, positive; the paper uses 0.5.
    """

    disabled_at_zero = ("mu",)
    mu: NonNegative = 1.0
    temperature: Temperature = 0.5

    needs_previous = True
    first_round = 2
    data_access = "example"

    def loss(self, step: Step) -> Tensor | None:
        """Return mu times the contrastive loss of the batch (Eq. 3), or None if the client has no previous model
        yet.
        """
        local = step.local
        if local.previous is None:
            return None
        with torch.no_grad():
            z_glob = split(local.at(local.start)).features(step.batch.images)
            z_prev = split(local.at(local.previous)).features(step.batch.images)
        return self.mu * model_contrastive(step.output().embedding, z_glob, z_prev, temperature=self.temperature)
