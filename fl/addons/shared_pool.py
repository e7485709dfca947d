"""Federated distillation on a public pool: clients send logits on pictures that the global model selects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillkit.sets import LabeledImages
from fl.addons._crops import Pool
from fl.addons._shared import Shared
from fl.averaging import AveragingServer, FedAvg
from fl.message import Entry

__all__ = ["SharedPool"]


@dataclass(frozen=True, eq=False)
class SharedPool(Shared):
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Table 6: selection over a pool.

    Like `SharedImage`, with the images of a public set instead of the crops of one image: "use cases where we already
    have a shared public dataset at hand". Every participant has the pool, which is sent once. In each round the global
    model selects `keep` images. The server sends their indices and receives the clients' logits. Clients send weights
    only in rounds with FedAvg initialisation. The labels of the pool are not read. If `keep` is the size of the pool,
    all images are used: this is the paper's FedDF (first row of Table 6), which exchanges logits.

    Table 6 uses 1,000 images of CIFAR-100's training split with private CIFAR-10. In the authors' code, runs with
    selection draw them from a pool of 10,000; runs without selection have only these 1,000.

    Args:
        pool: a set, which is converted to 8-bit pixels, or pictures uint8 [N, C, H, W]; C, H and W are those of the
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
        """Refuse a pool of another shape than the clients' images; select the images of the first round."""
        if tuple(self.pixels.shape[1:]) != tuple(server.shape):
            raise ValueError(
                f"the pool has images {tuple(self.pixels.shape[1:])}, the clients have {tuple(server.shape)}: resize "
                "the images of the pool"
            )
        super().start(server)
