"""Parametrization of images as tiles: each stored image holds several smaller ones, which are decoded by upsampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit.sets._labeled import PARAMETRIZATIONS, LabeledImages

__all__ = ["TiledImages", "Tiles"]


@dataclass(frozen=True)
class Tiles:
    """Parametrization that stores `factor` x `factor` images in the pixels of one image.

    Pass it as `parametrize=` to a condenser. The condenser then optimizes stored images, each of which is cut into a
    grid of tiles. Each tile is enlarged to the full size by bilinear interpolation. At the same storage, a set has
    `factor ** 2` times as many images, at a lower resolution. Compare it with random images in the same
    parametrization, `random_subset(..., parametrize=Tiles(2))`, because those alone can beat a condensed set without
    tiles.

    Papers: Kim et al., "Dataset condensation via efficient synthetic-data parameterization" (IDC, ICML 2022), section
    3.2, uniform multi-formation; Zhao et al., "Improved distribution matching" (IDM, CVPR 2023), partitioning.

    Args:
        factor: number of tiles along each side; 1 stores images as they are. Height and width of the images must be
            divisible by it.

    Deviations: the authors of IDC pad images whose sides are not divisible; here they are refused. The tiles are
    ordered row by row; IDM orders them column by column.
    """

    factor: int = 2

    def __post_init__(self) -> None:
        check.positive_int(self.factor, "factor")

    @staticmethod
    def require(parametrize: Tiles | None) -> Tiles | None:
        """Check the argument `parametrize` of a condenser, and return it.

        Args:
            parametrize: a `Tiles`, or None.

        Raises:
            TypeError: it is neither.
        """
        if parametrize is not None and not isinstance(parametrize, Tiles):
            raise TypeError(f"parametrize must be a Tiles, such as Tiles(2), or None, got {parametrize!r}")
        return parametrize

    @property
    def count(self) -> int:
        """Number of images that each stored image decodes to."""
        return self.factor**2

    def require_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` if height or width of images of this shape is not divisible by the factor.

        Args:
            shape: shape whose last two entries are height and width.
        """
        if shape[-2] % self.factor or shape[-1] % self.factor:
            raise ValueError(
                f"parametrize=Tiles({self.factor}) needs images whose height and width are divisible by {self.factor}, "
                f"got {shape[-2]}x{shape[-1]}; choose another factor, or resize or pad the images"
            )

    def decode(self, stored: Tensor) -> Tensor:
        """Return the images [N * factor ** 2, C, H, W] that the stored images [N, C, H, W] hold.

        The images of one stored image follow one another, row by row. Gradients flow through this function.

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
        """Shrink images [N * factor ** 2, C, H, W], and place each `factor ** 2` in a row into one stored image.

        The result, [N, C, H, W], loses resolution: decoding it returns smoothed images.

        Args:
            images: images in the order of `decode`; their number must be divisible by `factor ** 2`.
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
        """Shrink the images of a set as in `encode`, and return the set of the smoothed images.

        Each image keeps its label and its row of the columns.

        Args:
            images: set of `M * factor ** 2` images.
        """
        stored = self.encode(images.images)
        return TiledImages._of(images.replace(images=self.decode(stored)), stored, self)

    def adjoint(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to the stored images, from the gradient with respect to the decoded ones.

        `decode` is linear, so this is its transpose.

        Args:
            gradient: gradient with respect to decoded images, [N * factor ** 2, C, H, W].
        """
        n, *shape = gradient.shape
        with torch.enable_grad():
            stored = gradient.new_zeros(n // self.count, *shape).requires_grad_()
            return torch.autograd.grad(self.decode(stored), stored, gradient)[0]


class TiledImages(LabeledImages):
    """Set whose images are decoded from fewer stored images by `Tiles`.

    Condensers with `parametrize=Tiles(...)` return such sets, and `LabeledImages.load` reads them from files. `images`,
    `labels` and `columns` are those of the decoded images, so training, evaluation, attacks and exports use what is
    decoded. A file written by `save` holds the stored images. Sets derived by replacing or selecting images are
    plain `LabeledImages`; other labels, columns or facts keep the parametrization.

    Args:
        stored: stored images, float [M, C, H, W], in the normalized space.
        labels: labels of the decoded images, class indices [M * factor ** 2] or rows [M * factor ** 2, K].
        tiles: the parametrization.
        options: further arguments of `LabeledImages`.

    Attributes:
        stored: stored images, float [M, C, H, W].
        tiles: the parametrization.
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
        """Decode a set of stored images. Each decoded image gets the label of its stored image.

        Args:
            stored: set whose images are stored images. Its columns are left out.
            tiles: the parametrization.
        """
        whole = stored.replace(
            images=tiles.decode(stored.images), labels=stored.labels.repeat_interleave(tiles.count, 0), columns={}
        )
        return TiledImages._of(whole, stored.images, tiles)

    def replace(self, **changes: Any) -> LabeledImages:
        """Return a copy with some parts replaced; see `LabeledImages.replace`.

        The copy has the same parametrization, unless `images` or `normalization` are replaced.

        Args:
            changes: constructor arguments by name.
        """
        made = super().replace(**changes)
        return made if {"images", "normalization"} & set(changes) else self._of(made, self.stored, self.tiles)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LabeledImages:
        """Return this set on another device or in another precision; see `LabeledImages.to`.

        Args:
            device: device of images, labels and columns. Default: unchanged.
            dtype: dtype of images and label rows. Default: unchanged.
        """
        return self._of(super().to(device, dtype), self.stored.to(device, dtype), self.tiles)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Split the set into named tensors, of which "images" are the stored images, and JSON values."""
        tensors, facts = super().parts()
        return {**tensors, "images": self.stored}, {**facts, "tiles": self.tiles.factor}

    def with_stored(self, stored: Tensor) -> TiledImages:
        """Return this set with other stored images; labels, columns and facts stay.

        Args:
            stored: stored images, float [M, C, H, W], as many as this set has.
        """
        return self._of(self.replace(images=self.tiles.decode(stored)), stored, self.tiles)

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
