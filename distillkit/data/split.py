"""`Split` and `StoredSplit`: the training, test and validation sets of one dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distillkit._evaluation_checks import warn_of_overlap
from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.data._hold_out import HOLD_OUTS, HoldOut, hold_out_content, hold_out_values, record_digests, stricter
from distillkit.sets import Images, LabeledImages, StoredImages, as_set

_Images = TypeVar("_Images", LabeledImages, StoredImages)


@dataclass(frozen=True)
class _Parts(Generic[_Images]):
    """Parts of a dataset, in memory or on disk: the fields and checks of `Split` and `StoredSplit`."""

    train: _Images
    test: _Images
    classes: tuple[str, ...]
    validation: _Images | None = None
    users: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, data in (("test", self.test), ("validation", self.validation)):
            if data is not None:
                for what in ("shape", "normalization", "num_classes"):
                    one, other = getattr(self.train, what), getattr(data, what)
                    if one != other:
                        advice = "; give size= or channels=" if what == "shape" else ""
                        raise ValueError(f"train and {name} must have the same {what}, got {one} and {other}{advice}")
        if len(self.classes) != self.train.num_classes:
            raise ValueError(f"classes must be {self.train.num_classes} names, got {len(self.classes)}")

    def __iter__(self) -> Iterator[_Images]:
        yield self.train
        yield self.test


@dataclass(frozen=True)
class Split(_Parts[LabeledImages]):
    """Training, test and validation sets of a dataset in memory. `train, test = split` unpacks the first two.

    Attributes:
        train: the training set.
        test: the test set, with the same normalization.
        classes: the class names, in label order.
        validation: the validation set, or None if the source has none.
        users: the names of the users who own the images, if the source has users. The column `user` contains indices
            into this tuple.
        domains: the names of the sources that `load_domains` joined. The column `domain` contains indices into this
            tuple.
    """

    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredSplit(_Parts[StoredImages]):
    """Training, test and validation sets of a dataset on disk. `train, test = split` unpacks the training and the test
    set.

    Attributes:
        train: the training set.
        test: the test set, with the same normalization.
        classes: the class names, in label order.
        validation: the validation set, or None if the source has none.
        users: the names of the users who own the images, as in `Split`.
    """


_AnySplit = TypeVar("_AnySplit", Split, StoredSplit)


def warn_of_repeats(split: _AnySplit) -> _AnySplit:
    """Return a split that was read from files, after warning of equal images in `train` and another part, or with
    different labels in one part.
    """
    parts = {"train": split.train, "test": split.test, "validation": split.validation}
    known: set[bytes] = set()
    for part, data in parts.items():
        if data is None:
            continue
        digests, own = record_digests(data), dict[bytes, object]()
        differ = sum(own.setdefault(d, label) != label for d, label in zip(digests, data.labels.tolist()))
        if differ:
            warn(
                f"{differ} of {len(data)} images of {part} are equal to others with another label; give equal images "
                "the same label, or delete them"
            )
        if part == "train":
            known = set(own)
        else:
            warn_of_overlap(sum(d in known for d in digests), len(data), part, "in train")
    return split


def split_by(
    data: Images,
    column: str,
    test_fraction: float = 0.2,
    *,
    hold_out: HoldOut = "random",
    classes: Sequence[str] | None = None,
) -> Split:
    """Split a set into training and test sets with different values of a column, such as different patients.

    Use it for sets in which several images belong together, such as the corruptions of one image or the slices of one
    patient. Both sets store the name of the column in `info["apart"]`. If `distillkit.study` divides the training set
    further, it also keeps images with equal values together.

    Args:
        data: a set that has the column.
        column: name of a column with one integer per image, int64 [N]. Images with equal values stay together.
        test_fraction: share of the column's values that form the test set, in [0, 1); 0 gives an empty test set. Every
            call makes the same random choice. If images with the same value always have the same class, the share is
            applied to each class separately.
        hold_out: "random" (an even share of each class), or "content": a keyed hash of its value decides for each
            image, whatever the other images are. Differentially private functions require "content"; see `load_folder`.
        classes: class names. Default: the class names of the set, or "0", "1", ...

    Raises:
        TypeError, ValueError: the set has no such column, the column is not int64 [N], the number of class names is
            wrong, or one of the two sets would be empty by a random choice.
    """
    check.default_device()
    data = as_set(data, name="data")
    if not isinstance(column, str) or column not in data.columns:
        known = f"one of {', '.join(sorted(data.columns))}" if data.columns else "a column, but the set has none"
        raise ValueError(f"column must be {known}; got {column!r}, and data.replace(columns=...) adds one")
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    values = check.class_labels(data.columns[column], len(data), None, f"column {column!r}").cpu()
    own = data.class_names or tuple(str(k) for k in range(data.num_classes))
    names = own if classes is None else tuple(classes)
    if len(names) != data.num_classes:
        raise ValueError(f"classes must be {data.num_classes} names, got {len(names)}")
    check.one_of(hold_out, "hold_out", HOLD_OUTS)
    before = {name: data.info.get(name) for name in ("hold_out", "apart", "test_fraction")}
    earlier = int(data.info.get("content_splits", 0))  # equal keys would hold out nothing more
    if hold_out == "content":
        digests = (str(value).encode() for value in values.tolist())
        numbered = earlier > (before["hold_out"] != "random")  # else `before` tells apart the first and the second
        purpose = f"test {column} after {before}{f', split {earlier + 1}' if numbered else ''}"
        kept, held_out = hold_out_content(digests, test_fraction, purpose)
    else:
        kept, held_out = hold_out_values(data.labels.cpu(), values, test_fraction)
    if hold_out == "random" and (not len(kept) or (test_fraction and not len(held_out))):
        raise ValueError(
            f"test_fraction={test_fraction:g} of {len(values.unique())} values of {column!r} leaves no "
            f"{'train' if len(held_out) else 'test'} set; give another fraction"
        )
    made = stricter(before["hold_out"], hold_out if test_fraction else None)
    info = {**data.info, "test_fraction": test_fraction, "apart": column, **made}
    if hold_out == "content":
        info["content_splits"] = earlier + 1
    parts, given = [], data.class_names if classes is None else names
    for part, rows in (("train", kept), ("test", held_out)):
        kept_part = data[rows.to(data.labels.device)]
        parts.append(kept_part.replace(info={**info, "split": part}, class_names=given))
    return Split(parts[0], parts[1], names, domains=tuple(data.info.get("domains", ())))
