"""REAL: the baseline of the FedDM paper in which clients send raw images."""

from __future__ import annotations

from torch import nn

from distillkit._utils.user_warnings import without_warnings
from distillkit.condense import random_subset
from distillkit.sets import LabeledImages
from fl.methods.feddm import FedDM
from fl.participants import Client


class Real(FedDM):
    """The baseline REAL of FedDM (Table 5): clients send `ipc` random real images of each class in each round.

    The server's training and the size of the messages are the same as in FedDM, but the images are the private data
    themselves. The arguments are those of `FedDM`. The options of the synthetic images (`steps`, `lr`, ...) have no
    effect.
    """

    @without_warnings()  # a client may own fewer images of a class than ipc, as everywhere in FedDM
    def synthesize(self, client: Client, network: nn.Module) -> LabeledImages:
        """Return `ipc` random real images of each of the client's classes, drawn anew in each round."""
        return random_subset(client.data, ipc=self.ipc, generator=client.generator("images"))
