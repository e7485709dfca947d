"""`Split`: the train and test sets of one dataset, and the way from raw pixels to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._sanity_checks import without_warnings
from distillkit._utils import check
from distillkit.normalization import Normalization
from distillkit.rng import derive
from distillkit.sets import Images, LabeledImages, as_set

__all__ = ["HOLD_OUT_SEED", "Split", "assemble", "hold_out", "hold_out_values", "sides", "split_by", "to_pixels"]

HOLD_OUT_SEED = 20_211
"""Which images a dataset without a test split of its own holds back: part of the dataset's definition, no option."""

_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Split:
    """One dataset in memory, as loaders return it; unpacks as `train, test`.

    Attributes:
        train: the training set.
        test: the test set, in the same normalisation.
        classes: the names of the classes, in label order.
        validation: the validation set, where the source has one.
        users: the names of the people whose images these are, where the source tells; the sets' column `user` counts
            in them.
        domains: the names of the sources that were joined (`load_domains`); the sets' column `domain` counts in them.
    """

    train: LabeledImages
    test: LabeledImages
    classes: tuple[str, ...]
    validation: LabeledImages | None = None
    users: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[LabeledImages]:
        yield self.train
        yield self.test


def hold_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Cut a set into what is kept and what is held back for a test: the same random part of every class each time.

    Args:
        labels: class indices int [N].
        fraction: of each class that is held back, in [0, 1); the number is rounded.

    Returns:
        Indices (kept, held back), int64, ascending.
    """
    rng = derive(HOLD_OUT_SEED, "hold out")
    held = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        members = (labels == k).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=rng)]
        held[shuffled[: round(fraction * len(members))]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def hold_out_values(labels: Tensor, values: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """`hold_out` for images of which several belong together: no value is both among what is kept and what is held.

    Args:
        labels: class indices int [N], of which a value's first image counts; or rows [N, K], of which none does.
        values: what belongs together, int64 [N].
        fraction: of the values of each class, in [0, 1).

    Returns:
        Indices (kept, held back), int64, ascending.
    """
    found, place = values.unique(return_inverse=True)
    first = torch.full((len(found),), len(values)).scatter_reduce(0, place, torch.arange(len(values)), "amin")
    of_values = labels[first] if labels.ndim == 1 else torch.zeros(len(found), dtype=torch.long)
    tested = torch.zeros(len(found), dtype=torch.bool)
    tested[hold_out(of_values, fraction)[1]] = True
    return (~tested[place]).nonzero().flatten(), tested[place].nonzero().flatten()


def split_by(data: Images, column: str, test_fraction: float = 0.2, *, classes: Sequence[str] | None = None) -> Split:
    """Cut one set into train and test so that no value of a column is in both: a picture, a patient, a writer.

    For sets in which several images belong together: of CIFAR-10-C's corruptions of one picture, or a patient's slices,
    a test must not see what was trained on. The sets' `info["apart"]` names the column, so that a study's validation
    set keeps to it too.

    Args:
        data: a set with that column.
        column: int64 [N]; what shares a number stays together.
        test_fraction: share of the column's values that become the test set, in [0, 1): a fixed random choice, the
            same in every call, and of each class alike, as far as the images of a value have one class. 0 gives an
            empty test set.
        classes: the names of the classes; default "0", "1", ...

    Raises:
        TypeError, ValueError: no such column, one that is no int64 [N], another number of names than classes, or a
            fraction that leaves one of the two without images.
    """
    data = as_set(data, name="data")
    if not isinstance(column, str) or column not in data.columns:
        raise ValueError(f"column must be one of {', '.join(sorted(data.columns)) or 'none'}, got {column!r}")
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    values = check.class_labels(data.columns[column], len(data), None, f"column {column!r}").cpu()
    names = tuple(str(k) for k in range(data.num_classes)) if classes is None else tuple(classes)
    if len(names) != data.num_classes:
        raise ValueError(f"classes must be {data.num_classes} names, got {len(names)}")
    kept, held = hold_out_values(data.labels.cpu(), values, test_fraction)
    if not len(kept) or (test_fraction and not len(held)):
        raise ValueError(
            f"test_fraction={test_fraction:g} of {len(values.unique())} values of {column!r} leaves no "
            f"{'train' if len(held) else 'test'} set; give another one"
        )
    parts = []
    for part, rows in (("train", kept), ("test", held)):
        own = data[rows.to(data.labels.device)]
        parts.append(own.replace(info={**data.info, "split": part, "test_fraction": test_fraction, "apart": column}))
    return Split(parts[0], parts[1], names, domains=tuple(data.info.get("domains", ())))


def to_pixels(images: Tensor, size: int | tuple[int, int] | None, channels: int | None) -> Tensor:
    """Bring images to the wanted size and channels, as float32 pixels in [0, 1].

    Args:
        images: uint8 in 0..255 or float in [0, 1], [N, C, H, W].
        size: height and width, or one number; None leaves them.
        channels: 1 or 3; None leaves them.

    Resizing is bilinear with antialiasing and ignores the aspect ratio; grey is the ITU-R 601 luma; grey to RGB
    repeats.
    """
    height, width = sides(size) or images.shape[-2:]
    channels = images.shape[1] if channels is None else check.one_of(channels, "channels", (1, 3))
    pixels = torch.empty(len(images), channels, height, width)
    for chunk, out in zip(images.split(1024), pixels.split(1024)):
        part = chunk.float() / 255 if chunk.dtype == torch.uint8 else chunk.float()
        if channels == 1 and part.shape[1] == 3:
            part = (part * part.new_tensor(_LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
        if part.shape[-2:] != (height, width):
            part = F.interpolate(part, (height, width), mode="bilinear", antialias=True)
        out.copy_(part)
    return pixels.clamp_(0, 1)


def assemble(
    pixels: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    classes: Sequence[str],
    normalization: Normalization | None,
    info: Mapping[str, Any],
    *,
    classes_given: bool = True,
    columns: Mapping[str, Mapping[str, Tensor]] | None = None,
    users: Sequence[str] = (),
    domains: Sequence[str] = (),
) -> Split:
    """Build a `Split` from the pixels and labels of `train`, `test` and perhaps `validation`.

    Args:
        pixels: by part, float [N, C, H, W] in [0, 1]; they are overwritten.
        labels: by part.
        classes: their names, in label order.
        normalization: of all parts; None measures mean and standard deviation on `train`.
        info: what every set says of its origin.
        classes_given: whether the classes are known apart from the labels, as by their names.
        columns: by part, what else belongs to each image.
        users, domains: what the columns `user` and `domain` count in.
    """
    normalization = normalization or Normalization.of(pixels["train"])
    sets = {}
    for part, images in pixels.items():
        for chunk in images.split(1024):
            chunk.copy_(normalization.encode(chunk))
        with without_warnings():  # a dull picture may look like pixels that were never normalised
            sets[part] = LabeledImages(
                images,
                labels[part],
                num_classes=len(classes),
                normalization=normalization,
                info={**info, "split": part},
                columns=(columns or {}).get(part),
                classes_given=classes_given,
            )
    return Split(
        sets["train"], sets["test"], tuple(classes), sets.get("validation"), users=tuple(users), domains=tuple(domains)
    )


def sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """The height and width that are asked for with `size`, see `to_pixels`; None for none.

    Raises:
        TypeError, ValueError: it is neither a number nor two.
    """
    if size is None:
        return None
    given: Any = (size, size) if isinstance(size, Integral) else size
    height, width = check.sequence(given, "size", "numbers of pixels (height, width), if not one number", 2)
    return check.positive_int(height, "size"), check.positive_int(width, "size")
