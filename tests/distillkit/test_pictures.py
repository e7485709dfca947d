"""A picture gives the same pixels, or the same refusal, in folders, cached folders and datasets."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from distillkit._utils.pictures import picture_array, picture_shape
from distillkit.data import load_folder, open_folder
from distillkit.normalization import IDENTITY
from distillkit.sets import as_set
from tests.refused import refused

RNG = np.random.default_rng(0)
GRAY, COLOR = RNG.integers(0, 256, (3, 5), dtype=np.uint8), RNG.integers(0, 256, (3, 5, 3), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (3, 5), dtype=np.uint16)
MASK = np.where(np.arange(5) % 2, 255, 0).astype(np.uint8) * np.ones((3, 1), np.uint8)
UPRIGHT: dict[int, Callable[[Any], Any]] = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}  # fmt: skip
"""How the pixels of a file with an EXIF orientation are turned (TIFF 6.0, tag 274)."""


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, *pictures: Any) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.pictures[index], index


def saved(image: Image.Image, suffix: str = ".png", **options: Any) -> Callable[[Path], Path]:
    def write(stem: Path) -> Path:
        image.copy().save(stem.with_suffix(suffix), **options)  # saving leaves traces in an image
        return stem.with_suffix(suffix)

    return write


def raw(suffix: str, content: bytes) -> Callable[[Path], Path]:
    def write(stem: Path) -> Path:
        stem.with_suffix(suffix).write_bytes(content)
        return stem.with_suffix(suffix)

    return write


def png(array: Any, color_type: int, *late: tuple[bytes, bytes]) -> bytes:
    """Return a 16-bit PNG, whose form Pillow does not write for colors, with further chunks after the pixels."""
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, color_type, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), *late, (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def with_alpha(array: Any, mask: Any = MASK) -> Image.Image:
    image = Image.fromarray(array)
    image.putalpha(Image.fromarray(mask))
    return image


def oriented(image: Image.Image, orientation: int) -> Image.Exif:
    exif = image.getexif()
    exif[0x0112] = orientation
    return exif


def turned(array: Any, orientation: int, suffix: str = ".png") -> tuple[Callable[[Path], Path], Any]:
    image = Image.fromarray(array)
    wanted = UPRIGHT[orientation](array) / np.iinfo(array.dtype).max
    return saved(image, suffix, exif=oriented(image, orientation)), wanted


OPAQUE = np.full((3, 5), 255, np.uint8)
PALETTE = Image.fromarray(GRAY % 2).convert("P")
PALETTE.putpalette([10, 20, 30, 200, 100, 0])
INK = Image.fromarray(np.stack([GRAY] * 4, 2), "CMYK")
READ: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "16-bit gray": (saved(Image.fromarray(DEEP)), DEEP / 65535),
    "16-bit gray TIFF": (saved(Image.fromarray(DEEP), ".tiff"), DEEP / 65535),
    "16-bit gray PGM": (raw(".pgm", b"P5 5 3 65535\n" + DEEP.astype(">u2").tobytes()), DEEP / 65535),
    "1 bit": (saved(Image.fromarray(GRAY > 99)), GRAY > 99),
    "gray": (saved(Image.fromarray(GRAY), ".bmp"), GRAY / 255),
    "opaque gray": (saved(with_alpha(GRAY, OPAQUE)), GRAY / 255),
    "opaque color": (saved(with_alpha(COLOR, OPAQUE)), COLOR / 255),
    "palette": (saved(PALETTE), np.array([[10, 20, 30], [200, 100, 0]])[GRAY % 2] / 255),
    "CMYK": (saved(INK, ".tiff"), np.array(INK.convert("RGB")) / 255),
    "one frame": (saved(PALETTE, ".gif"), np.array([[10, 20, 30], [200, 100, 0]])[GRAY % 2] / 255),
    **{f"orientation {k}": turned(COLOR, k) for k in UPRIGHT},
    "orientation of 16 bits": turned(DEEP, 6, ".tiff"),
    "orientation of gray": turned(GRAY, 5),
}  # fmt: skip
TRANSPARENT = "transparent; (give the gray value .*background=1|put them on a background in the dataset's transform)"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "16-bit color": (raw(".png", png(np.stack([DEEP] * 3, 2), 2)), "16 bits per value in mode RGB"),
    "32 bits": (saved(Image.fromarray(GRAY.astype(np.int32)), ".tiff"), "pixels of mode I have no defined range"),
    "floats": (saved(Image.fromarray(GRAY.astype(np.float32)), ".tiff"), "pixels of mode F have no defined range"),
    "animation": (saved(PALETTE, ".gif", save_all=True, append_images=[Image.new("L", (5, 3))]), "it has 2 frames"),
    "pages": (saved(Image.fromarray(GRAY), ".tiff", save_all=True, append_images=[PALETTE.copy()]), "it has 2 frames"),
    "transparent gray": (saved(with_alpha(GRAY)), TRANSPARENT),
    "transparent color": (saved(with_alpha(COLOR)), TRANSPARENT),
    "nearly opaque color": (saved(with_alpha(COLOR, OPAQUE - np.eye(3, 5, dtype=np.uint8))), TRANSPARENT),
    "transparent palette": (saved(PALETTE, transparency=0), TRANSPARENT),
    "transparent 16 bits": (saved(Image.fromarray(DEEP), transparency=int(DEEP[1, 1])), TRANSPARENT),
    "no picture": (raw(".png", b"no picture"), "cannot identify"),
    "cut": (raw(".png", png(DEEP, 0)[:60]), "truncated|cannot|not enough|broken"),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_a_picture_has_the_same_pixels_everywhere(kind: str, tmp_path: Path) -> None:
    write, wanted = READ[kind]
    (tmp_path / "a").mkdir()
    file = write(tmp_path / "a" / "0")
    expected = torch.as_tensor(np.array(wanted, dtype=np.float32)).reshape(*wanted.shape[:2], -1).permute(2, 0, 1)
    options: dict[str, Any] = {"test_fraction": 0.0, "normalization": IDENTITY}
    assert torch.allclose(load_folder(tmp_path, **options).train.images[0], expected, atol=1e-6)
    stored = open_folder(tmp_path, cache=tmp_path.with_name(f"{tmp_path.name}-cache"), **options).train.read()
    assert torch.allclose(stored.images[0], expected, atol=1 / 509)
    with Image.open(file) as lazy, Image.open(io.BytesIO(file.read_bytes())) as picture:
        picture.load()
        data = as_set(Pictures(lazy, picture))
    assert torch.allclose(data.images, expected.expand(2, *expected.shape), atol=1e-6)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_picture_that_cannot_be_respected_is_refused_everywhere(kind: str, tmp_path: Path) -> None:
    write, message = REFUSED[kind]
    (tmp_path / "a").mkdir()
    file = write(tmp_path / "a" / "0")
    for read in (load_folder, lambda path: open_folder(path, cache=tmp_path.with_name("cache"))):
        refused(partial(read, tmp_path), ValueError, rf"cannot (read picture|be read).*a/0\.\w+[: (]+.*({message})")
    if kind == "no picture":
        return
    with Image.open(file) as picture, pytest.raises(ValueError, match=rf"images\[0\] cannot be read: .*({message})"):
        as_set(Pictures(picture))


def test_hidden_16_bit_values_get_the_background(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    saved(Image.fromarray(DEEP), transparency=int(DEEP[1, 1]))(tmp_path / "a" / "0")
    for background in (0.0, 0.4, 1.0):
        wanted = torch.tensor(np.where(DEEP[1, 1] == DEEP, 65535 * background, DEEP) / 65535, dtype=torch.float32)
        found = load_folder(tmp_path, background=background, test_fraction=0.0, normalization=IDENTITY).train
        assert torch.allclose(found.images[0, 0], wanted)


def test_a_picture_that_is_turned_after_its_pixels_has_another_shape(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tag = oriented(Image.fromarray(DEEP), 6).tobytes().removeprefix(b"Exif\0\0")
    for name, late in (("0", []), ("1", [(b"eXIf", tag)])):
        raw(".png", png(DEEP, 0, *late))(tmp_path / "a" / name)
    words = r"^pictures differ: \S+0\.png is \[1, 3, 5\] \(C, H, W\), \S+1\.png is \[1, 5, 3\]; give size="
    for load in (load_folder, partial(open_folder, cache=tmp_path.with_name("cache"))):
        refused(partial(load, tmp_path), ValueError, words)


@pytest.mark.parametrize("ending", ["jpg", "png", "raw.png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_header_tells_the_shape(mode: str, orientation: int, ending: str, tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    text, raw_profile = PngInfo(), tags.tobytes().hex()  # as ImageMagick writes them
    text.add_text("Raw profile type exif", f"\nexif\n{len(raw_profile) // 2:8}\n{raw_profile}\n")
    how: dict[str, Any] = {"pnginfo": text} if "raw" in ending else {"exif": tags}
    Image.new(mode, (7, 4)).save(tmp_path / f"a.{ending}", **how)
    with Image.open(tmp_path / f"a.{ending}") as picture:
        shape = picture_shape(picture)
        array = picture_array(picture, None, "")
    assert shape == (1 if array.ndim == 2 else 3, *array.shape[:2])
    assert shape[1:] == ((7, 4) if orientation > 4 else (4, 7))
