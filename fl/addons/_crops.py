"""Images that the server and all clients have in the same order: crops of one image, or a pool of images."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distillkit.chunking import chunk_size, forward_chunks
from distillkit.generate import Patches
from distillkit.networks import split
from distillkit.select import select
from distillkit.sets import LabeledImages
from fl._noise_images import empty_set
from fl.batches import select_rows
from fl.participants import Client, Server


def _format(user: Server | Client) -> LabeledImages:
    """Return a set whose images have the shape, normalization and dtype of a participant's images."""
    return empty_set(user) if isinstance(user, Server) else user.data


def _of_pixels(pixels: Tensor, user: Server | Client) -> Tensor:
    """Convert 8-bit pixels, uint8 [B, C, H, W], to images in the format of a participant's images, on its device."""
    like = _format(user)
    return like.normalization.encode(pixels.float() / 255).to(user.device, like.images.dtype)


class Source(ABC):
    """Base class of objects that return shared images by index.

    The images are computed from one stored tensor, which the server and all clients have.

    Attributes:
        count: number of images.
    """

    count: int

    @abstractmethod
    def images(self, image_data: Tensor, indices: Tensor, user: Server | Client) -> Tensor:
        """Return the normalized images [B, C, H, W] with these indices, in the order of `indices`."""

    def outputs(
        self, network: nn.Module, image_data: Tensor, indices: Tensor, user: Server | Client, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return a network's embeddings [B, d] and logits [B, width] for the images with these indices.

        The forward pass runs without autograd.
        """
        parted = split(network)

        def both(images: Tensor) -> Tensor:
            embedding = parted.features(images)
            return torch.cat([embedding, parted.classifier(embedding)], dim=1)

        parts = (self.images(image_data, part, user) for part in indices.split(500))
        together = torch.cat([out for part in parts for out in forward_chunks(both, part, chunk_size(part))])
        return together[:, :-width], together[:, -width:]

    def select(
        self,
        network: nn.Module,
        image_data: Tensor,
        keep: int,
        user: Server | Client,
        width: int,
        generator: torch.Generator,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Return the indices of the images that `distillkit.select.select` selects, int32 [keep], ascending.

        The selection uses the outputs of `network` for all images.
        """
        everything = torch.arange(self.count)
        if keep == self.count:
            return everything.int()
        embeddings, logits = self.outputs(network, image_data, everything, user, width)
        return select(embeddings, logits, keep=keep, generator=generator, **options).int()


class Crops(Source):
    """Crops of one image, as `distillkit.generate.Patches` makes them, stored as uint8 in a thread-safe cache.

    A crop is made when it is first requested. It depends only on its index, not on the order of requests.

    Args:
        seed, count: seed and number of the crops, as in `Patches`.
        options: further options of `Patches`.
        size: side of a crop in pixels. None: the server and each client use the side of their own images.
    """

    def __init__(self, seed: int, count: int, size: int | None, options: Mapping[str, Any]) -> None:
        self.seed, self.count, self.size, self.options = seed, count, size, dict(options)
        self._lock = threading.Lock()
        self._patches: Patches | None = None
        self._image = self._pixels = self._known = torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle for another process, without the cache."""
        return {name: getattr(self, name) for name in ("seed", "count", "size", "options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def side(self, image: Tensor, shape: tuple[int, ...]) -> int:
        """Return the side of a crop in pixels, for a server or client whose images have this `shape`.

        Args:
            image: image from which the crops are taken, [C, H, W].
            shape: (C, H, W) of the images of the server or client.

        Raises:
            ValueError: `image` has another number of channels than `shape`, or `shape` is not square and the option
                `size` of `Crops` is None.
        """
        if len(image) != shape[0]:
            raise ValueError(
                f"image must have the {shape[0]} channels of the clients' images, got {len(image)}: convert it"
            )
        if self.size is None and shape[1] != shape[2]:
            raise ValueError(f"size must be given for images that are not square, such as {shape[1]}x{shape[2]}")
        return self.size or shape[1]

    def _patches_of(self, image: Tensor, size: int) -> Patches:
        """Return the `Patches` object for an image, uint8 [C, H, W], and a crop size.

        The object of the last call is returned again if image and size are the same. Otherwise, a new object is made,
        and the cache of crops is emptied.
        """
        patches = self._patches
        if patches is None or patches.size != size or not (image is self._image or torch.equal(image, self._image)):
            patches = self._patches = Patches(image, self.seed, size=size, count=self.count, **self.options)
            self._image = image
            self._pixels = torch.empty(self.count, len(image), size, size, dtype=torch.uint8)
            self._known = torch.zeros(self.count, dtype=torch.bool)
        return patches

    def images(self, image_data: Tensor, indices: Tensor, user: Server | Client) -> Tensor:
        """Return the crops with these indices, as normalized images.

        Args:
            image_data: the image from which the crops are taken, uint8 [C, H, W].
            indices: indices of the crops.
            user: the server or client that uses the crops.
        """
        size, where = self.side(image_data, _format(user).shape), indices.long().cpu()
        with self._lock:
            patches = self._patches_of(image_data.cpu(), size)
            for part in where[~self._known[where]].unique().split(100):
                user.check_running()
                self._pixels[part] = (255 * patches.batch(part, progress=False)).round().to(torch.uint8)
                self._known[part] = True
            pixels = self._pixels
        return _of_pixels(pixels.index_select(0, where), user)


class Pool(Source):
    """Source of the images of a given set, such as a public set (see `SharedPool`).

    The argument `image_data` of each method contains all images of the set, uint8 [count, C, H, W].
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def images(self, image_data: Tensor, indices: Tensor, user: Server | Client) -> Tensor:
        """Return the images at `indices`, with the normalization, device and dtype of `user`.

        `image_data` contains all images of the pool, uint8 [count, C, H, W].
        """
        return _of_pixels(select_rows(image_data, indices.long()), user)
