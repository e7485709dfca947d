"""Federated learning with a single shared image or a shared pool of images: clients send logits instead of weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Options, PositiveInt
from distillkit._utils.user_warnings import warn
from distillkit.generate import Patches
from distillkit.sets import LabeledImages
from fl.addons._crops import Crops, Pool
from fl.addons._shared import Shared
from fl.averaging import AveragingServer, FedAvg
from fl.message import Entry


@dataclass(frozen=True, eq=False)
class SharedImage(Shared):
    """Distillation on crops of one image (Soni, Saeed and Asano, "Federated Learning with a Single Shared Image",
    2024).

    The server learns from the clients' predictions on crops of one image, so clients of different architectures can
    take part and need not send weights in every round. The class implements Algorithm 1.

    The server and all clients compute the same `count` crops of one image (section 3.1). In each round, the server's
    model selects `keep` of them (section 3.2). The server sends their indices, and clients reply with their logits on
    these crops. The server then trains its model of each architecture to match the softmax of the clients' weighted
    mean logits. In rounds with "FedAvg initialization", clients also send their weights, and the server's model of each
    architecture starts from their average over the clients with this architecture. In all other rounds, it starts from
    its previous weights. `fl.methods.SingleImage` sets the paper's options.

    Deviations. The server sends crop indices, as in the paper; the authors' code sends the crops, 61 MB per client and
    round. Averages are weighted by the number of samples (in the authors' code by the number of batches). As in the
    authors' code, the first round has FedAvg initialization, and the norm of the trained model's logits is limited to
    2.5. The paper does not mention this limit. The server keeps the weights after its last training step, as in the
    paper. The authors' code keeps the weights that are best on the clients' own validation images. `returns="best"`
    keeps those that are best on `server.data["validation"]`. If there are several architectures, the model with the
    highest accuracy on `server.data["validation"]` selects the crops; without these images, the first model selects
    them. (In the authors' code, it is the model with the highest accuracy on the test set.)

    Args:
        image: the shared image, uint8 [C, H, W], or float in [0, 1], which is rounded to 8 bits; C is that of the
            clients' images.
        keep: number of crops that are selected for a round. If it equals `count`, all crops are used.
        count: number of crops from which to select.
        seed: seed from which every participant computes the same crops.
        size: side of a crop in pixels. None means the side of the clients' images, which must then be square.
        rate: share of rounds with FedAvg initialization, in [0, 1]; these rounds are evenly spaced. The paper uses 1,
            0.5 and 0.2.
        warm_rounds: number of first rounds that always have FedAvg initialization.
        steps, batch, lr: options of the server's Adam. The authors' code uses batches of 32 in Tables 1, 3 and 4, and
            of 512 in all others.
        least_steps: smallest number of steps in a round. Rounds with FedAvg initialization have `steps` steps. In the
            rounds that follow, the number falls along half a cosine, and is `least_steps` in the last round before the
            next FedAvg initialization. None: `steps` in every round. In Table 4, `least_steps` is 250.
        clip: largest norm of the logits of the trained models (`losses.clip_logit_norm`); None: no limit.
        returns: weights that the training on the server returns: the "last", or the "best" on
            `server.data["validation"]`.
        crops: other options of `generate.Patches`; the paper uses rotation=35 and flip=0.5.
        selection: options of `distillkit.select.select`. The default, {"kmeans_share": 0}, removes no crops by k-means
            clustering, and selects only by the entropy of the predictions. If 5,000 of 50,000 crops are kept, this is
            the pruning of section 4.1 ("we remove 90 % of the training examples").
    """

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
        if float(patches.image.min()) == float(patches.image.max()):
            warn("image has equal pixels everywhere, so that all crops are equal: nothing can be learned from them")
        object.__setattr__(self, "image", (255 * patches.image.cpu()).round().to(torch.uint8))
        self._set_source(self.image, Crops(self.seed, self.count, self.size, self.crops), patches.digest[:16])


@dataclass(frozen=True, eq=False)
class SharedPool(Shared):
    """Distillation on images of a public set (Soni, Saeed and Asano, "Federated Learning with a Single Shared Image",
    2024).

    The add-on works like `SharedImage`, with the images of a public set (the pool) instead of crops of one image, as in
    Table 6. The server sends the pool once to each client. In each round, the server's model selects `keep` images of
    the pool. The labels of the pool are not used. If `keep` is the size of the pool, all images are used; this is the
    paper's FedDF (first row of Table 6).

    In Table 6, the clients have images of CIFAR-10, and `keep` is 1,000. In the authors' code, runs with selection
    choose these 1,000 images from a pool of 10,000 images of CIFAR-100's training split; runs without selection have a
    pool of 1,000.

    Args:
        pool: a `LabeledImages`, which is converted to 8-bit pixels, or images uint8 [N, C, H, W]. C, H and W are those
            of the clients' images.
        keep: number of images to select for a round.
        rate, warm_rounds, steps, batch, lr, least_steps, clip, returns, selection: options with the same meaning as in
            `SharedImage`. In Table 6, `rate` has the values 1, 0.5 and 0.2.

    Raises:
        TypeError, ValueError: `pool` is neither a `LabeledImages` nor a uint8 tensor of images, or an option is out of
            range.
    """

    pool: LabeledImages | Tensor = field(repr=False)
    keep: int = field(default=1000, kw_only=True)

    picture = Entry[Tensor]("first", cached=True)
    index = Entry[Tensor]("first")
    logits = Entry[Tensor]("mean", by=FedAvg.samples)

    def __post_init__(self) -> None:
        super().__post_init__()
        pixels = self.pool
        if isinstance(pixels, LabeledImages):
            pixels = (255 * pixels.pixels().detach()).round().to(torch.uint8)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8 or pixels.ndim != 4 or not len(pixels):
            got = type(pixels).__name__ if not isinstance(pixels, Tensor) else f"{pixels.dtype} {list(pixels.shape)}"
            raise TypeError(f"pool must be a LabeledImages, or images uint8 [N, C, H, W], got {got}")
        pixels = check.has_values(pixels, "pool").cpu().contiguous()
        digest = hashlib.blake2b(repr(tuple(pixels.shape)).encode() + pixels.numpy().tobytes(), digest_size=8)
        self._set_source(pixels, Pool(len(pixels)), digest.hexdigest())

    def start(self, server: AveragingServer) -> None:
        """Select the images of the pool that are used in the first round.

        Raises:
            ValueError: the pool's images differ in shape from the clients', or the option `returns` is "best", but the
                server has no images `server.data["validation"]`.
        """
        if tuple(self.pixels.shape[1:]) != tuple(server.shape):
            raise ValueError(
                f"the pool has images {tuple(self.pixels.shape[1:])}, the clients have {tuple(server.shape)}: resize "
                "the images of the pool"
            )
        super().start(server)
