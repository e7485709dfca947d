"""Parametrization of images as tiles: each stored image contains several smaller images, which are upsampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, PositiveInt
from distillkit.sets._labeled import PARAMETRIZATIONS, LabeledImages


@dataclass(frozen=True)
class Tiles(CheckedOptions):
    """Parametrization that stores `factor` x `factor` images at a lower resolution in the pixels of one image.

    Pass it as `parametrize=` to a condenser. The condenser then optimizes stored images. Decoding cuts a stored image
    into a grid of tiles, and enlarges each tile to the full size by bilinear interpolation. A set thus has
    `factor ** 2` times as many images, at a lower resolution, for the same storage. Compare the result with random
    images in the same parametrization, `random_subset(..., parametrize=Tiles(2))`. Even random images with tiles can be
    better than a condensed set without tiles.

    Papers: Kim et al., "Dataset condensation via efficient synthetic-data parameterization" (IDC, ICML 2022), section
    3.2 ("uniform multi-formation"); Zhao et al., "Improved distribution matching" (IDM, CVPR 2023) ("partitioning").

    Args:
        factor: number of tiles along each side. Height and width of the images must be divisible by it. 1 stores images
            unchanged.

    Deviations: the authors of IDC pad images whose sides are not divisible by the factor; here such images are refused.
    Tiles are ordered row by row, while IDM orders them column by column.
    """

    factor: PositiveInt = 2

    @staticmethod
    def require(parametrize: Tiles | None) -> Tiles | None:
        """Check the argument `parametrize` of a condenser, and return it.

        Args:
            parametrize: a `Tiles`, or None.

        Raises:
            TypeError: the value is neither a `Tiles` nor None.
        """
        if parametrize is not None and not isinstance(parametrize, Tiles):
            raise TypeError(f"parametrize must be a Tiles, such as Tiles(2), or None, got {parametrize!r}")
        return parametrize

    @property
    def count(self) -> int:
        """Number of images that are decoded from each stored image."""
        return self.factor**2

    def require_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if height or width of an image shape is not divisible by `factor` (tiles along each side).

        Args:
            shape: shape whose last two entries are height and width.
        """
        if shape[-2] % self.factor or shape[-1] % self.factor:
            raise ValueError(
                f"parametrize=Tiles({self.factor}) needs images whose height and width are divisible by {self.factor}, "
                f"got {shape[-2]}x{shape[-1]}; choose another factor, or resize or pad the images"
            )

    def decode(self, stored: Tensor) -> Tensor:
        """Decode stored images [N, C, H, W] to images [N * f ** 2, C, H, W], where f is `factor`.

        Each stored image is cut into f x f tiles, and each tile is enlarged to H x W. The images from one stored image
        are consecutive in the result, in the order of the tiles, row by row. Gradients flow through this function.

        Args:
            stored: stored images in the normalized space.
        """
        self.require_shape(stored.shape)
        n, c, h, w = stored.shape
        f = self.factor
        grid = stored.reshape(n, c, f, h // f, f, w // f).permute(0, 2, 4, 1, 3, 5)
        tiles = grid.reshape(n * self.count, c, h // f, w // f)
        return F.interpolate(tiles, size=(h, w), mode="bilinear", align_corners=False)

    def encode(self, images: Tensor) -> Tensor:
        """Shrink images [N * f ** 2, C, H, W], and combine them into stored images [N, C, H, W], where f is `factor`.

        Each group of f ** 2 consecutive images becomes one stored image. Decoding returns smoothed images, because
        shrinking loses resolution.

        Args:
            images: images in the order that `decode` returns. Their number must be divisible by f ** 2.
        """
        self.require_shape(images.shape)
        n, c, h, w = images.shape
        if n % self.count:
            raise ValueError(f"images must be a multiple of {self.count}, for Tiles({self.factor}); got {n}")
        f = self.factor
        small = F.avg_pool2d(images, f)
        grid = small.view(n // self.count, f, f, c, h // f, w // f)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(n // self.count, c, h, w)

    def pack(self, images: LabeledImages) -> TiledImages:
        """Encode the images of a set as stored images, and return a set with the stored images and the same labels.

        Each stored image contains f ** 2 images at a lower resolution, where f is `factor`. The images of the new set
        are decoded from the stored images, so they are blurred. Labels and other properties are unchanged.

        Args:
            images: the set. Its number of images must be divisible by f ** 2.
        """
        stored = self.encode(images.images)
        return TiledImages._of(images._with(images=self.decode(stored)), stored, self)

    def adjoint(self, gradient: Tensor) -> Tensor:
        """Convert the gradient with respect to decoded images to the gradient with respect to the stored images.

        `decode` is a linear function, and this method is its transpose.

        Args:
            gradient: gradient with respect to decoded images, [N * f ** 2, C, H, W], where f is `factor`.
        """
        n, *shape = gradient.shape
        with torch.enable_grad():
            stored = gradient.new_zeros(n // self.count, *shape).requires_grad_()
            return torch.autograd.grad(self.decode(stored), stored, gradient)[0]


class TiledImages(LabeledImages):
    """Set whose images are decoded from a smaller number of stored images by `Tiles`.

    Condensers with `parametrize=Tiles(...)` return such sets, and `LabeledImages.load` reads them from files. `images`,
    `labels` and `columns` (further data of each image) describe the decoded images. Training, evaluation, attacks and
    exported pictures use the decoded images. `save` writes the stored images, and an `.npz` file has both. If you
    select or replace images, the new set is a plain `LabeledImages`. If you replace labels or other properties, the new
    set is a `TiledImages`.

    Args:
        stored: stored images, float [M, C, H, W], in the normalized space.
        labels: labels of the decoded images: class indices [N] or label rows [N, K]. The number of decoded images N is
            M * `tiles.count`.
        tiles: the parametrization that decodes the stored images.
        options: further arguments of `LabeledImages`.

    Attributes:
        stored: stored images, float [M, C, H, W].
        tiles: the parametrization that decodes the stored images.
    """

    stored: Tensor
    tiles: Tiles

    def __init__(self, stored: Tensor, labels: Tensor, *, tiles: Tiles, **options: Any) -> None:
        if not isinstance(tiles, Tiles):
            raise TypeError(f"tiles must be a Tiles, such as Tiles(2), got {tiles!r}")
        self.stored, self.tiles = check.batch_of_images(stored, "stored"), tiles
        self._assign(tiles.decode(stored), labels, **options)

    @staticmethod
    def wrap(stored: LabeledImages, tiles: Tiles) -> TiledImages:
        """Create a `TiledImages` from a set of stored images. Each decoded image gets the label of its stored image.

        Args:
            stored: set whose images are the stored images. The tensors in its `columns` are dropped.
            tiles: the parametrization that decodes the stored images.
        """
        whole = stored._with(
            images=tiles.decode(stored.images), labels=stored.labels.repeat_interleave(tiles.count, 0), columns={}
        )
        return TiledImages._of(whole, stored.images, tiles)

    def _with(self, **changes: Any) -> LabeledImages:
        """Return a copy, which is a `TiledImages` unless `images` or `normalization` are replaced."""
        made = super()._with(**changes)
        return made if {"images", "normalization"} & set(changes) else self._of(made, self.stored, self.tiles)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LabeledImages:
        """Return this set on another device or in another precision; see `LabeledImages.to`.

        Args:
            device: device of the images, the labels and the tensors in `columns`. Default: unchanged.
            dtype: dtype of the images and of soft or multi-label rows. Default: unchanged.
        """
        return self._of(super().to(device, dtype), self.stored.to(device, dtype), self.tiles)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the content of the set as in `LabeledImages.parts`, with the stored images as "images"."""
        tensors, facts = super().parts()
        return {**tensors, "images": self.stored}, {**facts, "tiles": self.tiles.factor}

    def with_stored(self, stored: Tensor) -> TiledImages:
        """Return this set with other stored images, and with the same labels and other properties.

        Args:
            stored: stored images, float [M, C, H, W]. M must be the number of stored images of this set.
        """
        made = self.replace(images=self.tiles.decode(stored))
        return self._of(made, stored, self.tiles)

    @staticmethod
    def _of(decoded: LabeledImages, stored: Tensor, tiles: Tiles) -> TiledImages:
        made = object.__new__(TiledImages)
        vars(made).update(vars(decoded), stored=stored, tiles=tiles)
        return made

    def __repr__(self) -> str:
        return super().__repr__().replace("LabeledImages(", f"TiledImages({len(self.stored)} stored images hold ", 1)


def _decoded(stored: Tensor, labels: Tensor, factor: int, **options: Any) -> TiledImages:
    return TiledImages(stored, labels, tiles=Tiles(factor), **options)


PARAMETRIZATIONS["tiles"] = _decoded
