"""Random crops of a single image, which are reproducible from the image, the options and a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distillkit import rng
from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit._utils.conversion import channels_last
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.generate._crop import CropParameters, render
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets import LabeledImages

_TRIES = 32
_JITTER = ("brightness", "contrast", "saturation", "hue")


class Patches(Configurable):
    """Sequence of many training images, which are reproducible random crops of a single image.

    A crop is rendered when it is requested, and its pixels are rounded to 8 bits. Its random parameters are drawn from
    `rng.derive(seed, index)`, so two processes with the same image and options get identical crops. The
    processes can compare `digest`, a hash of the image and all options except `count`. The batch size and the number of
    threads have no effect. The two processes need equal versions of PyTorch and kornia, and the same kind of processor.

    The pipeline is that of Asano and Saeed, "The augmented image prior" (ICLR 2023), as used by Soni, Saeed and Asano,
    "Federated learning with a single shared image" (2024):

    1. a random square with the side `precrop` times the image's shorter side;
    2. a random-resized crop of the square to `int(sqrt(2) * size)` pixels, bicubic with antialiasing;
    3. a shear along x and then a rotation about the center, bilinear;
    4. a center crop to `size` pixels;
    5. an optional flip and color jitter.

    Args:
        image: the image [C, H, W], float in [0, 1] or uint8. Crops are rendered on its device. If C is not 3, the
            jitter skips saturation and hue.
        seed: seed of all random draws.
        size: side of a crop in pixels.
        count: number of crops. A larger count adds crops, and leaves the crops at smaller indices unchanged.
        precrop: side of the first square as a share of the image's shorter side, in (0, 1].
        area: range of the crop's area, as a share of the square's area, within (0, 1].
        aspect: range of the crop's aspect ratio, width / height, which is drawn log-uniformly.
        rotation: largest rotation in degrees; 35 in the paper, 30 in the authors' code.
        shear: largest x-shear in degrees, below 90.
        flip: probability that a crop is mirrored. The paper mentions flips, but the authors' code has none.
        jitter: strengths of brightness, contrast, saturation and hue. Brightness, contrast and saturation change by
            factors within 1 +- strength. The hue is rotated on the color circle by up to +- strength full turns, where
            the strength is at most 0.5.
        jitter_probability: probability of color jitter. The order of the four operations is drawn for each crop.
        jpeg_quality: quality, 1 to 100, of a JPEG compression that is applied to each crop (75 in the authors' code);
            None for no compression.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Deviations: in the authors' code, threads share a random state, so no two runs give the same crops. Here each index
    has its own generator. At the border of the rotated crop, the crop fades to black over one pixel here, and over half
    a pixel in the authors' code.
    """

    def __init__(
        self,
        image: Tensor,
        seed: int = 0,
        *,
        size: int = 32,
        count: int = 50_000,
        precrop: float = 0.5,
        area: tuple[float, float] = (1 / 500, 1.0),
        aspect: tuple[float, float] = (3 / 4, 4 / 3),
        rotation: float = 30.0,
        shear: float = 30.0,
        flip: float = 0.0,
        jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
        jitter_probability: float = 0.5,
        jpeg_quality: int | None = None,
    ) -> None:
        self.image = _as_image(image)
        self.seed = check.positive_int(seed, "seed", least=0)
        self.size = check.positive_int(size, "size")
        self.count = check.positive_int(count, "count")
        self.precrop = check.real_number(precrop, "precrop", above=0.0, most=1.0)
        self.area = _range(area, "area", most=1.0)
        self.aspect = _range(aspect, "aspect")
        self.rotation = check.real_number(rotation, "rotation", least=0.0, most=180.0)
        self.shear = check.real_number(shear, "shear", least=0.0, below=90.0)
        self.flip = check.real_number(flip, "flip", least=0.0, most=1.0)
        strengths = check.sequence(jitter, "jitter", "strengths: brightness, contrast, saturation, hue", 4)
        self.jitter = tuple(check.real_number(s, "jitter", least=0.0, most=1.0) for s in strengths)
        if self.jitter[3] > 0.5:
            raise ValueError(f"jitter must be four strengths in [0, 1], the hue's in [0, 0.5], got {jitter}")
        self.jitter_probability = check.real_number(jitter_probability, "jitter_probability", least=0.0, most=1.0)
        self.jpeg_quality = None if jpeg_quality is None else check.positive_int(jpeg_quality, "jpeg_quality", most=100)
        channels, height, width = self.image.shape
        if jpeg_quality is not None and channels not in (1, 3):
            raise ValueError(f"jpeg_quality needs an image of 1 or 3 channels, got {channels}")
        if min(height, width) < size:
            raise ValueError(f"image must be at least size={size} pixels high and wide, got {height}x{width}")

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the source image and all options except `count`. Equal digests imply equal crops."""
        options = {k: v for k, v in vars(self).items() if k not in ("image", "count")}
        sha = hashlib.sha256(repr((tuple(self.image.shape), sorted(options.items()))).encode())
        sha.update(self.image.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def __len__(self) -> int:
        return self.count

    def crop_parameters(self, index: int) -> CropParameters:
        """Return the parameters of the crop at `index`, without rendering the crop.

        Raises:
            TypeError, IndexError: the index is not an integer, or outside [0, count).
        """
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"index must be an int, got {type(index).__name__}")
        if not 0 <= index < self.count:
            raise IndexError(f"index must be in [0, {self.count}), got {index}")
        draws = torch.rand(14 + 4 * _TRIES, generator=rng.derive(self.seed, index), dtype=torch.float64).tolist()
        at_top, at_left, angle, slant, flip, jittered, *rest = draws
        strengths, order, tries = rest[:4], rest[4:8], rest[8:]

        _, height, width = self.image.shape
        side = max(1, int(self.precrop * min(height, width)))
        top, left = int(at_top * (height - side + 1)), int(at_left * (width - side + 1))
        down, right, h, w = self._resized_crop(side, tries)

        jitter: list[tuple[str, float]] = []
        if jittered < self.jitter_probability:
            amounts = [(2 * u - 1) * s for u, s in zip(strengths, self.jitter, strict=True)]
            jitter = [(_JITTER[k], amounts[k]) for k in sorted(range(4), key=order.__getitem__) if self.jitter[k]]
        return CropParameters(
            top=top + down,
            left=left + right,
            height=h,
            width=w,
            rotation=(2 * angle - 1) * self.rotation,
            shear=(2 * slant - 1) * self.shear,
            flip=flip < self.flip,
            jitter=tuple(jitter),
        )

    def _resized_crop(self, side: int, tries: list[float]) -> tuple[int, int, int, int]:
        """Return the rectangle (top, left, height, width) of the random-resized crop in a square of side `side`.

        `tries` has four uniform random numbers per attempt, which determine a rectangle. The first rectangle that fits
        into the square is returned. If none fits, the whole square is returned.
        """
        low, high = math.log(self.aspect[0]), math.log(self.aspect[1])
        for k in range(0, len(tries), 4):
            share, ratio, at_top, at_left = tries[k : k + 4]
            area = side * side * (self.area[0] + share * (self.area[1] - self.area[0]))
            aspect = math.exp(low + ratio * (high - low))
            h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < h <= side and 0 < w <= side:
                return int(at_top * (side - h + 1)), int(at_left * (side - w + 1)), h, w
        return 0, 0, side, side

    def _pixels(self, index: int) -> Tensor:
        return render(self.image, self.crop_parameters(index), self.size, self.jpeg_quality)

    def __getitem__(self, index: int) -> Tensor:
        return self._pixels(index).float() / 255

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(self.count))

    def batch(self, indices: Sequence[int] | Tensor, *, progress: bool = True) -> Tensor:
        """Render the crops at the given indices, and return them as float [B, C, size, size] in [0, 1].

        Args:
            indices: indices of the crops, in the order of the result.
            progress: whether to show a progress bar.

        Raises:
            TypeError, IndexError: an index is not an integer, or is outside [0, count).
        """
        if not len(indices):
            return self.image.new_empty(0, len(self.image), self.size, self.size)
        rows = torch.as_tensor(indices)
        if rows.is_floating_point() or rows.dtype == torch.bool or rows.ndim != 1:
            raise TypeError(f"indices must be integers [B], got {rows.dtype} {list(rows.shape)}")
        crops = []
        with bar(len(rows), "cropping", unit="crop", progress=progress) as shown:
            for i in rows.tolist():
                crops.append(self._pixels(i))
                shown.update()
        return torch.stack(crops).float() / 255

    def chunks(self, size: int = 500, indices: Sequence[int] | Tensor | None = None) -> Iterator[Tensor]:
        """Render crops of the source image in chunks, to limit the memory use.

        Args:
            size: number of crops per chunk.
            indices: indices of the crops, in the order of the result; default: all crops.

        Yields:
            Crops, float [B, C, H, W] in [0, 1], where B is `size` except in the last chunk, which may be smaller.
        """
        size = check.positive_int(size, "size")
        chosen: Sequence[int] | Tensor = range(self.count) if indices is None else indices
        for start in range(0, len(chosen), size):
            yield self.batch(chosen[start : start + size])

    def set(
        self,
        indices: Sequence[int] | Tensor,
        labels: Tensor,
        *,
        num_classes: int | None = None,
        normalization: Normalization = IDENTITY,
    ) -> LabeledImages:
        """Return labeled crops as a training set, whose column `"index"` contains the indices of the crops.

        Args:
            indices: indices of the crops.
            labels: class index int [B], or soft label float [B, K], of each crop, for example from a teacher.
            num_classes, normalization: number of classes and normalization of the set; see `LabeledImages`.
        """
        rows = torch.as_tensor(indices, dtype=torch.long, device=self.image.device)
        info = {"method": "patches", "derived": "patches", "seed": self.seed, "digest": self.digest, **provenance()}
        return LabeledImages.from_pixels(
            self.batch(rows),
            labels,
            normalization=normalization,
            num_classes=num_classes,
            columns={"index": rows},
            info=info,
        )

    def __repr__(self) -> str:
        c, h, w = self.image.shape
        return f"Patches({self.count} crops of {self.size}x{self.size} from {c}x{h}x{w}; seed={self.seed})"


def _as_image(image: Tensor) -> Tensor:
    if isinstance(image, Tensor) and image.dtype == torch.uint8:
        image = image.float() / 255
    if not isinstance(image, Tensor) or not image.is_floating_point() or image.ndim != 3:
        what = f"{image.dtype} {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise TypeError(f"image must be a float or uint8 tensor [C, H, W], got {what}")
    check.batch_of_images(image[None], "image")
    if channels_last(image.shape):
        raise ValueError(f"image must be [C, H, W], got {list(image.shape)}: try image.permute(2, 0, 1)")
    if float(image.min()) < 0 or float(image.max()) > 1:
        raise ValueError(f"image must be pixels in [0, 1], got [{float(image.min()):.3g}, {float(image.max()):.3g}]")
    return image.detach().float().contiguous()


def _range(values: tuple[float, float], name: str, most: float = math.inf) -> tuple[float, float]:
    given = check.sequence(values, name, "numbers (low, high)", 2)
    low, high = (check.real_number(v, name, above=0.0, most=most) for v in given)
    if low > high:
        raise ValueError(f"{name} must be (low, high), got {values}")
    return low, high
