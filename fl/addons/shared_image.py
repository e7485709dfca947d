"""Federated learning with a single shared image: clients send logits on crops that everybody can render."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillkit._utils.options import Options, PositiveInt
from distillkit.generate import Patches
from fl.addons._crops import Crops
from fl.addons._shared import Shared
from fl.averaging import FedAvg
from fl.message import Entry

__all__ = ["SharedImage"]


@dataclass(frozen=True, eq=False)
class SharedImage(Shared):
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Algorithm 1.

    Clients of any architecture teach the server by their predictions on crops of one image, without sending weights.

    All participants render the same `count` crops of one image (section 3.1). In each round the global model selects
    `keep` of them (section 3.2). The server sends their indices, and clients reply with logits. They send weights only
    in rounds with "FedAvg initialisation". In these rounds each architecture's model on the server starts from its
    clients' average, otherwise from its previous weights. It learns the softmax of the weighted mean of all logits.
    `fl.methods.SingleImage` sets the paper's options.

    Deviations: the server sends crop indices, as in the paper; the authors' code sends the crops, 61 MB per client and
    round. Averages are weighted by samples (the authors' code: by batches). As in that code, the first round has FedAvg
    initialisation, and the student's logits are rescaled to norm 2.5, which the paper does not mention. The last
    weights are kept, as in the paper; the authors' code keeps the best on the clients' own validation images
    (`returns="best"` uses `server.data["validation"]`). With several architectures, the model that is best on that set
    selects, or else the first one (the authors' code: the best on the test set).

    Args:
        image: uint8 [C, H, W], or float in [0, 1], which is rounded to 8 bits; C as in the clients' images.
        keep, count: number of crops in a round, and number of crops from which they are selected; if both are equal,
            nothing is selected.
        seed: seed of the crops, with which every participant renders the same crops.
        size: side of a crop in pixels; None: the side of the clients' images, which must then be square.
        rate: share of rounds with FedAvg initialisation, in [0, 1], evenly spaced; the paper uses 1, 0.5 and 0.2.
        warm_rounds: number of first rounds that always have FedAvg initialisation.
        steps, batch, lr: options of Adam on the server (batch in the authors' code: 32 in Tables 1, 3 and 4, else 512).
        least_steps: minimum number of steps: the steps decay to it along half a cosine and restart in rounds with
            FedAvg initialisation (Table 4: 250; `falling_steps`).
        clip: largest norm of the students' logits (`losses.clip_logit_norm`), or None.
        returns: weights that the distillation returns: the "last", or the "best" on `server.data["validation"]`.
        crops: further options of `generate.Patches` (the paper: rotation=35, flip=0.5).
        selection: options of `select.select`; the default {"kmeans_share": 0} only prunes. At 5,000 of 50,000 crops
            the entropy pruning of section 4.1 ("we remove 90 % of the training examples") leaves k-means no choice.
    """

    key = "SharedImage"
    image: Tensor = field(repr=False)
    keep: int = field(default=5000, kw_only=True)
    count: PositiveInt = 50_000
    seed: int = 0
    size: PositiveInt | None = None
    crops: Options = field(default_factory=dict)

    picture = Entry[Tensor]("first", cached=True)
    index = Entry[Tensor]("first")
    logits = Entry[Tensor]("mean", by=FedAvg.samples)

    def __post_init__(self) -> None:
        super().__post_init__()
        patches = Patches(self.image, self.seed, size=self.size or 1, count=self.count, **self.crops)
        object.__setattr__(self, "image", (255 * patches.image.cpu()).round().to(torch.uint8))
        self._set_source(self.image, Crops(self.seed, self.count, self.size, self.crops), patches.digest[:16])
