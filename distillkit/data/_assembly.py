"""Construction of a `Split` from pixels in memory, or of a `StoredSplit` from cached pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distillkit._utils.pixels import Size, to_pixels
from distillkit._utils.user_warnings import without_warnings
from distillkit.data._cache import Cache, cached_normalization
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages, StoredImages


@dataclass(frozen=True)
class SplitBuilder:
    """Builder of a `Split` or `StoredSplit`, which has the parts `train`, `test` and possibly `validation`.

    Attributes:
        labels: labels of each part.
        classes: class names, in label order.
        normalization: normalization of all parts. With None, the mean and standard deviation of `train` are
            measured.
        info: description of the data's origin, which is stored in the `info` of every set.
        classes_given: whether the caller declared the classes. False means that they were found in the data: in the
            labels that occur, or in a listing of folders.
        columns: further columns of each part by name, such as `user`.
        users: names of the users who own the images. The column `user` contains indices into them.
        domains: names of the sources of the images. The column `domain` contains indices into them.
    """

    labels: Mapping[str, Tensor]
    classes: Sequence[str]
    normalization: Normalization | None
    info: Mapping[str, Any]
    classes_given: bool = True
    columns: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    users: Sequence[str] = ()
    domains: Sequence[str] = ()

    def build(self, pixels: Mapping[str, Tensor]) -> Split:
        """Build a split whose normalized images are in memory.

        Args:
            pixels: pixels of each part of the split ("train", "test" and possibly "validation"), float [N, C, H, W] in
                [0, 1]. They are overwritten by the normalized images.
        """
        normalization = self.normalization or Normalization.of(pixels["train"])
        sets = {}
        for part, images in pixels.items():
            for chunk in images.split(1024):
                chunk.copy_(normalization.encode(chunk))
            with without_warnings():  # dark pictures may look like pixels that were never normalized
                sets[part] = LabeledImages(images, self.labels[part], **self._options(part, normalization))
        names = {"users": tuple(self.users), "domains": tuple(self.domains)}
        return Split(sets["train"], sets["test"], tuple(self.classes), sets.get("validation"), **names)

    def build_stored(self, cache: Cache, rows: Mapping[str, Tensor]) -> StoredSplit:
        """Build a split whose images stay in a cache.

        Args:
            cache: cache with the pictures of all parts of the split ("train", "test" and possibly "validation").
            rows: for each part, the indices of its pictures in the cache.
        """
        normalization = self.normalization or cached_normalization(cache.sums[rows["train"]], cache.file.shape)
        sets = {
            part: StoredImages(cache.file, own, self.labels[part], **self._options(part, normalization))
            for part, own in rows.items()
        }
        classes, users = tuple(self.classes), tuple(self.users)
        return StoredSplit(sets["train"], sets["test"], classes, sets.get("validation"), users=users)

    def _options(self, part: str, normalization: Normalization) -> dict[str, Any]:
        return {
            "num_classes": len(self.classes),
            "normalization": normalization,
            "columns": self.columns.get(part),
            "info": {**self.info, "split": part},
            "classes_given": self.classes_given,
            "class_names": self.classes if self.classes_given or "classes" in self.info else (),
        }


def assemble_raw(
    raw: Mapping[str, tuple[Tensor, Tensor]],
    classes: Sequence[str],
    dataset: str,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Build a `Split` from raw images and labels.

    Args:
        raw: images and labels of each part ("train", "test" and possibly "validation"); images are [N, C, H, W], uint8
            or float in [0, 1].
        classes: class names, in label order.
        dataset: name of the dataset.
        size, channels, normalization: as in `load`.
    """
    pixels = {part: to_pixels(images, size, channels) for part, (images, _) in raw.items()}
    labels = {part: own for part, (_, own) in raw.items()}
    return SplitBuilder(labels, classes, normalization, {"dataset": dataset}).build(pixels)
