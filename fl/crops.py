"""The crops of a shared image, each rendered once in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit.generate import Patches

__all__ = ["Crops"]


class Crops:
    """`Patches` that remembers what it rendered, as 8 bits; for any number of threads.

    The bits are those of `Patches.batch`, whoever asked first and for what: a crop depends on its index alone.
    50,000 crops of 3x32x32 take 154 MB when all have been asked for.

    Args:
        seed, count, options: as in `Patches`, without the image and the size.
    """

    def __init__(self, seed: int, count: int, options: Mapping[str, Any]) -> None:
        self.seed, self.count, self.options = seed, count, dict(options)
        self._lock = threading.Lock()
        self._patches: Patches | None = None
        self._image = self._pixels = self._known = torch.empty(0)

    def _of(self, image: Tensor, size: int) -> Patches:
        """The patches of this image; another image or size than before begins anew."""
        held = self._patches
        if held is None or held.size != size or not (image is self._image or torch.equal(image, self._image)):
            held = self._patches = Patches(image, self.seed, size=size, count=self.count, **self.options)
            self._image = image
            self._pixels = torch.empty(self.count, len(image), size, size, dtype=torch.uint8)
            self._known = torch.zeros(self.count, dtype=torch.bool)
        return held

    def batch(self, image: Tensor, size: int, indices: Tensor, running: Callable[[], None] = lambda: None) -> Tensor:
        """Crops float [B, C, size, size] in [0, 1] of `image` on the CPU, in the order of `indices` int [B].

        `running` is called now and then; it raises to stop.
        """
        where = indices.long().cpu()
        with self._lock:
            patches = self._of(image, size)
            for part in where[~self._known[where]].unique().split(100):
                running()
                self._pixels[part] = (255 * patches.batch(part)).round().to(torch.uint8)
                self._known[part] = True
            pixels = self._pixels
        return pixels.index_select(0, where).float() / 255
