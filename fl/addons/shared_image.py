"""Federated learning with a single shared image, or with a shared pool: clients send logits instead of weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillkit._utils.options import Options, PositiveInt
from distillkit.generate import Patches
from distillkit.sets import LabeledImages
from fl.addons._crops import Crops, Pool
from fl.addons._shared import Shared
from fl.averaging import AveragingServer, FedAvg
from fl.message import Entry

__all__ = ["SharedImage", "SharedPool"]


@dataclass(frozen=True, eq=False)
class SharedImage(Shared):
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Algorithm 1.

    Clients of any architecture teach the server through their predictions on crops of one image, without sending
    weights.

    All participants render the same `count` crops of one image (section 3.1). In each round the global model selects
    `keep` of them (section 3.2). The server sends their indices, and clients reply with logits. Clients send weights
    only in rounds with "FedAvg initialization". In these rounds, each architecture's model on the server starts from
    the average of its clients' weights; in other rounds, it starts from its previous weights. The server then trains
    the model to match the softmax of the weighted mean of all logits. `fl.methods.SingleImage` sets the paper's
    options.

    Deviations. The server sends crop indices, as in the paper; the authors' code sends the crops, 61 MB per client and
    round. Averages are weighted by the number of samples (in the authors' code by the number of batches). As in that
    code, the first round has FedAvg initialization, and the norm of the student's logits is limited to 2.5. The paper
    does not mention this limit. The last weights are kept, as in the paper; the authors' code keeps the best on the
    clients' own validation images (`returns="best"` uses `server.data["validation"]`). If there are several
    architectures, the model that is best on that set selects the crops; without the set, the first model does so. (In
    the authors' code, the model that is best on the test set selects them.)

    Args:
        image: the shared image, uint8 [C, H, W], or float in [0, 1], which is rounded to 8 bits; C is that of the
            clients' images.
        keep, count: number of crops used in a round, and number of crops from which they are selected. If both are
            equal, all crops are used.
        seed: seed of the crops, with which every participant renders the same crops.
        size: side of a crop in pixels. None means the side of the clients' images, which must then be square.
        rate: share of rounds with FedAvg initialization, in [0, 1]; these rounds are evenly spaced. The paper uses 1,
            0.5 and 0.2.
        warm_rounds: number of first rounds that always have FedAvg initialization.
        steps, batch, lr: options of Adam on the server (batch in the authors' code: 32 in Tables 1, 3 and 4, else 512).
        least_steps: minimum number of steps. The number decays to this minimum along half a cosine and restarts in
            rounds with FedAvg initialization (Table 4: 250; see `falling_steps`).
        clip: largest norm of the students' logits (`losses.clip_logit_norm`), or None.
        returns: weights that the distillation returns: the "last", or the "best" on `server.data["validation"]`.
        crops: other options of `generate.Patches`; the paper uses rotation=35 and flip=0.5.
        selection: options of `select.select`; the default {"kmeans_share": 0} only prunes. If 5,000 of 50,000 crops are
            kept, the entropy pruning of section 4.1 ("we remove 90 % of the training examples") leaves k-means nothing
            to select.
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


@dataclass(frozen=True, eq=False)
class SharedPool(Shared):
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Table 6: selection from a pool.

    The add-on works like `SharedImage`, with the images of a public set instead of the crops of one image: "use cases
    where we already have a shared public dataset at hand". Every participant has the pool, which is sent once. In each
    round the global model selects `keep` images. The server sends their indices and receives the clients' logits.
    Clients send weights only in rounds with FedAvg initialization. The labels of the pool are not read. If `keep` is
    the size of the pool, all images are used: this is the paper's FedDF (first row of Table 6), which exchanges logits.

    Table 6 uses 1,000 images of CIFAR-100's training split with private CIFAR-10. In the authors' code, runs with
    selection choose these images from a pool of 10,000; runs without selection have only a pool of 1,000.

    Args:
        pool: a set, which is converted to 8-bit pixels, or images uint8 [N, C, H, W]; C, H and W are those of the
            clients' images.
        keep: number of images to select for a round.
        rate, warm_rounds, steps, batch, lr, least_steps, clip, returns, selection: as in `SharedImage`. The rates of
            Table 6 are 1, 0.5 and 0.2.

    Raises:
        TypeError, ValueError: the pool is not a set of images, or an option is out of range.
    """

    key = "SharedPool"
    pool: LabeledImages | Tensor = field(repr=False)
    keep: int = field(default=1000, kw_only=True)

    picture = Entry[Tensor]("first", cached=True)
    index = Entry[Tensor]("first")
    logits = Entry[Tensor]("mean", by=FedAvg.samples)

    def __post_init__(self) -> None:
        super().__post_init__()
        pixels = self.pool
        if isinstance(pixels, LabeledImages):
            pixels = (255 * pixels.pixels().detach()).round().clamp(0, 255).to(torch.uint8)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8 or pixels.ndim != 4 or not len(pixels):
            got = type(pixels).__name__ if not isinstance(pixels, Tensor) else f"{pixels.dtype} {list(pixels.shape)}"
            raise TypeError(f"pool must be a set, or pictures uint8 [N, C, H, W], got {got}")
        pixels = pixels.cpu().contiguous()
        digest = hashlib.blake2b(repr(tuple(pixels.shape)).encode() + pixels.numpy().tobytes(), digest_size=8)
        self._set_source(pixels, Pool(len(pixels)), digest.hexdigest())

    def start(self, server: AveragingServer) -> None:
        """Refuse a pool whose images differ in shape from the clients', and select the images of the first round."""
        if tuple(self.pixels.shape[1:]) != tuple(server.shape):
            raise ValueError(
                f"the pool has images {tuple(self.pixels.shape[1:])}, the clients have {tuple(server.shape)}: resize "
                "the images of the pool"
            )
        super().start(server)
