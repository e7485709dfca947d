"""Reader of SynthDigits, digits that were drawn with the fonts of Windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data._assembly import assemble_raw
from distillkit.data.split import Split

__all__ = ["load_synth_digits", "require_colour_digits"]

_SOURCE = "http://yaroslav.ganin.net"


def load_synth_digits(root: Path, **options: Any) -> Split:
    """Load SynthDigits (Ganin and Lempitsky, ICML 2015).

    Args:
        root: the data root. Its folder `SynthDigits` contains `synth_train_32x32.mat` and `synth_test_32x32.mat`. As in
            SVHN, each file has the images `X`, uint8 [32, 32, 3, N], and the labels `y`, [N, 1], in which the digit 0
            may be labeled 10.
        options: the options `size`, `channels` and `normalization` of `distillkit.data.load`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a file is damaged, or has another layout.
    """
    folder = root / "SynthDigits"
    files = {part: folder / f"synth_{part}_32x32.mat" for part in ("train", "test")}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(
            f"synthdigits is not complete in {folder}: missing {', '.join(missing)}. Get them from {_SOURCE}, not "
            "with download=. Or load synthdigits-like, which needs no files."
        )
    raw = {part: _read(file) for part, file in files.items()}
    return assemble_raw(raw, tuple("0123456789"), "synthdigits", **options)


def _read(file: Path) -> tuple[Tensor, Tensor]:
    """Read images uint8 [N, 3, H, W] and labels from a `.mat` file in SVHN's layout."""
    from scipy.io import loadmat

    try:
        content = loadmat(file)
        images, labels = content["X"], np.asarray(content["y"]).reshape(-1)
    except Exception as error:
        raise ValueError(f"{file} is damaged or lacks X or y: {error or type(error).__name__}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2:] != (3, len(labels)):
        raise ValueError(
            f"{file} must hold X, uint8 [H, W, 3, N], and y, N labels, got {images.dtype} {list(images.shape)} and "
            f"{len(labels)} labels"
        )
    digits = torch.from_numpy(labels.astype(np.int64))
    digits[digits == 10] = 0
    return require_colour_digits(file, torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), digits)


def require_colour_digits(file: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check that the content of a file is color images [N, 3, H, W] of digits, and return images and labels."""
    if not len(images) or images.shape[1] != 3 or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise ValueError(f"{file} must hold colour pictures of the digits 0..9, at least one")
    return images, labels
