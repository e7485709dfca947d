"""Reader of CIFAR-10-C: the test images of CIFAR-10 with 19 corruptions at 5 severities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, to_pixels
from distillkit._utils.user_warnings import without_warnings
from distillkit.data._hold_out import HoldOut
from distillkit.data.readers._torchvision import CIFAR10_CLASSES, CIFAR10_NORMALIZATION
from distillkit.data.split import Split, split_by
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages

__all__ = ["CIFAR10_NORMALIZATION"]

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression", "speckle_noise",
    "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The corruptions, by the names of their files. The benchmark reserves the last four for validation."""

_SEVERITIES = 5
_SOURCE = "https://zenodo.org/records/2535967 (CIFAR-10-C.tar)"


def load_cifar10c(
    path: AnyPath,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (5,),
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> LabeledImages:
    """Load CIFAR-10-C (Hendrycks and Dietterich, ICLR 2019) as one set with a domain per corruption and severity.

    Use it to test robustness, or for clients whose images differ in appearance. Each domain consists of the same 10,000
    test images of CIFAR-10, in the same order. There is no training split.

    Args:
        path: the folder `CIFAR-10-C`. It contains a file for each corruption, such as `fog.npy`, uint8 [50000, 32, 32,
            3], and `labels.npy`, uint8 [50000]. Each file has the 10,000 pictures at severity 1, then those at severity
            2, and so on up to 5. Only the requested domains are read.
        corruptions: names of corruptions from `CORRUPTIONS`. Default: all 19.
        severities: integers in 1..5. Default: 5, the strongest.
        size: height and width in pixels; see `load`.
        channels: number of channels, 1 or 3; see `load`.
        normalization: normalization of the set. Default: the normalization of `load("cifar10")`, so that networks
            trained on CIFAR-10 can be tested on this set. With channels=1, the normalization is measured on this set.

    Returns:
        A set with the domains one after the other: the corruptions in the given order, and for each corruption, the
        severities in the given order. The column `domain`, int64 [N], is the index of each picture's domain, and
        `info["domains"]` lists the names of the domains, such as `fog-5`. The column `picture`, int64 [N], is the index
        of the original picture in CIFAR-10's test split. Pictures with the same index show the same original, so a
        training and a test set must not share an index.

    All 19 corruptions at one severity are 190,000 pictures, which take 2.3 GB as float32 at 32x32 pixels.

    Raises:
        FileNotFoundError: files are missing. The message says where to get them.
        TypeError, ValueError: `corruptions` or `severities` is empty, a corruption is unknown or repeated, a severity
            is outside 1..5, or a file is damaged or has another layout.
    """
    folder = check.path(path, "path")
    names = check.sequence(corruptions, "corruptions", "names")
    names = tuple(check.one_of(name, "corruptions", CORRUPTIONS) for name in names)
    degrees = check.sequence(severities, "severities", "numbers in 1..5")
    degrees = tuple(check.positive_int(degree, "severities", most=_SEVERITIES) for degree in degrees)
    for option, given in (("corruptions", names), ("severities", degrees)):
        if not given or len(set(given)) != len(given):
            raise ValueError(f"{option} must be distinct, at least one, got {list(given)}")
    files = (*(f"{name}.npy" for name in names), "labels.npy")
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; get CIFAR-10-C from {_SOURCE}")
    labels = _array(folder / "labels.npy", None)
    blocks = [slice((d - 1) * len(labels) // _SEVERITIES, d * len(labels) // _SEVERITIES) for d in degrees]
    each = len(labels) // _SEVERITIES
    pixels = torch.empty(0)
    for number, name in enumerate(names):
        stored = _array(folder / f"{name}.npy", len(labels))
        for index, block in enumerate(blocks, number * len(blocks)):
            read = to_pixels(torch.from_numpy(np.array(stored[block])).permute(0, 3, 1, 2), size, channels)
            if not len(pixels):
                pixels = torch.empty(len(names) * len(blocks) * each, *read.shape[1:])
            pixels[index * each :][:each] = read
    if normalization is None:
        normalization = CIFAR10_NORMALIZATION if pixels.shape[1] == 3 else Normalization.of(pixels)
    domains = [f"{name}-{degree}" for name in names for degree in degrees]
    for chunk in pixels.split(1024):
        chunk.copy_(normalization.encode(chunk))
    with without_warnings():  # corrupted pictures may look like pixels that were never normalized
        return LabeledImages(
            pixels,
            torch.from_numpy(np.tile(labels[:each], len(domains)).astype(np.int64)),
            class_names=CIFAR10_CLASSES,
            normalization=normalization,
            columns={
                "domain": torch.arange(len(domains)).repeat_interleave(each),
                "picture": torch.arange(each).repeat(len(domains)),
            },
            info={"dataset": "cifar10c", "domains": domains},
        )


def split_cifar10c(
    path: AnyPath,
    *,
    pictures: int | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    **options: Any,
) -> Split:
    """Load CIFAR-10-C as training and test sets that share no original image, for clients with one corruption each.

    `partition.domains_by_dirichlet(split.train.labels, split.train.columns["domain"])` then divides the training set
    like FedLGD (Huang et al., TMLR 2024), into 57 clients. For FedLGD's images, pass `size=28,
    normalization=distillkit.normalization.IDENTITY`. The paper uses 6,000 images per corruption. The choice of the
    images, their severity, the test split and the random assignment to clients are not published.

    Args:
        path: the folder `CIFAR-10-C`, as in `load_cifar10c`.
        pictures: number of original images to use: the first `pictures` of the 10,000. Default: all.
        test_fraction: share of the images of each class that form the test set, in [0, 1). The random choice is the
            same in every call (see `split_by`), and for every corruption.
        hold_out: choice of this test set, "random" or "content"; see `split_by`.
        options: other options of `load_cifar10c`.

    Raises:
        FileNotFoundError, TypeError, ValueError: for the same reasons as in `load_cifar10c` and `split_by`.
    """
    data = load_cifar10c(path, **options)
    if pictures is not None:
        number = data.columns["picture"]
        check.positive_int(pictures, "pictures", most=int(number.max()) + 1)
        data = data[(number < pictures).nonzero().flatten()]
    return split_by(data, "picture", test_fraction, hold_out=hold_out)


def _array(file: Path, count: int | None) -> NDArray[Any]:
    """Memory-map a file and check its contents: `count` images, uint8 [count, H, W, 3], or labels, uint8 [N]."""
    try:
        stored = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged or not a .npy of plain numbers: {error}; get it from {_SOURCE}") from error
    if count is None:
        expected, fits = f"labels [N], the same for each of {_SEVERITIES} severities", False
        if isinstance(stored, np.ndarray) and stored.ndim == 1 and len(stored) and not len(stored) % _SEVERITIES:
            fits = bool((stored.reshape(_SEVERITIES, -1) == stored[: len(stored) // _SEVERITIES]).all())
    else:
        expected = f"pictures [{count}, H, W, 3]: as many as labels.npy has labels"
        fits = isinstance(stored, np.ndarray) and stored.ndim == 4 and (len(stored), stored.shape[3]) == (count, 3)
    if not fits or stored.dtype != np.uint8:
        found = f"{stored.dtype} {list(stored.shape)}" if isinstance(stored, np.ndarray) else "several arrays"
        raise ValueError(f"{file} must hold uint8 {expected}, got {found}; get it from {_SOURCE}")
    return stored
