"""Images that all participants have in the same order: crops of one image, or a pool of images."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distillkit.chunking import chunk_size, forward_chunks
from distillkit.generate import Patches
from distillkit.networks import split
from distillkit.normalization import Normalization
from distillkit.select import select
from fl.batches import select_rows
from fl.participants import Client, Server

__all__ = ["Crops", "Pool", "Source", "View"]


@dataclass(frozen=True)
class View:
    """Format of one participant's images (shape, normalization, dtype and device), and the participant's stop check."""

    shape: tuple[int, ...]
    normalization: Normalization
    device: torch.device
    dtype: torch.dtype
    running: Callable[[], None]

    def of_pixels(self, pixels: Tensor) -> Tensor:
        """Convert pixels uint8 [B, C, H, W] to this participant's images."""
        return self.normalization.encode(pixels.float() / 255).to(self.device, self.dtype)

    @staticmethod
    def of(side: Server | Client) -> View:
        """Return the view of the server or of a client."""
        like = side if isinstance(side, Server) else side.data
        dtype = side.dtype if isinstance(side, Server) else side.data.images.dtype
        return View(tuple(like.shape), like.normalization, side.device, dtype, side.check_running)


class Source(ABC):
    """Base class of a source of `count` images, which are made from a tensor that every participant has."""

    count: int

    @abstractmethod
    def images(self, stored: Tensor, indices: Tensor, view: View) -> Tensor:
        """Return images [B, C, H, W], normalized, in the order of `indices` int [B]."""

    def outputs(
        self, network: nn.Module, stored: Tensor, indices: Tensor, view: View, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings [B, d] and logits [B, width] of images; the network is in eval mode, without autograd."""
        parted = split(network)

        def both(images: Tensor) -> Tensor:
            embedding = parted.features(images)
            return torch.cat([embedding, parted.classifier(embedding)], dim=1)

        parts = (self.images(stored, part, view) for part in indices.split(500))
        together = torch.cat([out for part in parts for out in forward_chunks(both, part, chunk_size(part))])
        return together[:, :-width], together[:, -width:]

    def select(
        self,
        network: nn.Module,
        stored: Tensor,
        keep: int,
        view: View,
        width: int,
        generator: torch.Generator,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Return the indices of the images that `select` keeps given a network's outputs, int32 [keep], ascending."""
        everything = torch.arange(self.count)
        if keep == self.count:
            return everything.int()
        embeddings, logits = self.outputs(network, stored, everything, view, width)
        return select(embeddings, logits, keep=keep, generator=generator, **options).int()


class Crops(Source):
    """Thread-safe cache of the crops of `Patches`, with 8 bits per pixel.

    The crops are bitwise equal to those of `Patches.batch` in any order of requests, because a crop depends only on its
    index. 50,000 crops of 3x32x32 take 154 MB once all of them have been requested.

    Args:
        seed, count, options: options of `Patches`, except the image and the size.
        size: side of a crop in pixels; None: the size of the images with which the crops are used.
    """

    def __init__(self, seed: int, count: int, size: int | None, options: Mapping[str, Any]) -> None:
        self.seed, self.count, self.size, self.options = seed, count, size, dict(options)
        self._lock = threading.Lock()
        self._patches: Patches | None = None
        self._image = self._pixels = self._known = torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the cache."""
        return {name: getattr(self, name) for name in ("seed", "count", "size", "options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def side(self, image: Tensor, shape: tuple[int, ...]) -> int:
        """Return the side of a crop for images of `shape`.

        Raises:
            ValueError: the shared image and the participant's images differ in their number of channels, or the images
                are not square and no `size` is given.
        """
        if len(image) != shape[0]:
            raise ValueError(
                f"image must have the {shape[0]} channels of the clients' images, got {len(image)}: convert it"
            )
        if self.size is None and shape[1] != shape[2]:
            raise ValueError(f"size must be given for images that are not square, such as {shape[1]}x{shape[2]}")
        return self.size or shape[1]

    def _of(self, image: Tensor, size: int) -> Patches:
        """Return the patches of this image. If the image or size has changed, empty the cache."""
        patches = self._patches
        if patches is None or patches.size != size or not (image is self._image or torch.equal(image, self._image)):
            patches = self._patches = Patches(image, self.seed, size=size, count=self.count, **self.options)
            self._image = image
            self._pixels = torch.empty(self.count, len(image), size, size, dtype=torch.uint8)
            self._known = torch.zeros(self.count, dtype=torch.bool)
        return patches

    def images(self, stored: Tensor, indices: Tensor, view: View) -> Tensor:
        """Return normalized crops [B, C, size, size] of an image uint8 [C, H, W], by `indices` int [B]."""
        size, where = self.side(stored, view.shape), indices.long().cpu()
        with self._lock:
            patches = self._of(stored.cpu(), size)
            for part in where[~self._known[where]].unique().split(100):
                view.running()
                self._pixels[part] = (255 * patches.batch(part, progress=False)).round().to(torch.uint8)
                self._known[part] = True
            pixels = self._pixels
        return view.of_pixels(pixels.index_select(0, where))


class Pool(Source):
    """Source of existing images, uint8 [count, C, H, W]."""

    def __init__(self, count: int) -> None:
        self.count = count

    def images(self, stored: Tensor, indices: Tensor, view: View) -> Tensor:
        """Return images [B, C, H, W] of the pool, normalized like the participant's images."""
        return view.of_pixels(select_rows(stored, indices.long()))
