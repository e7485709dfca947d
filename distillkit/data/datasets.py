"""Table of named datasets, and the functions that load or open a dataset by name.

To add a dataset of torchvision, add a row `_torchvision(...)` to `DATASETS`. The row's arguments are those of
`load_torchvision`. Their defaults are right for torchvision's class `MNIST`; pass other values where another
torchvision class needs them. To add any other dataset, write a reader module in `distillkit.data.readers`, and add a
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from distillkit._utils.pixels import AnyPath, Size
from distillkit.data._assembly import assemble_raw
from distillkit.data._data_root import data_root
from distillkit.data.lookalike_digits import mnist_m_like, synth_digits_like
from distillkit.data.readers import _torchvision as tv
from distillkit.data.readers._digits import load_digits
from distillkit.data.readers._ganin_digits import load_mnist_m, load_synth_digits
from distillkit.data.readers._medmnist import CLASSES as MEDMNIST_CLASSES
from distillkit.data.readers._medmnist import read_medmnist
from distillkit.data.readers._picture_list import PictureList, load_pictures, open_pictures
from distillkit.data.readers._tiny_imagenet import list_tiny_imagenet
from distillkit.data.readers.celeba import list_celeba, list_leaf_celeba
from distillkit.data.readers.cifar10c import split_cifar10c
from distillkit.data.readers.femnist import load_femnist
from distillkit.data.readers.flair import list_flair
from distillkit.data.readers.npz import load_npz, open_npz
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import IDENTITY, Normalization


@dataclass(frozen=True)
class Dataset:
    """Description of a named dataset: one row of the table `DATASETS`.

    Attributes:
        load: function that reads the dataset into memory: `load(path, size=, channels=, normalization=)`.
        shape: default shape (C, H, W) of the images.
        counts: number of images in the training, test and, if there is one, validation split. Empty if the numbers
            depend on the files.
        files: description of the required files or folders below the data root; "" if the dataset needs none.
        classes: class names; empty if the files contain them.
        normalization: published mean and standard deviation of the training split. With None, they are measured.
        folder: folder below the data root that is passed to the functions `load` and `open`.
        open: function that opens the dataset as a `StoredSplit`, without loading all images; None for small datasets.
        can_download: whether the function `load` accepts `download=`.
        sides: further available side lengths of the images, in pixels. The function `load` in this module accepts a
            side length as a suffix of the dataset's name, for example `pathmnist_64`.
        options: names of the dataset's own options in `load` and `open_dataset`.
    """

    load: Callable[..., Split]
    shape: tuple[int, int, int]
    counts: tuple[int, ...] = ()
    files: str = ""
    classes: tuple[str, ...] = ()
    normalization: Normalization | None = None
    folder: str = ""
    open: Callable[..., StoredSplit] | None = None
    can_download: bool = False
    sides: tuple[int, ...] = ()
    options: tuple[str, ...] = ()


def _torchvision(
    name: str,
    loader: str,
    files: tuple[str, ...],
    shape: tuple[int, int, int],
    counts: tuple[int, int],
    normalization: Normalization,
    classes: tuple[str, ...] = (),
    **options: Any,
) -> Dataset:
    load = partial(tv.load_torchvision, name=name, loader=loader, files=files, classes=classes or None, **options)
    return Dataset(load, shape, counts, files[0], classes, normalization, can_download=True)


def _medmnist(name: str, channels: int, *counts: int) -> Dataset:
    return Dataset(
        partial(read_medmnist, load_npz, name=name), (channels, 28, 28), counts, f"{name}.npz", MEDMNIST_CLASSES[name],
        open=partial(read_medmnist, open_npz, name=name), sides=(64, 128, 224),
    )  # fmt: skip


def _pictures(
    list_pictures: Callable[..., PictureList], folder: str, shape: tuple[int, int, int], counts: tuple[int, ...] = (),
    classes: tuple[str, ...] = (), options: tuple[str, ...] = (), **defaults: Any,
) -> Dataset:  # fmt: skip
    return Dataset(
        partial(load_pictures, list_pictures, **defaults), shape, counts, folder, classes, folder=folder,
        open=partial(open_pictures, list_pictures, **defaults), options=(*options, "progress"),
    )  # fmt: skip


def _load_mnist_m_like(root: Path, *, download: bool = False, **options: Any) -> Split:
    digits = load("mnist", root=root, download=download)
    return assemble_raw(_raw(mnist_m_like(digits, normalization=IDENTITY)), _DIGITS, "mnistm-like", **options)


def _load_synth_digits_like(root: None, **options: Any) -> Split:
    return assemble_raw(_raw(synth_digits_like(normalization=IDENTITY)), _DIGITS, "synthdigits-like", **options)


def _raw(made: Split) -> dict[str, tuple[Tensor, Tensor]]:
    return {part: (data.images, data.labels) for part, data in zip(("train", "test"), made)}


_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

DATASETS: dict[str, Dataset] = {
    "digits": Dataset(
        load_digits, (1, 8, 8), (1_438, 359), "", _DIGITS, Normalization([0.3050], [0.3760])
    ),
    "mnist": _torchvision(
        "mnist", "MNIST", tv.idx_files("MNIST"), (1, 28, 28), (60_000, 10_000), Normalization([0.1307], [0.3081]),
        _DIGITS,
    ),
    "fashionmnist": _torchvision(
        "fashionmnist", "FashionMNIST", tv.idx_files("FashionMNIST"), (1, 28, 28), (60_000, 10_000),
        Normalization([0.2860], [0.3530]), _FASHION,
    ),
    "usps": _torchvision(
        "usps", "USPS", tv.USPS_FILES, (1, 16, 16), (7_291, 2_007), Normalization([0.2539], [0.3842]), _DIGITS,
        folder="USPS",
    ),
    "svhn": _torchvision(
        "svhn", "SVHN", tv.SVHN_FILES, (3, 32, 32), (73_257, 26_032),
        Normalization([0.4377, 0.4438, 0.4728], [0.1980, 0.2010, 0.1970]), _DIGITS,
        folder="SVHN", split_options=({"split": "train"}, {"split": "test"}), labels="labels",
    ),
    "cifar10": _torchvision(
        "cifar10", "CIFAR10", tv.CIFAR10_FILES, (3, 32, 32), (50_000, 10_000), tv.CIFAR10_NORMALIZATION,
        tv.CIFAR10_CLASSES,
    ),
    "cifar100": _torchvision(
        "cifar100", "CIFAR100", tv.CIFAR100_FILES, (3, 32, 32), (50_000, 10_000),
        Normalization([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ),
    "mnistm": Dataset(load_mnist_m, (3, 32, 32), (), "MNIST-M", _DIGITS),
    "synthdigits": Dataset(load_synth_digits, (3, 32, 32), (), "SynthDigits", _DIGITS),
    "mnistmlike": Dataset(
        _load_mnist_m_like, (3, 28, 28), (60_000, 10_000), "MNIST/raw", _DIGITS, can_download=True
    ),
    "synthdigitslike": Dataset(_load_synth_digits_like, (3, 32, 32), (10_000, 2_000), "", _DIGITS),
    "tinyimagenet": _pictures(
        list_tiny_imagenet, "tiny-imagenet-200", (3, 64, 64), (100_000, 10_000), channels=3
    ),
    "pathmnist": _medmnist("pathmnist", 3, 89_996, 7_180, 10_004),
    "chestmnist": _medmnist("chestmnist", 1, 78_468, 22_433, 11_219),
    "dermamnist": _medmnist("dermamnist", 3, 7_007, 2_005, 1_003),
    "octmnist": _medmnist("octmnist", 1, 97_477, 1_000, 10_832),
    "pneumoniamnist": _medmnist("pneumoniamnist", 1, 4_708, 624, 524),
    "retinamnist": _medmnist("retinamnist", 3, 1_080, 400, 120),
    "breastmnist": _medmnist("breastmnist", 1, 546, 156, 78),
    "bloodmnist": _medmnist("bloodmnist", 3, 11_959, 3_421, 1_712),
    "tissuemnist": _medmnist("tissuemnist", 1, 165_466, 47_280, 23_640),
    "organamnist": _medmnist("organamnist", 1, 34_561, 17_778, 6_491),
    "organcmnist": _medmnist("organcmnist", 1, 12_975, 8_216, 2_392),
    "organsmnist": _medmnist("organsmnist", 1, 13_932, 8_827, 2_452),
    "cifar10c": Dataset(
        split_cifar10c, (3, 32, 32), (152_000, 38_000), "CIFAR-10-C", tv.CIFAR10_CLASSES,
        tv.CIFAR10_NORMALIZATION, folder="CIFAR-10-C",
        options=("corruptions", "severities", "pictures", "test_fraction", "hold_out"),
    ),
    "femnist": Dataset(load_femnist, (1, 28, 28), (), "femnist", folder="femnist"),
    "celeba": _pictures(
        list_celeba, "celeba", (3, 84, 84), (162_770, 19_962, 19_867), ("not Smiling", "Smiling"), ("attributes",),
        size=84,
    ),
    "leaf-celeba": _pictures(
        list_leaf_celeba, "leaf-celeba", (3, 84, 84), (), ("not Smiling", "Smiling"), ("images",), size=84
    ),
    "flair": _pictures(
        list_flair, "flair", (3, 256, 256), (345_879, 43_960, 39_239), (), ("labels",), channels=3
    ),
}  # fmt: skip
"""All datasets that `load` can load, by name."""

NAMES = tuple(DATASETS)
"""All names that `load` accepts."""


def load(
    name: str,
    *,
    root: AnyPath | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    download: bool = False,
    **options: Any,
) -> Split:
    """Load a dataset by name into memory, as float32 tensors. The result unpacks as `train, test`.

    Args:
        name: one of `NAMES`. Case, hyphens and underscores do not matter. `digits` (the 1,797 8x8 digits that
            scikit-learn contains) and `synthdigits-like` need no files; `mnistm-like` needs the files of MNIST. A
            suffix selects a version of a MedMNIST set with larger images: `pathmnist_64`, `pathmnist_128` or
            `pathmnist_224`.
        root: the data root. It contains the files that `DATASETS[name].files` lists. Instead of torchvision's files, it
            may contain a file in MedMNIST's layout, for example `cifar10.npz` (see `load_npz`). Default: the folder in
            the environment variable `DISTILLKIT_DATA`.
        size: height and width in pixels, or one number for square images. Resizing is bilinear with antialiasing.
            Default: the size in the dataset.
        channels: 1 to convert RGB to gray, or 3 to repeat gray as RGB. Default: the dataset's number of channels; 3 for
            Tiny-ImageNet, which contains some gray images.
        normalization: normalization of the sets. Default: the published mean and standard deviation of the training
            split at its original size. If none are published, or if RGB is converted to gray, they are measured on the
            training split.
        download: whether to download missing files into `root`. Only the datasets of torchvision can be downloaded.
        **options: further options of the dataset, which `DATASETS[name].options` lists. `attributes` of `celeba`: name
            of one of its 40 attributes, for the classes without and with it, or a list of names, for multi-label rows
            (default "Smiling"). `images` of `leaf-celeba`: the folder of the pictures (default
            `raw/img_align_celeba`). `labels` of `flair`: "coarse" for 17 categories, or "fine" for 1,628 labels.
            `corruptions` and `severities` of `cifar10c` (see `load_cifar10c`), whose test set shares no original image
            with its training set: `pictures`, the number of original images (default: all 10,000), `test_fraction`
            (default 0.2) and `hold_out` (see `split_by`). `progress` of datasets of pictures: whether to show a
            progress bar.

    `digits` has no test split, so a fixed random fifth of each class (359 images) is held out. The split `extra` of
    SVHN is not used. The test set of Tiny-ImageNet is its split `val`, because its split `test` has no labels. The
    110,000 images of Tiny-ImageNet take 5.4 GB as float32, and the faces of CelebA 17 GB at 84 pixels.
    `femnist`, `celeba`, `leaf-celeba` and `flair` have the column `user`: the person of each image, as an index into
    `Split.users`. Another folder than that of the table is read by `DATASETS[name].load(folder, ...)`.

    Raises:
        ValueError: the name is unknown, no data root is given, `size` or `channels` is invalid, or a file cannot be
            read or fails torchvision's checksum.
        TypeError: the dataset has no such option.
        FileNotFoundError: files are missing. The message lists them and says how to get them.
    """
    key, dataset = _find(name, options)
    if normalization is None and (published := dataset.normalization) is not None:
        own = len(published.mean)
        normalization = published if own == 1 or channels in (None, own) else None
    options |= _stated(size=size, channels=channels, normalization=normalization)
    if dataset.can_download:
        options["download"] = download
    return dataset.load(data_root(root, key) / dataset.folder if dataset.files else None, **options)


def open_dataset(
    name: str,
    *,
    root: AnyPath | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
    **options: Any,
) -> StoredSplit:
    """Open a large dataset by name, like `load`, but read images only when they are needed.

    Use it for Tiny-ImageNet (5.4 GB as floats), for MedMNIST sets with larger images, such as `pathmnist_224` (65 GB),
    and for CelebA and FLAIR.

    Args:
        name: name of a dataset in `DATASETS` for which `Dataset.open` is not None.
        root, size, channels, normalization: as in `load`.
        cache, progress: folder of the cache, and whether to show a progress bar; as in `open_folder`.
        workers: number of decoding threads. Default: the number of cores of this process.
        **options: further options of the dataset, as in `load`.

    Raises:
        ValueError: `Dataset.open` is None for this dataset, or a file cannot be read.
        FileNotFoundError: files are missing. The message says how to get them.
        OSError, distillkit.locking.InUse: the cache cannot be written; see `open_folder`.
    """
    key, dataset = _find(name, options)
    if dataset.open is None:
        large = ", ".join(known for known, row in DATASETS.items() if row.open)
        raise ValueError(f"name must be one of {large}, got {str(name)!r}; the other datasets are small: load(name)")
    options |= _stated(size=size, channels=channels, normalization=normalization)
    path = data_root(root, key) / dataset.folder
    return dataset.open(path, cache=cache, workers=workers, progress=progress, **options)


def _stated(**options: Any) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value is not None}


def _find(name: str, options: dict[str, Any]) -> tuple[str, Dataset]:
    """Return the key and row of a dataset in `DATASETS`, and add to `options` the side length that its name states."""
    wanted = str(name).lower().replace("-", "").replace("_", "")
    for key, dataset in DATASETS.items():
        for side in (None, *dataset.sides):
            if wanted == f"{key.replace('-', '')}{side or ''}":
                if unknown := [option for option in options if option not in dataset.options]:
                    own = ", ".join(dataset.options) or "none"
                    raise TypeError(f"{unknown[0]} is no option of {key}; its own options: {own}")
                options |= {"side": side} if side else {}
                return key, dataset
    raise ValueError(
        f"name must be one of {', '.join(NAMES)}, got {str(name)!r}; load your own pictures with load_folder(path), "
        "load_npz(path) or load_domains({name: path, ...})"
    )
